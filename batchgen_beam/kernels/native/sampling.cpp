#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "team.h"

namespace batchgen {
namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // below every logit

// A rank has 31 bits: this many are looked at in each round.
constexpr int ROUNDS = 3;
constexpr int DIGIT_BITS[ROUNDS] = {11, 10, 10};
constexpr int BUCKETS = 1 << 11;

// How far below the greatest, in units of the temperature, candidates of a nucleus are looked for first.
constexpr double DEPTHS[] = {-6, -10};

int64_t blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// What one thread needs for a row, of so many logits.
class Scratch {
 public:
  static int64_t bytes(int64_t vocabulary) {
    const int64_t line = room(vocabulary), peaks = room(blocks(vocabulary) + 1);
    return 4 * line * 4 + 2 * peaks * 4 + peaks * 8 + BUCKETS * (8 + 8);
  }
  Scratch(char* memory, int64_t vocabulary) {
    const int64_t line = room(vocabulary), peaks_line = room(blocks(vocabulary) + 1);
    sums = reinterpret_cast<double*>(memory);
    bucket_mass = sums + peaks_line;
    bucket_count = reinterpret_cast<int64_t*>(bucket_mass + BUCKETS);
    ids = reinterpret_cast<int32_t*>(bucket_count + BUCKETS);
    values = reinterpret_cast<float*>(ids + line);
    scaled = values + line;
    weights = scaled + line;
    peaks = weights + line;
    sorted = peaks + peaks_line;
  }

  double* sums;           // mass of each block
  double* bucket_mass;
  int64_t* bucket_count;
  int32_t* ids;           // candidates: in ascending order of ids
  float* values;
  float* scaled;
  float* weights;
  float* peaks;           // greatest of each block
  float* sorted;          // the same, to be reordered

 private:
  static int64_t room(int64_t count) { return (count + SLACK + 15) / 16 * 16; }
};

// Most likely first, as whole numbers of 31 bits in ascending order: by scaled logits, which are at or below zero (and
// 0 and -0 are level), or by weights, which are at or above it.
class Order {
 public:
  static Order by_logit(const Scratch& m) { return {m.scaled, 0}; }
  static Order by_weight(const Scratch& m) { return {m.weights, MASK}; }
  uint32_t operator()(int64_t i) const {
    uint32_t bits;
    std::memcpy(&bits, values_ + i, 4);
    return (bits ^ flip_) & MASK;
  }

 private:
  static constexpr uint32_t MASK = 0x7fffffff;
  Order(const float* values, uint32_t flip) : values_(values), flip_(flip) {}
  const float* values_;
  uint32_t flip_;
};

// The last of the most likely candidates that stay: all of a lower rank stay, of its own rank the first `level`.
struct Cut {
  uint32_t rank;
  int64_t level;
};

// In ascending order of ranks, ties to the lowest id, a candidate stays iff what the ones before it sum up to is under
// `goal`; the first always stays.  `measure(i)` is the same for candidates of one rank.  Radix selection: three rounds
// over the candidates whatever their values.
template <class Measure>
Cut select(const Scratch& m, int64_t count, const Order& rank, double goal, Measure measure) {
  uint32_t prefix = 0;
  int shift = 31;
  double before = 0;
  int64_t members = 0;
  for (int round = 0; round < ROUNDS; round++) {
    const int upper = shift;
    shift -= DIGIT_BITS[round];
    const uint32_t buckets = 1u << DIGIT_BITS[round];
    std::fill_n(m.bucket_mass, buckets, 0.0);
    std::fill_n(m.bucket_count, buckets, 0);
    for (int64_t i = 0; i < count; i++) {
      const uint32_t key = rank(i);
      if (key >> upper != prefix) continue;
      const uint32_t bucket = key >> shift & (buckets - 1);
      m.bucket_mass[bucket] += measure(i);
      m.bucket_count[bucket]++;
    }
    uint32_t last = 0;
    double before_last = before;
    for (uint32_t bucket = 0; bucket < buckets; bucket++) {
      if (!m.bucket_count[bucket]) continue;
      last = bucket;
      before_last = before;
      before += m.bucket_mass[bucket];
      if (before >= goal) break;
    }
    before = before_last;
    members = m.bucket_count[last];
    prefix = prefix << DIGIT_BITS[round] | last;
  }
  int64_t found = 0;
  while (rank(found) != prefix) found++;
  int64_t level = 1;
  for (before += measure(found); level < members && before < goal; level++) before += measure(found);
  return {prefix, level};
}

// The candidates that a cut leaves, in place; returns how many.
int64_t keep(const Scratch& m, int64_t count, const Order& rank, Cut cut) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t key = rank(i);
    if (key > cut.rank || (key == cut.rank && cut.level-- <= 0)) continue;
    m.ids[kept] = m.ids[i];
    m.scaled[kept] = m.scaled[i];
    m.weights[kept++] = m.weights[i];
  }
  return kept;
}

