// Vectors of 16 floats.  Included by the translation units of two paths.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 16;
constexpr int REGISTERS = 32;
using Vec = __m512;
using Bits = __m512i;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n for whole n in [-126, 127].
inline Vec power_of_two(Vec n) {
  const Bits exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

// x 2^n for whole n, 0 or subnormal where that is less than the smallest normal number.
inline Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

// `x` unless `a < b`, else 0: not-a-number in `a` lets x through.
inline Vec keep_unless_less(Vec a, Vec b, Vec x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}

// The lanes from `first` to before `last` of `x`, `other` elsewhere; both may lie outside the vector.
inline Vec keep_lanes(Vec x, Vec other, int first, int last) {
  const Bits lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
  return _mm512_mask_mov_ps(other, inside, x);
}

// Puts the lanes of `x` that are not under `least`, and their ids, side by side; the first lane has id `first`.  Writes
// whole vectors, returns how many lanes count.
inline int keep_from(Vec x, Vec least, int32_t first, int32_t* ids, float* values) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
  if (!kept) return 0;
  const Bits lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(kept, x));
  return __builtin_popcount(kept);
}

// A sum of vectors in float64, lane by lane, and then over the lanes in a fixed tree.
class WideSum {
 public:
  void add(Vec x) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const {
    const __m512d a = _mm512_add_pd(low_, high_);
    const __m256d b = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    const __m128d c = _mm_add_pd(_mm256_castpd256_pd128(b), _mm256_extractf128_pd(b, 1));
    return _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
  }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

inline Vec load(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Round to nearest, ties to even; a NaN stays one.  The instruction also takes subnormal numbers for zero.
#ifdef __AVX512BF16__
inline void store(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline Vec as_half(Vec x) {
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#else
inline Bits rounded_bits(Vec x) {
  const Bits bits = _mm512_castps_si512(x);
  const Bits odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  Bits rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
inline void store(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(x), 16)));
}
inline Vec as_half(Vec x) {
  return _mm512_castsi512_ps(_mm512_and_si512(rounded_bits(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
#endif

inline Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Round to nearest, ties to even; every value is in [-127, 127].
inline void store(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

// The first and the second of 16 pairs of bfloat16, each pair in 32 bits.
inline Vec first_of(Bits pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Vec second_of(Bits pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Bits load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }

// Lanes in a fixed tree: halves, quarters, pairs, neighbours.
inline float sum(Vec x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float greatest(Vec x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

}  // namespace
