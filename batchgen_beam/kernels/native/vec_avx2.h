// Vectors of 8 floats.  Included by one translation unit per instruction path.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 8;
constexpr int REGISTERS = 16;
using Vec = __m256;
using Bits = __m256i;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n for whole n in [-126, 127].
inline Vec power_of_two(Vec n) {
  const Bits exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

// `x` unless `a < b`, else 0: not-a-number in `a` lets x through.
inline Vec keep_unless_less(Vec a, Vec b, Vec x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x); }

// x 2^n for whole n <= 127, 0 where n < -126.
inline Vec times_power_of_two(Vec x, Vec n) {
  const Vec least = set1(-126.f);
  return keep_unless_less(n, least, mul(x, power_of_two(max(n, least))));
}

// The lanes from `first` to before `last` of `x`, `other` elsewhere; both may lie outside the vector.
inline Vec keep_lanes(Vec x, Vec other, int first, int last) {
  const Bits lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Bits before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  const Bits inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}

// Puts the lanes of `x` that are not under `least`, and their ids, side by side; the first lane has id `first`.
// Returns how many lanes count.
inline int keep_from(Vec x, Vec least, int32_t first, int32_t* ids, float* values) {
  unsigned kept = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ)));
  if (!kept) return 0;
  alignas(32) float lanes[LANES];
  _mm256_store_ps(lanes, x);
  int count = 0;
  for (; kept; kept &= kept - 1, count++) {
    const int lane = __builtin_ctz(kept);
    ids[count] = first + lane;
    values[count] = lanes[lane];
  }
  return count;
}

// A sum of vectors in float64, lane by lane, and then over the lanes in a fixed tree.
class WideSum {
 public:
  void add(Vec x) {
    low_ = _mm256_add_pd(low_, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high_ = _mm256_add_pd(high_, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    const __m256d a = _mm256_add_pd(low_, high_);
    const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
  }

 private:
  __m256d low_ = _mm256_setzero_pd(), high_ = _mm256_setzero_pd();
};

inline Vec load(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Round to nearest, ties to even; a NaN stays one.
inline Bits rounded_bits(Vec x) {
  const Bits bits = _mm256_castps_si256(x);
  const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  Bits rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const Bits broken = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), broken);
}
inline void store(uint16_t* p, Vec x) {
  const Bits rounded = _mm256_srli_epi32(rounded_bits(x), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Vec as_half(Vec x) {
  return _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Round to nearest, ties to even; every value is in [-127, 127].
inline void store(int8_t* p, Vec x) {
  const Bits whole = _mm256_cvtps_epi32(x);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(packed, packed));
}

// The first and the second of 8 pairs of bfloat16, each pair in 32 bits.
inline Vec first_of(Bits pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Vec second_of(Bits pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pairs, 16), 16));  // a mask would need a register
}
inline Bits load_pairs(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Lanes in a fixed tree: halves, pairs, neighbours.
inline float sum(Vec x) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float greatest(Vec x) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

}  // namespace
