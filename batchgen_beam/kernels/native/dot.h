// How one step of a dot product is done where there is no instruction for pairs of bfloat16: widen, two steps; and one
// of adding up values by their shares.  Included by a path after its vectors; the path says how many rows and lines fit
// into its registers.
#pragma once

#include <cstdint>

namespace {

// Shares of values in float32, one token at a time: see `mix.h`.
template <class S> struct FloatShares {
  using Share = float;
  using Value = Vec;
  static constexpr int TOKENS = 1;

  template <int V> static void tokens(const S* values, int64_t, int, int, Value* value) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) value[v] = load(values + v * LANES);
  }
  static Vec share(const Share* p) { return set1(*p); }
  static Vec mixed(Vec sum, Vec share, Vec value) { return fma(share, value, sum); }
};

template <int MOST_ROWS, int MOST_LINES> struct FloatDot : FloatShares<float> {
  static constexpr int ROWS = MOST_ROWS, LINES = MOST_LINES, STEPS = 1;
  using Input = float;
  template <int> static Vec weight(const float* p) { return load(p); }
  template <int> static Vec value(const Input* p) { return set1(*p); }
  static Vec step(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
};

template <int MOST_ROWS, int MOST_LINES> struct WidenedDot : FloatShares<uint16_t> {
  static constexpr int ROWS = MOST_ROWS, LINES = MOST_LINES, STEPS = 2;
  using Input = float;
  template <int STEP> static Vec weight(const uint16_t* p) {
    const Bits pairs = load_pairs(p);
    return STEP ? second_of(pairs) : first_of(pairs);
  }
  template <int STEP> static Vec value(const Input* p) { return set1(p[STEP]); }
  static Vec step(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
};

}  // namespace
