// The arithmetic of one instruction path, written once over the vectors of `vec_*.h`.
//
// Every output value is one tree of operations in a fixed order: how many rows, lines or threads work beside it never
// reaches its bits.  Included by exactly one translation unit per path, after its vectors and its `Dot`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "arithmetic.h"
#include "mix.h"

namespace {

using batchgen::Arithmetic;
using batchgen::Best;
using batchgen::Finish;
using batchgen::PAGE;
using batchgen::PANEL;
using batchgen::Queries;

constexpr int PANEL_VECS = PANEL / LANES;
constexpr float LOWEST = -INFINITY;  // below any finite score

template <class S> constexpr int PAIR = sizeof(S) == 2 ? 2 : 1;

// What the values of a row are in where a dot product takes them.
template <class S> using Input = typename Dot<S>::Input;
template <class S> constexpr bool WIDENS = !std::is_same_v<S, Input<S>>;

// What storing x in S and loading it again gives.
template <class S> inline Vec rounded(Vec x) {
  if constexpr (sizeof(S) == 4) return x;
  return as_half(x);
}

// Values [0, count) of x, zeros behind; count <= LANES.
template <class S> inline Vec load_part(const S* p, int count) {
  if (count == LANES) return load(p);
  alignas(64) S part[LANES] = {};
  std::memcpy(part, p, count * sizeof(S));
  return load(part);
}
template <class S> inline void store_part(S* p, Vec x, int count) {
  if (count == LANES) return store(p, x);
  alignas(64) S part[LANES];
  store(part, x);
  std::memcpy(p, part, count * sizeof(S));
}

// How many of the values from `begin` to before `end` go into one vector.
inline int part(int64_t begin, int64_t end) { return end - begin < LANES ? static_cast<int>(end - begin) : LANES; }

constexpr float LOG2_E = 1.44269504088896341f;

// e^x for x <= 88, 0 below -87.  Range reduction by Cody and Waite (1980), Taylor terms to the 7th: under 2 ulp.
inline Vec exponential(Vec x) {
  const Vec n = nearest(mul(x, set1(LOG2_E)));
  const Vec r = fma(n, set1(-1.42860682030941723212e-6f), fma(n, set1(-0.693145751953125f), x));
  Vec y = set1(1.f / 5040);
  for (float term : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) y = fma(y, r, set1(term));
  return keep_unless_less(x, set1(-87.f), mul(y, power_of_two(max(n, set1(-126.f)))));
}

// 2^x for x <= 127; subnormal or 0 below -126.  Taylor terms to the 7th: under 2 ulp.
inline Vec power(Vec x) {
  const Vec bounded = max(set1(-150.f), x), n = nearest(bounded), r = sub(bounded, n);
  Vec y = set1(1.52527338e-5f);
  for (float term : {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f,
                     1.f})
    y = fma(y, r, set1(term));
  return times_power_of_two(y, n);
}

// --- products --------------------------------------------------------------------------------------------------------

// acc[r][v] += what one step of a pair in row r adds to V vectors of outputs, whose weights begin at `line`; `row`
// tells where the values are.  W vectors are looked at together: their weights need registers beside the sums.
template <class S, int STEP, int R, int V, class Row>
inline void add_step(Vec (&acc)[R][V], const S* line, Row row) {
  constexpr int W = R * V + V < REGISTERS - 1 ? V : V / 2;
#pragma GCC unroll 4
  for (int first = 0; first < V; first += W) {
    decltype(Dot<S>::template weight<STEP>(line)) w[W];
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) w[v] = Dot<S>::template weight<STEP>(line + (first + v) * LANES * PAIR<S>);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const auto x = Dot<S>::template value<STEP>(row(r));
#pragma GCC unroll 4
      for (int v = 0; v < W; v++) acc[r][first + v] = Dot<S>::step(acc[r][first + v], x, w[v]);
      // Loaded earlier, the next row's value would push sums out of registers.
      if constexpr (REGISTERS < 32) asm volatile("" : : : "memory");
    }
  }
}

