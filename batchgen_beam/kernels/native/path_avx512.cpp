// AVX-512 with float32 accumulation.
#include "vec_avx512.h"

#include "dot.h"

namespace {
template <class S> struct Dot;
template <> struct Dot<float> : FloatDot<12, 4> {};
template <> struct Dot<uint16_t> : WidenedDot<12, 4> {};
}  // namespace

#include "path.h"

namespace batchgen {
const Arithmetic* avx512_arithmetic(bool half) { return half ? arithmetic<uint16_t>() : arithmetic<float>(); }
}  // namespace batchgen
