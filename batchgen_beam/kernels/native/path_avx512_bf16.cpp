// AVX-512 with the instruction that adds products of pairs of bfloat16 to float32.
#include "vec_avx512.h"

#include <cstring>

namespace {

template <class S> struct Dot;
template <> struct Dot<uint16_t> {
  static constexpr int ROWS = 12, LINES = 6, STEPS = 1;
  using Input = uint16_t;
  using Weight = __m512bh;
  template <int> static Weight weight(const uint16_t* p) { return reinterpret_cast<Weight>(_mm512_loadu_si512(p)); }
  template <int> static Weight value(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return reinterpret_cast<Weight>(_mm512_set1_epi32(pair));
  }
  static Vec step(Vec sum, Weight x, Weight w) { return _mm512_dpbf16_ps(sum, x, w); }

  using Share = uint16_t;
  using Value = Weight;
  static constexpr int TOKENS = 2;

  // A token of the pair that is outside counts as zeros, whatever its memory holds.
  template <int V> static void tokens(const uint16_t* values, int64_t size, int begin, int end, Value* pair) {
    pairs<V>(values, values + size, begin <= 0, end > 1, pair);
  }
  static Weight share(const Share* p) { return value<0>(p); }
  static Vec mixed(Vec sum, Weight share, Weight pair) { return step(sum, share, pair); }

 private:
  // The values of two tokens side by side, V vectors of 16 pairs.
  template <int V>
  static void pairs(const uint16_t* first, const uint16_t* second, bool has_first, bool has_second, Weight* pair) {
    const Bits low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                      36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const Bits high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __mmask32 in_first = has_first ? ~0u : 0u, in_second = has_second ? ~0u : 0u;
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) {
      const __mmask32 there = v + 1 < V ? ~0u : 0xffffu;
      const Bits a = _mm512_maskz_loadu_epi16(in_first & there, first + v * LANES);
      const Bits b = _mm512_maskz_loadu_epi16(in_second & there, second + v * LANES);
      pair[v] = reinterpret_cast<Weight>(_mm512_permutex2var_epi16(a, low, b));
      if (v + 1 < V) pair[v + 1] = reinterpret_cast<Weight>(_mm512_permutex2var_epi16(a, high, b));
    }
  }
};

}  // namespace

#include "path.h"

namespace batchgen {
const Arithmetic* avx512_bf16_arithmetic() { return arithmetic<uint16_t>(); }
}  // namespace batchgen
