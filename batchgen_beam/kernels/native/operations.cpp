// The decoder's operations one by one.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_units.h"
#include "decoder.h"
#include "products.h"
#include "team.h"
#include "vocabulary_head.h"

namespace batchgen {
namespace {

constexpr int64_t LINES = 16;             // of one task
constexpr int64_t ALONE = 256 << 10;      // bytes that one thread has done before another would have come

// `use(line)` for lines of so many bytes, which don't depend on each other.
template <class Use> void each_line(int threads, int64_t lines, int64_t bytes, Use use) {
  run_team(lines * bytes < ALONE ? 1 : threads, [&](Team& team, int thread) {
    team.each(blocks(lines, LINES), thread, [&](int64_t i, int) {
      for (int64_t line = i * LINES; line < std::min(lines, (i + 1) * LINES); line++) use(line);
    });
  });
}

}  // namespace

void norm(const Arithmetic& a, int threads, const void* x, const void* weight, int64_t tokens, int64_t size,
          float epsilon, void* out) {
  const int64_t bytes = size * a.item;
  each_line(threads, tokens, bytes,
            [&](int64_t t) { a.norm(at(x, t * bytes), weight, size, epsilon, at(out, t * bytes)); });
}

void swiglu(const Arithmetic& a, int threads, const void* gate_up, int64_t tokens, int64_t inner, void* out) {
  const int64_t bytes = inner * a.item;
  each_line(threads, tokens, 2 * bytes,
            [&](int64_t t) { a.swiglu(at(gate_up, 2 * t * bytes), inner, at(out, t * bytes)); });
}

void rope(const Arithmetic& a, int threads, const void* x, int64_t stride, const Angles& angles, const Heads& heads,
          void* out) {
  const int64_t bytes = heads.size * a.item, half = heads.size / 2;
  each_line(threads, heads.tokens, heads.count * bytes, [&](int64_t t) {
    for (int64_t h = 0; h < heads.count; h++)
      a.rope(at(x, t * stride * a.item + h * bytes), angles.cosines + t * half, angles.sines + t * half, half,
             at(out, (t * heads.count + h) * bytes));
  });
}

void linear(const Arithmetic& a, int threads, const void* x, int64_t tokens, const bg_weight* parts, int count,
            void* out) {
  int64_t stride = 0;
  for (int i = 0; i < count; i++) stride += parts[i].outputs;
  run_team(threads, [&](Team& team, int thread) {
    int64_t column = 0;
    for (int part = 0; part < count; column += parts[part++].outputs) {
      const Spans spans(parts[part].outputs, tokens, PANELS);
      team.each(spans.count(), thread, [&](int64_t i, int) {
        multiply(a, x, parts[part], spans[i], at(out, column * a.item), stride, a.keep);
      });
    }
  });
}

void attention(const Arithmetic& a, int threads, const void* q, int64_t stride, const bg_batch& batch,
               const bg_attention_shape& shape, const bg_cache& cache, void* out) {
  const std::vector<Block> queries = query_blocks(batch, shape);
  const Attention task(a, batch, shape, queries, threads);
  std::vector<char> scratch(threads * task.scratch());
  run_team(threads, [&](Team& team, int thread) {
    team.each(task.count(), thread, [&](int64_t i, int who) {
      task.run(i, q, stride, cache, out, scratch.data() + who * task.scratch());
    });
  });
}

void append_keys(const Arithmetic& a, int threads, const void* x, int64_t stride, const bg_batch& batch,
                 const bg_attention_shape& shape, void* cache) {
  const std::vector<int64_t> row = rows_of(batch);
  each_line(threads, batch.tokens, shape.kv_heads * shape.size * a.item, [&](int64_t t) {
    append_key(a, batch, shape, row[t], t, at(x, t * stride * a.item), cache);
  });
}

void append_values(const Arithmetic& a, int threads, const void* x, int64_t stride, const bg_batch& batch,
                   const bg_attention_shape& shape, void* cache) {
  const std::vector<int64_t> row = rows_of(batch);
  each_line(threads, batch.tokens, shape.kv_heads * shape.size * a.item, [&](int64_t t) {
    append_value(a, batch, shape, row[t], t, at(x, t * stride * a.item), cache);
  });
}

void head(const Arithmetic& a, int threads, const void* x, int64_t tokens, const bg_weight& weight,
          const bg_result& result) {
  Head task(a, weight, tokens, result);
  run_team(threads, [&](Team& team, int thread) {
    team.each(task.count(), thread, [&](int64_t i, int) { task.run(i, x); });
    team.each(tokens, thread, [&](int64_t w, int) { task.settle(w); });
  });
}

}  // namespace batchgen
