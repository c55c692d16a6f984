// Bringing memory near before it is needed.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LINE = 64;  // bytes of a cache line

inline void fetch(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += LINE) _mm_prefetch(static_cast<const char*>(p) + at, _MM_HINT_T0);
}

}  // namespace
