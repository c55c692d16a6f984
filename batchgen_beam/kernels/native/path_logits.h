// The arithmetic of one instruction path on logits: float32 whatever the type of the values before them.
//
// Included by `path.h`, whose vectors and whose exponential it uses.
#pragma once

#include "arithmetic.h"

namespace {

using batchgen::BLOCK;

// Takes the columns from id `first` on into a line; only the first `eligible` of them may be chosen.  Panels are
// `stride` floats apart.
inline void best(const float* panels, int64_t stride, int columns, int eligible, int32_t first, Best* line) {
  const auto at = [&](int c) { return panels + c / PANEL * stride + c % PANEL; };
  Vec top = set1(LOWEST), choice = top, finite = zero();
  for (int c = 0; c < columns; c += LANES) {
    const Vec v = load(at(c));
    top = max(top, keep_lanes(v, set1(LOWEST), 0, columns - c));
    choice = max(choice, keep_lanes(v, set1(LOWEST), 0, eligible - c));
    finite = fma(keep_lanes(v, zero(), 0, columns - c), zero(), finite);  // NaN where one value is not finite
  }
  const float base = greatest(top);
  Vec total = zero();
  for (int c = 0; c < columns; c += LANES)
    total = add(total, keep_lanes(exponential(sub(load(at(c)), set1(base))), zero(), 0, columns - c));
  line->sum = sum(total) + sum(finite);
  line->greatest = base;
  line->choice = greatest(choice);
  line->id = first;
  for (int c = 0; c < eligible; c++)
    if (*at(c) == line->choice) {
      line->id = first + c;
      return;
    }
}

// The greatest of at most BLOCK logits; `finite` becomes false where one is not, and the result then means nothing.
inline float peak(const float* x, int count, bool* finite) {
  const Vec lowest = set1(LOWEST);
  Vec top = lowest, check = zero();
  int c = 0;
  for (; c + LANES <= count; c += LANES) {
    const Vec v = load(x + c);
    top = max(top, v);
    check = fma(v, zero(), check);  // NaN where one value is not finite
  }
  if (c < count) {
    const Vec v = load_part(x + c, count - c);
    top = max(top, keep_lanes(v, lowest, 0, count - c));
    check = fma(v, zero(), check);
  }
  *finite &= sum(check) == 0.f;
  return greatest(top);
}

// (x - top) / temperature, each rounded; 1 needs no division.
template <bool DIVIDED> inline Vec scale_down(Vec x, Vec top, Vec temperature) {
  if constexpr (DIVIDED) return divide(sub(x, top), temperature);
  return sub(x, top);
}

template <bool DIVIDED> inline double mass_of(const float* x, int count, float top, float temperature) {
  const Vec t = set1(top), d = set1(temperature);
  WideSum total;
  int c = 0;
  for (; c + LANES <= count; c += LANES) total.add(exponential(scale_down<DIVIDED>(load(x + c), t, d)));
  if (c < count)
    total.add(keep_lanes(exponential(scale_down<DIVIDED>(load_part(x + c, count - c), t, d)), zero(), 0, count - c));
  return total.total();
}

// The sum of exp((x - top) / temperature) over at most BLOCK logits, none of which is above `top`.
inline double mass(const float* x, int count, float top, float temperature) {
  return temperature == 1.f ? mass_of<false>(x, count, top, 1.f) : mass_of<true>(x, count, top, temperature);
}

// scaled = (x - top) / temperature and weights = exp(scaled), with the bits that `mass` adds up.
inline void weights(const float* x, int64_t count, float top, float temperature, float* scaled, float* weights) {
  const Vec t = set1(top), d = set1(temperature);
  for (int64_t i = 0; i < count; i += LANES) {
    const int present = part(i, count);
    const Vec s = scale_down<true>(load_part(x + i, present), t, d);
    store_part(scaled + i, s, present);
    store_part(weights + i, exponential(s), present);
  }
}

// The logits that are not under `least`, and their ids, in ascending order of ids; the first has id `first`.  Returns
// how many; behind them up to LANES values are overwritten.
inline int64_t gather(const float* x, int count, float least, int32_t first, int32_t* ids, float* values) {
  const Vec bound = set1(least);
  int64_t found = 0;
  int c = 0;
  for (; c + LANES <= count; c += LANES) found += keep_from(load(x + c), bound, first + c, ids + found, values + found);
  for (; c < count; c++)
    if (x[c] >= least) {
      ids[found] = first + c;
      values[found++] = x[c];
    }
  return found;
}

}  // namespace
