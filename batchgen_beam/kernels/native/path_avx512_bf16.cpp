// AVX-512 with the instruction that adds products of pairs of bfloat16 to float32.
#include "vec_avx512.h"

#include <cstring>

namespace {
template <class S> struct Dot;
template <> struct Dot<uint16_t> {
  static constexpr int ROWS = 12, LINES = 4;
  using Weight = __m512bh;
  static Weight weight(const uint16_t* p) { return reinterpret_cast<Weight>(_mm512_loadu_si512(p)); }
  static Weight value(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return reinterpret_cast<Weight>(_mm512_set1_epi32(pair));
  }
  static Vec step(Vec sum, Weight x, Weight w) { return _mm512_dpbf16_ps(sum, x, w); }
};
}  // namespace

#include "path.h"

namespace batchgen {
const Arithmetic* avx512_bf16_arithmetic() { return arithmetic<uint16_t>(); }
}  // namespace batchgen
