// AVX2 and FMA with float32 accumulation.
#include "vec_avx2.h"

#include "dot.h"

namespace {
template <class S> struct Dot;
template <> struct Dot<float> : FloatDot<6, 3> {};
template <> struct Dot<uint16_t> : WidenedDot<6, 3> {};
}  // namespace

#include "path.h"

namespace batchgen {
const Arithmetic* avx2_arithmetic(bool half) { return half ? arithmetic<uint16_t>() : arithmetic<float>(); }
}  // namespace batchgen
