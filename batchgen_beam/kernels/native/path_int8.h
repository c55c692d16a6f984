// KV pages of int8 on one instruction path: how a token's entry gets into one, and how one is read.
//
// Value = code * scale, rounded once to S.  The scale is the greatest magnitude of a token's head / 127, fixed when the
// entry is written.  A page of one head is [size x 64] codes, which lie as the values of any other page do, and then 64
// scales.  Included by `path.h`, whose vectors and whose attention it uses.
#pragma once

#include <cmath>
#include <cstring>

#include "arithmetic.h"

namespace {

constexpr float MOST_CODE = 127;

inline float* scales_of(void* page, int64_t size) {
  return reinterpret_cast<float*>(static_cast<int8_t*>(page) + PAGE * size);
}
inline const float* scales_of(const int8_t* page, int64_t size) {
  return reinterpret_cast<const float*>(page + PAGE * size);
}

// What one step of the codes is worth; NaN where a value is not finite, 0 where all are 0.
template <class S> float step_of(const S* x, int64_t size) {
  Vec top = zero(), check = zero();
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec v = load(x + i);
    top = max(top, max(v, sub(zero(), v)));
    check = fma(v, zero(), check);  // NaN where one value is not finite
  }
  return sum(check) == 0.f ? greatest(top) / MOST_CODE : NAN;
}

// LANES values; zeros where the step is NaN, which then makes them NaN again.  A step that is subnormal is too coarse
// for its own quotients to end at 127.
template <class S> void encode(const S* x, float step, int8_t* codes) {
  const Vec steps = step > 0.f ? divide(load(x), set1(step)) : zero();
  store(codes, min(max(steps, set1(-MOST_CODE)), set1(MOST_CODE)));
}

template <class S> void put_key_int8(const void* x, int64_t size, void* page, int64_t slot) {
  const S* in = static_cast<const S*>(x);
  const float step = step_of(in, size);
  int8_t* to = static_cast<int8_t*>(page) + slot * PAIR<S>;
  alignas(64) int8_t codes[LANES];
  for (int64_t i = 0; i < size; i += LANES) {
    encode(in + i, step, codes);
    for (int c = 0; c < LANES; c += PAIR<S>, to += PAGE * PAIR<S>) std::memcpy(to, codes + c, PAIR<S>);
  }
  scales_of(page, size)[slot] = step;
}

template <class S> void put_value_int8(const void* x, int64_t size, void* page, int64_t slot) {
  const S* in = static_cast<const S*>(x);
  const float step = step_of(in, size);
  for (int64_t i = 0; i < size; i += LANES) encode(in + i, step, static_cast<int8_t*>(page) + slot * size + i);
  scales_of(page, size)[slot] = step;
}

// [size / pair][64][pair]: a line of codes has one scale for each token.  Meanwhile `ahead`, a page of the same size,
// is brought near; null: nothing is.
template <class S> void widen_keys(const int8_t* page, int64_t size, S* out, const int8_t* ahead) {
  constexpr int LINE_CODES = PAGE * PAIR<S>;
  const float* scales = scales_of(page, size);
  alignas(64) float factors[LINE_CODES];
  for (int c = 0; c < LINE_CODES; c++) factors[c] = scales[c / PAIR<S>];
  for (int64_t at = 0; at < PAGE * size; at += LINE_CODES) {
    if (ahead) fetch(ahead + at, LINE_CODES);
#pragma GCC unroll 8
    for (int c = 0; c < LINE_CODES; c += LANES) store(out + at + c, mul(load(page + at + c), load(factors + c)));
  }
  if (ahead) fetch(ahead + PAGE * size, PAGE * sizeof(float));
}

// [64][size]; `ahead` is as in `widen_keys`.
template <class S> void widen_values(const int8_t* page, int64_t size, S* out, const int8_t* ahead) {
  const float* scales = scales_of(page, size);
  for (int t = 0; t < PAGE; t++) {
    const Vec factor = set1(scales[t]);
    if (ahead) fetch(ahead + t * size, size);
    for (int64_t at = t * size; at < (t + 1) * size; at += LANES) store(out + at, mul(load(page + at), factor));
  }
  if (ahead) fetch(ahead + PAGE * size, PAGE * sizeof(float));
}

// Each page is widened once for all lines, while the one that comes after it is brought near.
template <class S> void attend_int8(const Queries& of, void* scratch) {
  const int64_t count = PAGE * of.size;
  S* keys = reinterpret_cast<S*>((reinterpret_cast<uintptr_t>(scratch) + LINE - 1) / LINE * LINE);
  S* values = keys + count;
  attend_pages<S>(of, values + count, [&](int64_t at, int64_t ahead) -> Near<S> {
    const int8_t* value_page = static_cast<const int8_t*>(behind(of.values, at));
    const void* next = ahead < 0 ? of.next : behind(of.keys, ahead);
    widen_keys(static_cast<const int8_t*>(behind(of.keys, at)), of.size, keys, value_page);
    widen_values(value_page, of.size, values, static_cast<const int8_t*>(next));
    return {keys, values, nullptr, false};
  });
}

}  // namespace
