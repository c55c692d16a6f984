// How the calling thread rounds and what it does with subnormal numbers, for as long as an object lives: to nearest,
// and they are numbers.  Programs change this for themselves (torch.set_flush_denormal), and a new thread begins with
// what its maker had; results depend on neither.
#pragma once

#include <immintrin.h>

namespace batchgen {

class FloatState {
 public:
  FloatState() : before_(_mm_getcsr()) { _mm_setcsr(DEFAULT); }
  ~FloatState() { _mm_setcsr(before_); }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  static constexpr unsigned DEFAULT = 0x1f80;  // every exception masked and none raised, nothing flushed to zero
  const unsigned before_;
};

}  // namespace batchgen
