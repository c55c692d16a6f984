// Rows of values through packed weights, and how their work is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decoder.h"
#include "team.h"

namespace batchgen {
namespace {

constexpr int64_t CHUNK = 256;            // rows that go past a panel while it is in cache
constexpr int MOST_SHARES = 64;           // of all threads where work is shared out for good
constexpr int64_t PANELS = 2;             // of one task

inline int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline const void* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
inline void* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

struct alignas(64) Tile {
  float value[MOST_ROWS * PANEL];
  char between[64];  // tiles that follow each other don't compete for the same lines of a cache
};

// The rows of one chunk in as few blocks as a path allows, all but the last of one size: `use(first row, rows)`.
template <class Use> void row_blocks(const Arithmetic& a, int64_t begin, int64_t end, Use use) {
  const int64_t count = blocks(end - begin, a.rows), size = blocks(end - begin, count);
  for (int64_t row = begin; row < end; row += size) use(row, static_cast<int>(std::min(size, end - row)));
}

// Memory that is kept from call to call.  Never cleared: everything is written before it is read.
template <int COUNT> struct Buffers {
  std::vector<char> bytes[COUNT];
  void* get(int i, int64_t size) {
    if (static_cast<int64_t>(bytes[i].size()) < size) bytes[i].resize(size + size / 4);
    return bytes[i].data();
  }
};

// One task of a product: panels [first, last) of one weight, one chunk of rows.
struct Span {
  int64_t first_panel, last_panel, first_row, last_row;
};

class Spans {
 public:
  Spans(int64_t outputs, int64_t tokens, int64_t panels)
      : panels_(blocks(outputs, PANEL)), size_(panels), groups_(blocks(panels_, panels)), tokens_(tokens) {}
  int64_t count() const { return groups_ * blocks(tokens_, CHUNK); }
  Span operator[](int64_t i) const {
    const int64_t panel = i % groups_ * size_, row = i / groups_ * CHUNK;
    return {panel, std::min(panels_, panel + size_), row, std::min(tokens_, row + CHUNK)};
  }

 private:
  int64_t panels_, size_, groups_, tokens_;
};

// Some rows of a batch.
struct Rows {
  int64_t begin, end;
};

// Rows are shared out as one block for each thread, or some where a block would be too large for its caches.
inline int share_count(int64_t rows, const Team& team) {
  const int64_t rounds = blocks(rows, CHUNK * team.threads());
  return static_cast<int>(std::min<int64_t>(MOST_SHARES, rounds * team.threads()));
}

inline Rows share(int64_t rows, int index, int shares) { return {rows * index / shares, rows * (index + 1) / shares}; }

inline Span all_panels(const bg_weight& w, const Rows& rows) {
  return {0, blocks(w.outputs, PANEL), rows.begin, rows.end};
}

inline Finish finish(const Arithmetic& a, const bg_weight& w, int64_t panel, void* out, int64_t stride, int64_t row) {
  const int64_t column = panel * PANEL;
  return {w.bias ? w.bias + column : nullptr, at(out, (row * stride + column) * a.item), stride,
          static_cast<int>(std::min<int64_t>(PANEL, w.outputs - column))};
}

using Finisher = void (*)(const float*, int, const Finish&);

// x [tokens, inputs] times one weight, into `out` whose rows are `stride` apart.
inline void multiply(const Arithmetic& a, const void* x, const bg_weight& w, const Span& span, void* out,
                     int64_t stride, Finisher finisher) {
  Tile tile;
  const int64_t bytes = panel_bytes(a, w.inputs);
  for (int64_t panel = span.first_panel; panel < span.last_panel; panel++)
    row_blocks(a, span.first_row, span.last_row, [&](int64_t row, int rows) {
      a.product(at(x, row * w.inputs * a.item), w.inputs, rows, at(w.panels, panel * bytes), w.inputs, tile.value);
      finisher(tile.value, rows, finish(a, w, panel, out, stride, row));
    });
}

// out = what `join` makes of x gate and x up, as `Arithmetic::gate` does
template <class Join>
void multiply_gated(const Arithmetic& a, const void* x, const bg_weight& gate, const bg_weight& up, const Span& span,
                    void* out, Join join) {
  Tile gates, ups;
  const int64_t bytes = panel_bytes(a, gate.inputs);
  for (int64_t panel = span.first_panel; panel < span.last_panel; panel++)
    row_blocks(a, span.first_row, span.last_row, [&](int64_t row, int rows) {
      const void* line = at(x, row * gate.inputs * a.item);
      a.product(line, gate.inputs, rows, at(gate.panels, panel * bytes), gate.inputs, gates.value);
      a.product(line, gate.inputs, rows, at(up.panels, panel * bytes), up.inputs, ups.value);
      join(gates.value, ups.value, rows, finish(a, gate, panel, out, gate.outputs, row),
           finish(a, up, panel, out, gate.outputs, row));
    });
}

}  // namespace
}  // namespace batchgen
