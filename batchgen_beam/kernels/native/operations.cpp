// The decoder's operations one by one.
#include <cstdint>
#include <vector>

#include "attention_units.h"
#include "decoder.h"
#include "products.h"
#include "team.h"
#include "vocabulary_head.h"

namespace batchgen {

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

void append_keys(const Arithmetic& a, const void* x, int64_t stride, const bg_batch& batch,
                 const bg_attention_shape& shape, void* cache) {
  const std::vector<int64_t> row = rows_of(batch);
  for (int64_t t = 0; t < batch.tokens; t++) append_key(a, batch, shape, row[t], t, at(x, t * stride * a.item), cache);
}

void append_values(const Arithmetic& a, const void* x, int64_t stride, const bg_batch& batch,
                   const bg_attention_shape& shape, void* cache) {
  const std::vector<int64_t> row = rows_of(batch);
  for (int64_t t = 0; t < batch.tokens; t++)
    append_value(a, batch, shape, row[t], t, at(x, t * stride * a.item), cache);
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