template <class S, int R, int V, class Row> inline void add_pair(Vec (&acc)[R][V], const S* line, Row row) {
  add_step<S, 0>(acc, line, row);
  if constexpr (Dot<S>::STEPS > 1) add_step<S, 1>(acc, line, row);
}

template <int R, int V> inline void clear(Vec (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[r][v] = zero();
}

template <int R, int V> inline void load(Vec (&acc)[R][V], const float* from, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[r][v] = load(from + r * stride + v * LANES);
}

template <int R, int V> inline void store(float* to, int64_t stride, const Vec (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(to + r * stride + v * LANES, acc[r][v]);
}

// How many vectors of a panel are summed up at once for R rows: all that registers hold.
template <int R> constexpr int SUMMED = R * PANEL_VECS + 2 < REGISTERS - 1 ? PANEL_VECS : PANEL_VECS / 2;

// Sums go on from those in `tile`, where `more` says that there are some.
template <class S, int R>
void product_rows(const Input<S>* x, int64_t stride, const S* panel, int64_t steps, float* tile, bool more) {
  constexpr int V = SUMMED<R>;
  for (int first = 0; first < PANEL_VECS; first += V) {
    Vec acc[R][V];
    if (more) load(acc, tile + first * LANES, PANEL);
    else clear(acc);
    for (int64_t k = 0; k < steps; k++) {
      const S* line = panel + k * PANEL * PAIR<S>;
      _mm_prefetch(reinterpret_cast<const char*>(line) + 4096, _MM_HINT_T0);
      if constexpr (sizeof(S) == 2) _mm_prefetch(reinterpret_cast<const char*>(line) + 4160, _MM_HINT_T0);
      add_pair<S>(acc, line + first * LANES * PAIR<S>, [&](int r) { return x + r * stride + k * PAIR<S>; });
    }
    store(tile + first * LANES, PANEL, acc);
  }
}

template <class S, int R>
void product_of(const Input<S>* x, int64_t stride, int rows, const S* panel, int64_t steps, float* tile, bool more) {
  if constexpr (R > 0) {
    if (rows == R) return product_rows<S, R>(x, stride, panel, steps, tile, more);
    product_of<S, R - 1>(x, stride, rows, panel, steps, tile, more);
  }
}

// Values [0, count) of x as the steps of a dot product take them.
template <class S> inline void widen(const S* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, load(x + i));
  if (i < count) store_part(out + i, load_part(x + i, part(i, count)), part(i, count));
}

constexpr int64_t WIDENED = 512;  // inputs of each row that are widened together: those of a block stay in cache

template <class S>
void product(const void* a, int64_t stride, int rows, const void* panel, int64_t inputs, float* tile) {
  const S* x = static_cast<const S*>(a);
  const S* weights = static_cast<const S*>(panel);
  constexpr int64_t STRIDE = WIDENED + LANES;  // rows don't compete for the same lines of a cache
  if constexpr (!WIDENS<S>) {
    product_of<S, Dot<S>::ROWS>(x, stride, rows, weights, (inputs + PAIR<S> - 1) / PAIR<S>, tile, false);
  } else {
    alignas(64) float wide[Dot<S>::ROWS * STRIDE];
    for (int64_t k = 0; k < inputs; k += WIDENED) {
      const int64_t count = std::min(WIDENED, inputs - k);
      for (int r = 0; r < rows; r++) {
        widen(x + r * stride + k, count, wide + r * STRIDE);
        wide[r * STRIDE + count] = 0;  // of a last pair that is half a one
      }
      const int64_t steps = (count + PAIR<S> - 1) / PAIR<S>;
      product_of<S, Dot<S>::ROWS>(wide, STRIDE, rows, weights + k * PANEL, steps, tile, k > 0);
    }
  }
}

// The vectors of a row of a tile, with bias; `use(first column, vector, columns that exist)`.
template <class Use> inline void each_vector(const float* line, const Finish& to, Use use) {
  for (int c = 0; c < to.columns; c += LANES) {
    const int count = part(c, to.columns);
    Vec x = load(line + c);
    if (to.bias) x = add(x, load_part(to.bias + c, count));
    use(c, x, count);
  }
}

template <class S> void keep(const float* tile, int rows, const Finish& to) {
  for (int r = 0; r < rows; r++) {
    S* out = static_cast<S*>(to.out) + r * to.stride;
    each_vector(tile + r * PANEL, to, [&](int c, Vec x, int count) { store_part(out + c, x, count); });
  }
}

template <class S> void add_to(const float* tile, int rows, const Finish& to) {
  for (int r = 0; r < rows; r++) {
    S* out = static_cast<S*>(to.out) + r * to.stride;
    each_vector(tile + r * PANEL, to, [&](int c, Vec x, int count) {
      store_part(out + c, add(load_part(out + c, count), rounded<S>(x)), count);
    });
  }
}

inline Vec gated(Vec gate, Vec up) {
  const Vec clamped = min(max(sub(zero(), gate), set1(-87.f)), set1(88.f));
  return mul(divide(gate, add(exponential(clamped), set1(1.f))), up);
}

template <class S> void gate(float* gates, const float* ups, int rows, const Finish& to, const Finish& up) {
  for (int r = 0; r < rows; r++) {
    float* line = gates + r * PANEL;
    each_vector(line, to, [&](int c, Vec x, int) { store(line + c, rounded<S>(x)); });
    S* out = static_cast<S*>(to.out) + r * to.stride;
    each_vector(ups + r * PANEL, up, [&](int c, Vec x, int count) {
      store_part(out + c, gated(load(line + c), rounded<S>(x)), count);
    });
  }
}

inline Vec activated(Vec gate, Vec up, const batchgen::Activation& by) {
  const Vec cut = min(set1(by.limit), gate);  // of a number and a not-a-number these give the second operand
  const Vec moved = add(max(set1(-by.limit), min(set1(by.limit), up)), set1(by.shift));
  const Vec exponent = min(max(mul(cut, set1(-by.alpha)), set1(-87.f)), set1(88.f));
  return mul(divide(cut, add(exponential(exponent), set1(1.f))), moved);
}

template <class S>
void activate(float* gates, const float* ups, int rows, const Finish& to, const Finish& up,
              const batchgen::Activation& by) {
  for (int r = 0; r < rows; r++) {
    float* line = gates + r * PANEL;
    each_vector(line, to, [&](int c, Vec x, int) { store(line + c, rounded<S>(x)); });
    S* out = static_cast<S*>(to.out) + r * to.stride;
    each_vector(ups + r * PANEL, up, [&](int c, Vec x, int count) {
      store_part(out + c, activated(load(line + c), rounded<S>(x), by), count);
    });
  }
}

inline void weigh(const float* tile, int rows, const Finish& to, const int64_t* at, const float* weights) {
  for (int r = 0; r < rows; r++) {
    float* out = static_cast<float*>(to.out) + at[r] * to.stride;
    const Vec weight = set1(weights[r]);
    each_vector(tile + r * PANEL, to, [&](int c, Vec x, int count) {
      store_part(out + c, add(load_part(out + c, count), mul(weight, x)), count);
    });
  }
}

template <class S> void swiglu(const void* gate_up, int64_t inner, void* out) {
  const S* g = static_cast<const S*>(gate_up);
  S* to = static_cast<S*>(out);
  for (int64_t i = 0; i < inner; i += LANES) {
    const int count = part(i, inner);
    store_part(to + i, gated(load_part(g + i, count), load_part(g + inner + i, count)), count);
  }
}

// --- lines -----------------------------------------------------------------------------------------------------------

template <class S> void norm(const void* x, const void* weight, int64_t size, float epsilon, void* out) {
  const S* in = static_cast<const S*>(x);
  const S* w = static_cast<const S*>(weight);
  S* to = static_cast<S*>(out);
  Vec squares = zero();
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec v = load_part(in + i, part(i, size));
    squares = fma(v, v, squares);
  }
  const Vec inverse = set1(1.f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += LANES) {
    const int count = part(i, size);
    store_part(to + i, mul(mul(load_part(in + i, count), inverse), load_part(w + i, count)), count);
  }
}