double total(const float* weights, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += weights[i];
  return sum;
}

// Where `uniform` lies in the mass: under the whole of it, so that something is always found.
double place(double uniform, double mass) { return std::min(uniform * mass, std::nextafter(mass, 0.0)); }

// One row.  Every sum is in a fixed order of ids or ranks.
class Row {
 public:
  Row(const Arithmetic& a, const bg_sampling& s, int64_t row, const Scratch& m)
      : a_(a), s_(s), m_(m), row_(row), x_(s.logits + row * s.vocabulary), text_blocks_(blocks(s.text)) {}

  void run() {
    bool finite = true;
    top_ = survey(x_, s_.text, m_.peaks, &finite);
    const float rest = survey(x_ + s_.text, s_.vocabulary - s_.text, m_.peaks + text_blocks_, &finite);
    s_.bad[row_] = !finite;
    s_.ids[row_] = 0;
    s_.logprobs[row_] = std::numeric_limits<float>::quiet_NaN();
    if (!finite) return;
    greatest_ = std::max(top_, rest);
    const bool drawn = !s_.greedy[row_];
    const bool limited = drawn && s_.top_k[row_] > 0 && s_.top_k[row_] < s_.text;
    weigh(drawn && !limited);
    const int64_t id = !drawn                ? first_of(top_)
                       : limited             ? draw_limited()
                       : s_.top_p[row_] < 1 ? draw_nucleus()
                                             : draw();
    s_.ids[row_] = id;
    s_.logprobs[row_] = logprob(x_[id]);
    if (s_.listed[row_] > 0) list();
  }

 private:
  static int columns(int64_t block, int64_t count) {
    return static_cast<int>(std::min<int64_t>(BLOCK, count - block * BLOCK));
  }

  float survey(const float* x, int64_t count, float* peaks, bool* finite) const {
    float top = NOTHING;
    for (int64_t b = 0; b < blocks(count); b++) {
      peaks[b] = a_.peak(x + b * BLOCK, columns(b, count), finite);
      top = std::max(top, peaks[b]);
    }
    return top;
  }

  // The raw mass of all logits, and the mass of each block of the text under the row's temperature.
  void weigh(bool scaled) {
    const float temperature = s_.temperature[row_];
    const bool same = temperature == 1 && top_ == greatest_;
    double raw = 0;
    for (int64_t b = 0; b < text_blocks_; b++) {
      const float* x = x_ + b * BLOCK;
      const int count = columns(b, s_.text);
      const double mass = a_.mass(x, count, greatest_, 1);
      raw += mass;
      if (scaled) m_.sums[b] = same ? mass : a_.mass(x, count, top_, temperature);
    }
    const int64_t rest = s_.vocabulary - s_.text;
    for (int64_t b = 0; b < blocks(rest); b++)
      raw += a_.mass(x_ + s_.text + b * BLOCK, columns(b, rest), greatest_, 1);
    log_mass_ = std::log(raw);
  }

  float logprob(float x) const { return static_cast<float>(static_cast<double>(x) - greatest_ - log_mass_); }

  int64_t first_of(float value) const {
    int64_t b = 0;
    while (m_.peaks[b] != value) b++;
    int64_t id = b * BLOCK;
    while (x_[id] != value) id++;
    return id;
  }

  // Candidates are the text's logits that are not under `least`.
  int64_t gather(float least) const {
    int64_t found = 0;
    for (int64_t b = 0; b < text_blocks_; b++)
      if (m_.peaks[b] >= least)
        found += a_.gather(x_ + b * BLOCK, columns(b, s_.text), least, static_cast<int32_t>(b * BLOCK), m_.ids + found,
                           m_.values + found);
    return found;
  }

  // The same with their weights.
  int64_t candidates(float least) const {
    const int64_t found = gather(least);
    a_.weights(m_.values, found, top_, s_.temperature[row_], m_.scaled, m_.weights);
    return found;
  }

  // Not above the k-th greatest logit of the text.
  float under_greatest(int64_t k) const {
    if (k > text_blocks_) return NOTHING;
    std::copy_n(m_.peaks, text_blocks_, m_.sorted);
    std::nth_element(m_.sorted, m_.sorted + k - 1, m_.sorted + text_blocks_, std::greater<float>());
    return m_.sorted[k - 1];
  }

