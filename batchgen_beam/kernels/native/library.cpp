// The functions that Python calls.  Every pointer is the caller's; nothing is kept after a call, and the caller's float
// state neither counts nor changes.  What needs memory or threads returns a Status.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "decoder.h"
#include "float_state.h"
#include "sampling.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace batchgen;

namespace {

constexpr int INTERFACE = 6;

// Where it is not DONE, no work was.
enum Status { DONE, NO_MEMORY, NO_THREAD };

template <class Work> int guarded(Work work) {
  const FloatState floats;
  try {
    work();
    return DONE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  } catch (const std::length_error&) {
    return NO_MEMORY;
  } catch (const std::system_error&) {
    return NO_THREAD;
  }
}

// Whether the processor has tiles for bfloat16 and the system lets this process keep values in them; asks it to.
bool may_use_tiles() {
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;  // CPUID leaf 7, EDX
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;              // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
  return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

const Arithmetic* find(const char* path, int half) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(path, "avx2")) return avx2 ? avx2_arithmetic(half) : nullptr;
  if (!std::strcmp(path, "avx512")) return avx512 ? avx512_arithmetic(half) : nullptr;
  if (!std::strcmp(path, "avx512_bf16"))
    return half && avx512 && __builtin_cpu_supports("avx512bf16") ? avx512_bf16_arithmetic() : nullptr;
  if (!std::strcmp(path, "amx_bf16")) return half && avx512 && may_use_tiles() ? amx_bf16_arithmetic(false) : nullptr;
  if (!std::strcmp(path, "amx_bf16_emulated")) return half && avx512 ? amx_bf16_arithmetic(true) : nullptr;
  return nullptr;
}

}  // namespace

EXPORT int bg_interface() { return INTERFACE; }

// The arithmetic of a path for bfloat16 (`half`) or float32; null where this machine can't run it.
EXPORT const void* bg_arithmetic(const char* path, int half) { return find(path, half); }

EXPORT int64_t bg_packed_bytes(const Arithmetic* a, int64_t outputs, int64_t inputs) {
  return (outputs + PANEL - 1) / PANEL * panel_bytes(*a, inputs);
}

// [outputs, inputs], row after row, into panels.
EXPORT void bg_pack(const Arithmetic* a, const char* weight, int64_t outputs, int64_t inputs, char* panels) {
  std::memset(panels, 0, bg_packed_bytes(a, outputs, inputs));
  const int64_t steps = (inputs + a->pair - 1) / a->pair;
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < inputs; k++) {
      const int64_t to = ((n / PANEL * steps + k / a->pair) * PANEL + n % PANEL) * a->pair + k % a->pair;
      std::memcpy(panels + to * a->item, weight + (n * inputs + k) * a->item, a->item);
    }
}

EXPORT int bg_linear(const Arithmetic* a, int threads, const void* x, int64_t tokens, const bg_weight* parts,
                     int count, void* out) {
  return guarded([&] { linear(*a, threads, x, tokens, parts, count, out); });
}

EXPORT int bg_norm(const Arithmetic* a, int threads, const void* x, const void* weight, int64_t tokens, int64_t size,
                   float epsilon, void* out) {
  return guarded([&] { norm(*a, threads, x, weight, tokens, size, epsilon, out); });
}

EXPORT int bg_swiglu(const Arithmetic* a, int threads, const void* gate_up, int64_t tokens, int64_t inner, void* out) {
  return guarded([&] { swiglu(*a, threads, gate_up, tokens, inner, out); });
}

// `x` has `stride` elements between tokens, the heads of one token side by side; `out` is [tokens, heads, size].
EXPORT int bg_rope(const Arithmetic* a, int threads, const void* x, int64_t stride, const float* cosines,
                   const float* sines, int64_t tokens, int64_t heads, int64_t size, void* out) {
  return guarded([&] { rope(*a, threads, x, stride, {cosines, sines}, {tokens, heads, size}, out); });
}

EXPORT int bg_append_keys(const Arithmetic* a, int threads, const void* x, int64_t stride, const bg_batch* batch,
                          const bg_attention_shape* shape, void* cache) {
  return guarded([&] { append_keys(*a, threads, x, stride, *batch, *shape, cache); });
}

EXPORT int bg_append_values(const Arithmetic* a, int threads, const void* x, int64_t stride, const bg_batch* batch,
                            const bg_attention_shape* shape, void* cache) {
  return guarded([&] { append_values(*a, threads, x, stride, *batch, *shape, cache); });
}

EXPORT int bg_attention(const Arithmetic* a, int threads, const void* q, int64_t stride, const bg_batch* batch,
                        const bg_attention_shape* shape, const bg_cache* cache, void* out) {
  return guarded([&] { attention(*a, threads, q, stride, *batch, *shape, *cache, out); });
}

EXPORT int bg_head(const Arithmetic* a, int threads, const void* x, int64_t tokens, const bg_weight* weight,
                   const bg_result* result) {
  return guarded([&] { head(*a, threads, x, tokens, *weight, *result); });
}

EXPORT int bg_run_experts(const Arithmetic* a, int threads, const void* x, const bg_experts* some, float* totals) {
  return guarded([&] { experts(*a, threads, x, *some, totals); });
}

// Adds to `seconds` [BG_PARTS].
EXPORT int bg_forward(const Arithmetic* a, int threads, const bg_decoder* decoder, const bg_batch* batch,
                      const bg_cache* caches, const bg_result* result, double* seconds) {
  return guarded([&] { forward(*a, threads, *decoder, *batch, caches, *result, seconds); });
}

EXPORT int bg_sample(const Arithmetic* a, int threads, const bg_sampling* sampling) {
  return guarded([&] { sample(*a, threads, *sampling); });
}