template <class S> void rope(const void* x, const float* cosines, const float* sines, int64_t half, void* out) {
  const S* in = static_cast<const S*>(x);
  S* to = static_cast<S*>(out);
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = part(i, half);
    const Vec a = load_part(in + i, count), b = load_part(in + half + i, count);
    const Vec c = load_part(cosines + i, count), s = load_part(sines + i, count);
    store_part(to + i, sub(mul(a, c), mul(b, s)), count);
    store_part(to + half + i, add(mul(b, c), mul(a, s)), count);
  }
}

template <class S> void put_key(const void* x, int64_t size, void* page, int64_t slot) {
  const S* in = static_cast<const S*>(x);
  S* to = static_cast<S*>(page) + slot * PAIR<S>;
  for (int64_t i = 0; i < size; i += PAIR<S>, to += PAGE * PAIR<S>) std::memcpy(to, in + i, PAIR<S> * sizeof(S));
}

// --- attention -------------------------------------------------------------------------------------------------------

constexpr int KEYS = 4 * LANES;  // keys whose scores are in registers together

template <class S> inline void clear(S* p, int64_t count) { std::memset(p, 0, count * sizeof(S)); }

// Dot products of L queries (PAIR-wise broadcast from `q`) with the keys of one page.  Meanwhile `ahead`, a page of the
// same size, is brought near; null: nothing is.
template <class S, int L>
void score(const Input<S>* const* q, int64_t size, const S* page, float* scores, const S* ahead) {
  for (int first = 0; first < PAGE; first += KEYS) {
    Vec acc[L][4];
    clear(acc);
    for (int64_t i = 0; i < size; i += PAIR<S>) {
      if (ahead && !first) fetch(ahead + i * PAGE, PAGE * PAIR<S> * sizeof(S));
      add_pair<S>(acc, page + i * PAGE + first * PAIR<S>, [&](int l) { return q[l] + i; });
    }
    store(scores + first, PAGE, acc);
  }
}

