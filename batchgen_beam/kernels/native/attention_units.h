// Queries over the pages of their rows, cut into units, and tokens' entries on their way into pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "products.h"

namespace batchgen {
namespace {

constexpr int64_t TASKS = 8;              // of one thread in one phase of attention, where there is enough to do
constexpr int64_t MOST_UNITS = 24;        // of one such task
constexpr int64_t QUERY_LINES = 48;       // of one attention task: a page is in the nearest cache for all of them

// Bytes of one page of one KV head.
inline int64_t page_bytes(const Arithmetic& a, const bg_attention_shape& shape) {
  return PAGE * (shape.int8_pages ? shape.size + static_cast<int64_t>(sizeof(float)) : shape.size * a.item);
}

// Consecutive tokens of one row.
struct Block {
  int64_t row, token, count;
};

inline int64_t most_queries(const bg_attention_shape& shape) {
  return std::max<int64_t>(1, QUERY_LINES / (shape.heads / shape.kv_heads));
}

// The longest contexts first: what is left for the end is short.
inline std::vector<Block> longest_first(std::vector<Block> found, const bg_batch& batch) {
  std::stable_sort(found.begin(), found.end(), [&](const Block& one, const Block& other) {
    return batch.positions[one.token] * one.count > batch.positions[other.token] * other.count;
  });
  return found;
}

inline std::vector<Block> query_blocks(const bg_batch& batch, const bg_attention_shape& shape) {
  const int64_t most = most_queries(shape);
  std::vector<Block> found;
  for (int64_t row = 0; row < batch.rows; row++)
    for (int64_t token = batch.offsets[row]; token < batch.offsets[row + 1]; token += most)
      found.push_back({row, token, std::min(most, batch.offsets[row + 1] - token)});
  return longest_first(std::move(found), batch);
}

// Of the wanted tokens alone; `row` of each token.
inline std::vector<Block> wanted_blocks(const bg_batch& batch, const bg_attention_shape& shape,
                                 const std::vector<int64_t>& row) {
  const int64_t most = most_queries(shape);
  std::vector<Block> found;
  for (int64_t w = 0; w < batch.wanted; w++) {
    const int64_t token = batch.wanted_at[w];
    const bool follows = !found.empty() && found.back().row == row[token] && found.back().count < most &&
                         found.back().token + found.back().count == token;
    if (follows)
      found.back().count++;
    else
      found.push_back({row[token], token, 1});
  }
  return longest_first(std::move(found), batch);
}

// One unit: the tokens of one block in one KV head.  A task is some units that follow each other in memory.
struct Attention {
  const Arithmetic& a;
  const bg_batch& batch;
  const bg_attention_shape& shape;
  const std::vector<Block>& queries;
  const int64_t grain;

  Attention(const Arithmetic& arithmetic, const bg_batch& packed, const bg_attention_shape& heads,
            const std::vector<Block>& found, int threads)
      : a(arithmetic), batch(packed), shape(heads), queries(found),
        grain(std::clamp<int64_t>(units() / (TASKS * threads), 1, MOST_UNITS)) {}

  int64_t units() const { return static_cast<int64_t>(queries.size()) * shape.kv_heads; }
  int64_t count() const { return blocks(units(), grain); }

  size_t scratch() const {
    const int64_t heads = shape.heads / shape.kv_heads;
    return attend_scratch(std::max(QUERY_LINES, heads), shape.size) +
           (shape.int8_pages ? widened_scratch(a, shape.size) : 0);
  }

  void run(int64_t task, const void* q, int64_t stride, const bg_cache& cache, void* out, void* scratch) const {
    for (int64_t unit = task * grain; unit < std::min(units(), (task + 1) * grain); unit++)
      attend(unit, q, stride, cache, out, scratch);
  }

 private:
  const int64_t* pages(const Block& block) const { return batch.page_table + block.row * batch.table_width; }

  // The first page of a unit's keys.
  const void* first_keys(int64_t unit, const bg_cache& cache) const {
    const int64_t page = pages(queries[unit / shape.kv_heads])[0];
    return at(cache.keys, (page * shape.kv_heads + unit % shape.kv_heads) * page_bytes(a, shape));
  }

  void attend(int64_t unit, const void* q, int64_t stride, const bg_cache& cache, void* out, void* scratch) const {
    const Block& block = queries[unit / shape.kv_heads];
    const int64_t kv_head = unit % shape.kv_heads, heads = shape.heads / shape.kv_heads;
    const int64_t column = kv_head * heads * shape.size, width = shape.heads * shape.size;
    const int64_t page = page_bytes(a, shape);
    const auto attend = shape.int8_pages ? a.attend_int8 : a.attend;
    attend({at(q, (block.token * stride + column) * a.item), at(out, (block.token * width + column) * a.item), stride,
            width, static_cast<int>(block.count), static_cast<int>(heads), shape.size, batch.positions[block.token],
            pages(block), at(cache.keys, page * kv_head), at(cache.values, page * kv_head), page * shape.kv_heads,
            shape.window, shape.scale, shape.sinks ? shape.sinks + kv_head * heads : nullptr,
            unit + 1 < units() ? first_keys(unit + 1, cache) : nullptr},
           scratch);
  }
};

// Row of each token.
inline std::vector<int64_t> rows_of(const bg_batch& batch) {
  std::vector<int64_t> row(batch.tokens);
  for (int64_t r = 0; r < batch.rows; r++)
    std::fill(row.begin() + batch.offsets[r], row.begin() + batch.offsets[r + 1], r);
  return row;
}

// The page of a token's position in its row: one KV head of `cache`.
inline void* page_of(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row,
                     int64_t token, int64_t kv_head, void* cache) {
  const int64_t page = batch.page_table[row * batch.table_width + batch.positions[token] / PAGE];
  return at(cache, (page * shape.kv_heads + kv_head) * page_bytes(a, shape));
}

inline void append_key(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row,
                       int64_t token, const void* x, void* cache) {
  const auto put = shape.int8_pages ? a.put_key_int8 : a.put_key;
  for (int64_t head = 0; head < shape.kv_heads; head++)
    put(at(x, head * shape.size * a.item), shape.size, page_of(a, batch, shape, row, token, head, cache),
        batch.positions[token] % PAGE);
}

inline void append_value(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row,
                  int64_t token, const void* x, void* cache) {
  const int64_t bytes = shape.size * a.item, slot = batch.positions[token] % PAGE;
  for (int64_t head = 0; head < shape.kv_heads; head++) {
    void* page = page_of(a, batch, shape, row, token, head, cache);
    if (shape.int8_pages)
      a.put_value_int8(at(x, head * bytes), shape.size, page, slot);
    else
      std::memcpy(at(page, slot * bytes), at(x, head * bytes), bytes);
  }
}

}  // namespace
}  // namespace batchgen
