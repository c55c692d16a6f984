// What one instruction path computes: single-threaded pieces that know nothing of batches, layers or threads.
//
// Owns the memory forms that all paths share.  Activations are rows of bfloat16 or float32, K consecutive values.
// A weight is a list of panels of 32 outputs: [K / pair][32][pair], pair = 2 for bfloat16, 1 for float32; outputs and
// inputs beyond the matrix are zero.  A KV page of one head holds keys as [d / pair][64][pair] and values as [64][d];
// one of int8 has a float32 scale for each token behind them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace batchgen {

constexpr int PANEL = 32;      // outputs of one panel
constexpr int MOST_ROWS = 32;  // of one `product` of any path
constexpr int PAGE = 64;       // tokens of one KV page
constexpr int BLOCK = 256;     // logits that are looked at together
constexpr int SCORES = 16;     // floats for each key of a page: the scores and shares of the lines that go by together
constexpr int SLACK = 16;      // values behind the last one that `gather` may overwrite

// The tokens of one row that one task attends for, in one KV head.  Line = token x query head of the group.
struct Queries {
  const void* q;           // first token's first query head of this group
  void* out;               // the same place in the result
  int64_t token_stride;    // elements from a token's q to the next one's
  int64_t out_stride;      // the same for `out`
  int tokens;              // consecutive tokens of the row
  int heads;               // query heads of the group
  int64_t size;            // values of one head, a multiple of 16
  int64_t position;        // of the first token
  const int64_t* pages;    // the row's page table
  const void* keys;        // page 0 of this KV head
  const void* values;
  int64_t page_stride;     // bytes from a page to the next one, the same for keys and values
  int64_t window;          // 0: sees all
  float scale;             // > 0
  const float* sinks;      // [heads] scores of one more key whose value is 0, or null
  const void* next;        // keys that will be needed after these
};

// Where the results of a panel go.  `rows` of `tile` are PANEL apart.
struct Finish {
  const float* bias;       // of the panel's first output, or null
  void* out;               // first row, first of the panel's outputs
  int64_t stride;          // elements between rows of `out`
  int columns;             // outputs of the panel that exist
};

// What a gated part makes of its halves: gate / (1 + exp(-alpha gate)) * (up + shift), after gate was cut at `limit`
// from above and up on both sides; infinity cuts nothing.
struct Activation {
  float alpha, limit, shift;
};

// Some logits of one line: the greatest, the sum of exp(x - greatest), NaN where a logit is not finite, and the
// greatest of those that may be chosen with the first id that has it.
struct Best {
  float sum;
  float greatest;
  float choice;
  int32_t id;
};

struct Arithmetic {
  int rows;                // greatest number of rows of one `product`, at most MOST_ROWS
  int pair;                // inputs that lie together in a panel
  int item;                // bytes of one value

  // tile[r][c] = sum over k, added in an order that depends on the path and on `inputs` alone, of a[r][k] * panel[k][c]
  void (*product)(const void* a, int64_t stride, int rows, const void* panel, int64_t inputs, float* tile);
  void (*keep)(const float* tile, int rows, const Finish& to);      // out = tile + bias
  void (*add)(const float* tile, int rows, const Finish& to);       // out += tile + bias, both rounded
  void (*gate)(float* gate, const float* up, int rows, const Finish& gates, const Finish& ups);  // out = silu(g) * u
  void (*activate)(float* gate, const float* up, int rows, const Finish& gates, const Finish& ups,
                   const Activation& by);
  // float32 out[at[r]] += weights[r] * (tile[r] + bias)
  void (*weigh)(const float* tile, int rows, const Finish& to, const int64_t* at, const float* weights);
  void (*best)(const float* panels, int64_t stride, int columns, int eligible, int32_t first, Best* line);
  void (*norm)(const void* x, const void* weight, int64_t size, float epsilon, void* out);
  void (*swiglu)(const void* gate_up, int64_t inner, void* out);
  void (*rope)(const void* x, const float* cosines, const float* sines, int64_t half, void* out);
  void (*put_key)(const void* x, int64_t size, void* page, int64_t slot);
  void (*attend)(const Queries& queries, void* scratch);

  // The same for pages of int8: see path_int8.h.
  void (*put_key_int8)(const void* x, int64_t size, void* page, int64_t slot);
  void (*put_value_int8)(const void* x, int64_t size, void* page, int64_t slot);
  void (*attend_int8)(const Queries& queries, void* scratch);

  // Sampling: see path_logits.h.
  float (*peak)(const float* x, int count, bool* finite);
  double (*mass)(const float* x, int count, float top, float temperature);
  void (*weights)(const float* x, int64_t count, float top, float temperature, float* scaled, float* weights);
  int64_t (*gather)(const float* x, int count, float least, int32_t first, int32_t* ids, float* values);
};

// Bytes of one panel of a weight with so many inputs.
inline int64_t panel_bytes(const Arithmetic& a, int64_t inputs) {
  return (inputs + a.pair - 1) / a.pair * a.pair * PANEL * a.item;
}

// Bytes that go with the sums of a line: those of its shares in the widest vector, and where it stands.
constexpr size_t LINE_STATE = 64 + 16;

// Bytes of scratch that `attend` needs for so many lines of so many values: of each its sums and its widened query.
inline size_t attend_scratch(int64_t lines, int64_t size) {
  return lines * (2 * size * sizeof(float) + LINE_STATE) + SCORES * PAGE * sizeof(float);
}

// Bytes that `attend_int8` needs besides: keys and values of one page, widened.
inline size_t widened_scratch(const Arithmetic& a, int64_t size) { return 2 * PAGE * size * a.item + 64; }

const Arithmetic* avx2_arithmetic(bool half);
const Arithmetic* avx512_arithmetic(bool half);
const Arithmetic* avx512_bf16_arithmetic();
const Arithmetic* amx_bf16_arithmetic(bool emulated);

}  // namespace batchgen
