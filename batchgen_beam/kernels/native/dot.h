// How one step of a dot product is done where there is no instruction for pairs of bfloat16: widen, two steps; and one
// of adding up values by their shares.  Included by a path after its vectors; the path says how many rows and lines fit
// into its registers.
#pragma once

#include <cstdint>
#include <cstring>

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
  static constexpr int ROWS = MOST_ROWS, LINES = MOST_LINES;
  using Weight = Vec;
  static Vec weight(const float* p) { return load(p); }
  static Vec value(const float* p) { return set1(*p); }
  static Vec step(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
};

struct Pair {
  Vec first, second;
};

template <int MOST_ROWS, int MOST_LINES> struct WidenedDot : FloatShares<uint16_t> {
  static constexpr int ROWS = MOST_ROWS, LINES = MOST_LINES;
  using Weight = Pair;
  static Pair weight(const uint16_t* p) { return {first_of_pairs(p), second_of_pairs(p)}; }
  static Pair value(const uint16_t* p) {
    uint32_t bits[2] = {static_cast<uint32_t>(p[0]) << 16, static_cast<uint32_t>(p[1]) << 16};
    float x[2];
    std::memcpy(x, bits, sizeof x);
    return {set1(x[0]), set1(x[1])};
  }
  static Vec step(Vec sum, const Pair& x, const Pair& w) { return fma(x.second, w.second, fma(x.first, w.first, sum)); }
};

}  // namespace
