// A batch through products, caches and whole decoders, on a team of threads.
//
// The structs are the C interface: kernels/native_library.py declares the same fields in the same order.
#pragma once

#include <cstdint>

#include "arithmetic.h"

extern "C" {

// [outputs, inputs] in panels; `bias` float32 or null.
struct bg_weight {
  const void* panels;
  const float* bias;
  int64_t outputs;
  int64_t inputs;
};

// Any mix of prompt chunks and decode tokens, packed row by row; all int64.
struct bg_batch {
  int64_t tokens, rows, wanted, table_width;
  const int64_t* token_ids;   // [tokens]
  const int64_t* positions;   // [tokens]
  const int64_t* offsets;     // [rows + 1]
  const int64_t* wanted_at;   // [wanted] indices of tokens
  const int64_t* page_table;  // [rows, table_width]
};

struct bg_cache {
  void* keys;                 // [pages, kv heads, size / pair, 64, pair]
  void* values;               // [pages, kv heads, 64, size]; of int8, each head's 64 scales follow its codes in both
};

struct bg_attention_shape {
  int64_t heads, kv_heads, size, window;  // window 0: sees all
  int64_t int8_pages;         // 1: caches are of int8 with scales; 0: of the values' own type
  float scale;
  const float* sinks;         // [heads], float32 scores of one more key for each head, whose value is 0; or null
};

struct bg_expert {
  bg_weight gate, up, down;
};

// Experts that are in memory together, and the tokens that go to them.
struct bg_experts {
  const bg_expert* experts;   // [count]
  const int64_t* ends;        // [count] where each one's assignments end; they begin at 0
  int64_t count;
  const int64_t* tokens_at;   // [assignments] tokens, each once for an expert
  const float* weights;       // [assignments]
  float alpha, limit, shift;  // see Activation
};

struct bg_layer {
  const void* attention_norm;
  bg_weight qkv[3];
  bg_weight out;
  const void* feed_forward_norm;
  bg_weight gate, up, down;
};

struct bg_decoder {
  const bg_layer* layers;
  int64_t layer_count, hidden, inner;
  bg_attention_shape attention;
  float epsilon;
  const void* table;          // [vocabulary, hidden]
  const void* norm;
  bg_weight head;
  const float* cosines;       // [context, size / 2]
  const float* sines;
};

// Where the time of a forward pass goes, as its first thread sees it.  Where threads work on rows of their own, what
// they wait for each other is told apart; elsewhere it is part of what they wait for.
enum bg_part { BG_NORM, BG_QKV, BG_APPEND, BG_ATTENTION, BG_OUT, BG_GATE_UP, BG_DOWN, BG_HEAD, BG_WAIT, BG_PARTS };

// What a wanted token comes to.  `logits_at[w]` is a line of `logits`, or -1 where the greatest logit is enough.
struct bg_result {
  int64_t eligible;           // ids from here on are never chosen
  const int64_t* logits_at;   // [wanted]
  float* logits;              // [lines, vocabulary]
  int64_t* ids;               // [wanted]
  float* logprobs;            // [wanted], NaN where a logit is not finite
};
}

namespace batchgen {

void linear(const Arithmetic& a, int threads, const void* x, int64_t tokens, const bg_weight* parts, int count,
            void* out);
// Line by line, each by one thread.
void norm(const Arithmetic& a, int threads, const void* x, const void* weight, int64_t tokens, int64_t size,
          float epsilon, void* out);
void swiglu(const Arithmetic& a, int threads, const void* gate_up, int64_t tokens, int64_t inner, void* out);
// Heads of `x` side by side, tokens `stride` apart; angles [tokens, size / 2]; out [tokens, heads, size].
struct Angles {
  const float *cosines, *sines;
};
struct Heads {
  int64_t tokens, count, size;
};
void rope(const Arithmetic& a, int threads, const void* x, int64_t stride, const Angles& angles, const Heads& heads,
          void* out);
void attention(const Arithmetic& a, int threads, const void* q, int64_t stride, const bg_batch& batch,
               const bg_attention_shape& shape, const bg_cache& cache, void* out);
void append_keys(const Arithmetic& a, int threads, const void* x, int64_t stride, const bg_batch& batch,
                 const bg_attention_shape& shape, void* cache);
void append_values(const Arithmetic& a, int threads, const void* x, int64_t stride, const bg_batch& batch,
                   const bg_attention_shape& shape, void* cache);
void head(const Arithmetic& a, int threads, const void* x, int64_t tokens, const bg_weight& weight,
          const bg_result& result);
// totals, float32 [tokens, x's width], += weight * expert(x), expert by expert
void experts(const Arithmetic& a, int threads, const void* x, const bg_experts& some, float* totals);
void forward(const Arithmetic& a, int threads, const bg_decoder& decoder, const bg_batch& batch,
             const bg_cache* caches, const bg_result& result, double* seconds);

}  // namespace batchgen