template <class S> using Share = typename Dot<S>::Share;

template <class S, int L>
void mix_wide(const Share<S>* shares, int begin, int end, const S* values, int64_t size, float* const* sums,
              const S* ahead) {
  float* at[L];
  if (begin >= end) return;
  for (int64_t d = 0; d < size; d += 4 * LANES, ahead = nullptr) {
    for (int l = 0; l < L; l++) at[l] = sums[l] + d;
    switch (size - d < 4 * LANES ? (size - d) / LANES : 4) {
      case 1: mix<Dot<S>, L, 1>(shares, begin, end, values + d, size, at, ahead); break;
      case 2: mix<Dot<S>, L, 2>(shares, begin, end, values + d, size, at, ahead); break;
      case 3: mix<Dot<S>, L, 3>(shares, begin, end, values + d, size, at, ahead); break;
      default: mix<Dot<S>, L, 4>(shares, begin, end, values + d, size, at, ahead);
    }
  }
}

// One query line while the pages go by.  `sums` are the sums of shares * values, and behind them those of the shares,
// lane by lane; a share is 2^((score - peak) * scale).
struct Line {
  float peak;
  float* sums;
};
static_assert(LANES * sizeof(float) + sizeof(Line) <= batchgen::LINE_STATE);

// Powers of two that a score may lie above the peak: what was summed seldom has to shrink.
constexpr float HEADROOM = 8.f;

// The greatest of the scores in [begin, end), and LOWEST in place of the others.
inline float find_peak(float* scores, int begin, int end) {
  Vec top = set1(LOWEST);
  const bool whole = begin == 0 && end == PAGE;
  for (int t = 0; t < PAGE; t += LANES) {
    Vec x = load(scores + t);
    if (!whole) store(scores + t, x = keep_lanes(x, set1(LOWEST), begin - t, end - t));
    top = max(top, x);
  }
  return greatest(top);
}