  // All that are level with the k-th under the temperature are candidates: logits that are less than 2^-22 of their
  // distance from the greatest apart may be.
  int64_t draw_limited() const {
    const int64_t k = s_.top_k[row_];
    int64_t count = candidates(static_cast<float>(top_ + (double{under_greatest(k)} - top_) * (1 + 1e-6)));
    const Order order = Order::by_logit(m_);
    Cut cut = select(m_, count, order, static_cast<double>(k), [](int64_t) { return 1.0; });
    cut.level = count;
    count = keep(m_, count, order, cut);
    return s_.top_p[row_] < 1 ? draw_nucleus(count, total(m_.weights, count)) : draw(count);
  }

  // The mass of all text is known: candidates go as deep as the nucleus needs.  Below the last depth all ids together
  // have less than what the nucleus may lack.
  int64_t draw_nucleus() const {
    const double p = s_.top_p[row_];
    double mass = 0;
    for (int64_t b = 0; b < text_blocks_; b++) mass += m_.sums[b];
    const double deepest = std::log((1 - p) * mass / static_cast<double>(s_.text)) - 0.01;
    for (double depth : {std::max(DEPTHS[0], deepest), std::max(DEPTHS[1], deepest), deepest}) {
      const int64_t count = candidates(static_cast<float>(top_ + depth * s_.temperature[row_]));
      if (total(m_.weights, count) >= p * mass) return draw_nucleus(count, mass);
    }
    return draw_nucleus(candidates(NOTHING), mass);
  }

  int64_t draw_nucleus(int64_t count, double mass) const {
    const float* weights = m_.weights;
    const Order order = Order::by_weight(m_);
    const Cut cut =
        select(m_, count, order, s_.top_p[row_] * mass, [weights](int64_t i) { return double{weights[i]}; });
    return draw(keep(m_, count, order, cut));
  }

  // Among the candidates.
  int64_t draw(int64_t count) const {
    const double goal = place(s_.uniform[row_], total(m_.weights, count));
    double reached = 0;
    for (int64_t i = 0; i < count; i++)
      if ((reached += m_.weights[i]) > goal) return m_.ids[i];
    return m_.ids[count - 1];
  }

  // Among all text: the block first, then in it.
  int64_t draw() const {
    double mass = 0;
    for (int64_t b = 0; b < text_blocks_; b++) mass += m_.sums[b];
    const double goal = place(s_.uniform[row_], mass);
    double reached = 0;
    int64_t b = 0;
    while (reached + m_.sums[b] <= goal) reached += m_.sums[b++];
    const int count = columns(b, s_.text);
    a_.weights(x_ + b * BLOCK, count, top_, s_.temperature[row_], m_.scaled, m_.weights);
    int64_t last = 0;
    for (int i = 0; i < count; i++) {
      if (m_.weights[i] > 0) last = i;
      if ((reached += m_.weights[i]) > goal) break;
    }
    return b * BLOCK + last;
  }

  // Most likely first, ties to the lowest id.
  void list() const {
    const int64_t wanted = std::min(s_.listed[row_], s_.text), count = gather(under_greatest(wanted));
    int64_t* ids = s_.top_ids + row_ * s_.width;
    float* values = s_.top_logprobs + row_ * s_.width;
    int64_t listed = 0;
    for (int64_t i = 0; i < count; i++) {
      int64_t at = listed;
      while (at > 0 && values[at - 1] < m_.values[i]) at--;
      if (at == wanted) continue;
      listed = std::min(listed + 1, wanted);
      std::copy_backward(ids + at, ids + listed - 1, ids + listed);
      std::copy_backward(values + at, values + listed - 1, values + listed);
      ids[at] = m_.ids[i];
      values[at] = m_.values[i];
    }
    for (int64_t i = 0; i < listed; i++) values[i] = logprob(values[i]);
  }

  const Arithmetic& a_;
  const bg_sampling& s_;
  const Scratch& m_;
  const int64_t row_;
  const float* x_;
  const int64_t text_blocks_;
  float top_ = 0;         // of the text
  float greatest_ = 0;    // of all
  double log_mass_ = 0;   // of exp(x - greatest)
};

// Memory that a thread which calls the library keeps for its next call.
struct Kept {
  std::unique_ptr<char[]> bytes;
  int64_t size = 0;

  char* get(int64_t wanted) {
    if (wanted > size) {
      bytes.reset();
      size = 0;
      bytes.reset(new char[wanted]);
      size = wanted;
    }
    return bytes.get();
  }
};

}  // namespace

void sample(const Arithmetic& a, int threads, const bg_sampling& sampling) {
  thread_local Kept kept;
  const int64_t size = Scratch::bytes(sampling.vocabulary);
  char* memory = kept.get(threads * size);
  run_team(threads, [&](Team& team, int thread) {
    team.each(sampling.rows, thread, [&](int64_t row, int who) {
      Row(a, sampling, row, Scratch(memory + who * size, sampling.vocabulary)).run();
    });
  });
}

}  // namespace batchgen