// Scores of one page, the greatest of which is `peak`, become shares; `scale` > 0 brings them to powers of two.  While
// no score is finite all shares are 0, and a line that ends so is not a number.
template <class S>
void take_page(const float* scores, float peak, float scale, int64_t size, Share<S>* shares, Line& line) {
  if ((peak - line.peak) * scale > HEADROOM) {
    alignas(64) float shrink[LANES];
    store(shrink, power(set1((line.peak - peak) * scale)));
    line.peak = peak;
    for (int64_t d = 0; d < size + LANES; d += LANES) store(line.sums + d, mul(load(line.sums + d), set1(shrink[0])));
  }
  const Vec base = set1(line.peak == LOWEST ? 0.f : line.peak);
  Vec total = load(line.sums + size);
  for (int t = 0; t < PAGE; t += LANES) {
    const Vec share = power(mul(sub(load(scores + t), base), set1(scale)));
    store(shares + t, share);
    total = add(total, rounded<Share<S>>(share));
  }
  store(line.sums + size, total);
}

// Where the shares of some lines are kept: behind their scores.
template <class S> inline Share<S>* shares_behind(float* scores) {
  static_assert(Dot<S>::LINES * (sizeof(float) + sizeof(Share<S>)) <= batchgen::SCORES * sizeof(float));
  return reinterpret_cast<Share<S>*>(scores + Dot<S>::LINES * PAGE);
}

// One page of one KV head, and what is needed after it: null where that is near already.
template <class S> struct Near {
  const S* keys;
  const S* values;
  const S* next_keys;
  bool fresh;
};

// L lines over one page; line l sees the keys [begin[l], end[l]) of it, none if that is empty.
template <class S, int L>
void attend_page(const Input<S>* const* q, float scale, int64_t size, const Near<S>& page, const int* begin,
                 const int* end, float* scores, Line* lines) {
  constexpr int TOKENS = Dot<S>::TOKENS;
  Share<S>* shares = shares_behind<S>(scores);
  score<S, L>(q, size, page.keys, scores, page.fresh ? page.values : nullptr);
  int first = 0, last = PAGE;
  float *sums[L], peaks[L];
  for (int l = 0; l < L; l++) {
    sums[l] = lines[l].sums;
    first = begin[l] > first ? begin[l] : first;
    last = end[l] < last ? end[l] : last;
    peaks[l] = find_peak(scores + l * PAGE, begin[l], end[l]);
  }
  for (int l = 0; l < L; l++) take_page<S>(scores + l * PAGE, peaks[l], scale, size, shares + l * PAGE, lines[l]);
  first = (first + TOKENS - 1) / TOKENS * TOKENS, last = last / TOKENS * TOKENS;
  const bool shared = first < last;
  for (int l = 0; l < L; l++)
    mix_wide<S, 1>(shares + l * PAGE, begin[l], shared ? first : end[l], page.values, size, sums + l, nullptr);
  if (!shared) return;
  mix_wide<S, L>(shares, first, last, page.values, size, sums, page.fresh ? page.next_keys : nullptr);
  for (int l = 0; l < L; l++)
    mix_wide<S, 1>(shares + l * PAGE, last, end[l], page.values, size, sums + l, nullptr);
}

// The keys of a page that a token at `position` sees.
inline void visible(int64_t position, int64_t window, int64_t page, int* begin, int* end) {
  const int64_t low = window ? position - window + 1 - page * PAGE : 0, high = position + 1 - page * PAGE;
  *begin = static_cast<int>(low < 0 ? 0 : low > PAGE ? PAGE : low);
  *end = static_cast<int>(high < *begin ? *begin : high > PAGE ? PAGE : high);
}

template <class S> inline const S* query(const Queries& of, int token, int head) {
  return static_cast<const S*>(of.q) + token * of.token_stride + head * of.size;
}

// `wide` are the queries of all lines as a dot product takes them, where those of `of` are not so.
template <class S, int L>
void attend_lines(const Queries& of, const float* wide, int first, int count, int64_t page, const Near<S>& near,
                  float* scores, Line* lines) {
  if constexpr (L > 0) {
    if (count < L) return attend_lines<S, L - 1>(of, wide, first, count, page, near, scores, lines);
    const Input<S>* q[L];
    int begin[L], end[L], token = first / of.heads, head = first % of.heads;
    for (int l = 0; l < L; l++) {
      if constexpr (WIDENS<S>) q[l] = wide + (first + l) * of.size;
      else q[l] = query<S>(of, token, head);
      visible(of.position + token, of.window, page, begin + l, end + l);
      if (++head == of.heads) head = 0, token++;
    }
    attend_page<S, L>(q, of.scale * LOG2_E, of.size, near, begin, end, scores, lines + first);
  }
}

// What a sink adds to the shares of a line whose greatest score, scaled, is `peak`.
inline float share_of_sink(float sink, float peak) {
  alignas(64) float share[LANES];
  store(share, power(min(mul(sub(set1(sink), set1(peak)), set1(LOG2_E)), set1(127.f))));
  return share[0];
}

// `open(at, ahead)` gives the page that begins `at` bytes behind page 0, `ahead` the next one or below 0 after the
// last.
template <class S, class Open> void attend_pages(const Queries& of, void* scratch, Open open) {
  constexpr int L = Dot<S>::LINES;
  const int count = of.tokens * of.heads;
  float* scores = static_cast<float*>(scratch);
  float* sums = scores + batchgen::SCORES * PAGE;
  Line* lines = reinterpret_cast<Line*>(sums + count * (of.size + LANES));
  float* wide = reinterpret_cast<float*>(lines + count);
  if constexpr (WIDENS<S>)
    for (int l = 0; l < count; l++) widen(query<S>(of, l / of.heads, l % of.heads), of.size, wide + l * of.size);
  clear(sums, count * (of.size + LANES));
  for (int l = 0; l < count; l++) lines[l] = {LOWEST, sums + l * (of.size + LANES)};
  const int64_t seen = of.window && of.position >= of.window ? of.position - of.window + 1 : 0;
  const int64_t last = (of.position + of.tokens - 1) / PAGE;
  for (int64_t page = seen / PAGE; page <= last; page++) {
    Near<S> near = open(of.pages[page] * of.page_stride, page < last ? of.pages[page + 1] * of.page_stride : -1);
    for (int first = 0; first < count; first += L, near.fresh = false)
      attend_lines<S, L>(of, wide, first, count - first < L ? count - first : L, page, near, scores, lines);
  }
  for (int l = 0; l < count; l++) {
    S* out = static_cast<S*>(of.out) + l / of.heads * of.out_stride + l % of.heads * of.size;
    float mass = sum(load(lines[l].sums + of.size));
    if (of.sinks) mass += share_of_sink(of.sinks[l % of.heads], lines[l].peak * of.scale);
    const Vec total = set1(mass);
    for (int64_t d = 0; d < of.size; d += LANES) store(out + d, divide(load(lines[l].sums + d), total));
  }
}

inline const void* behind(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

template <class S> void attend(const Queries& of, void* scratch) {
  attend_pages<S>(of, scratch, [&](int64_t at, int64_t ahead) -> Near<S> {
    const void* next = ahead < 0 ? of.next : behind(of.keys, ahead);
    return {static_cast<const S*>(behind(of.keys, at)), static_cast<const S*>(behind(of.values, at)),
            static_cast<const S*>(next), true};
  });
}

}  // namespace

#include "path_int8.h"
#include "path_logits.h"

namespace {

template <class S> const Arithmetic* arithmetic() {
  static_assert(Dot<S>::ROWS <= batchgen::MOST_ROWS);
  static const Arithmetic table = {
      Dot<S>::ROWS, PAIR<S>, static_cast<int>(sizeof(S)), product<S>, keep<S>, add_to<S>, gate<S>, activate<S>,
      weigh,        best,
      norm<S>,      swiglu<S>, rope<S>,                   put_key<S>, attend<S>,
      put_key_int8<S>, put_value_int8<S>, attend_int8<S>,
      peak,         mass,      weights,                   gather};
  return &table;
}

}  // namespace
