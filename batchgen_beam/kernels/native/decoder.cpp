#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "team.h"

namespace batchgen {
namespace {

constexpr int64_t CHUNK = 256;            // rows that go past a panel while it is in cache
constexpr int64_t OWN_ROWS = 24;          // from so many rows for each thread on, threads share out rows, not panels
constexpr int SHARES = 2;                 // of one thread where panels are shared out
constexpr int MOST_SHARES = 64;           // of all
constexpr int64_t PANELS = 2;             // of one task
constexpr int64_t HEAD_PANELS = 8;        // of one task of the head
constexpr int64_t LINES = 8;              // tokens of one task that goes token by token
constexpr int64_t TASKS = 8;              // of one thread in one phase of attention, where there is enough to do
constexpr int64_t MOST_UNITS = 24;        // of one such task
constexpr int64_t QUERY_LINES = 48;       // of one attention task: a page is in the nearest cache for all of them
constexpr int64_t MEMORY_PAGE = 4096;     // bytes, the least that the system hands out

int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

const void* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
void* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

struct alignas(64) Tile {
  float value[MOST_ROWS * PANEL];
  char between[64];  // tiles that follow each other don't compete for the same lines of a cache
};

// The rows of one chunk in as few blocks as a path allows, all but the last of one size: `use(first row, rows)`.
template <class Use> void row_blocks(const Arithmetic& a, int64_t begin, int64_t end, Use use) {
  const int64_t count = blocks(end - begin, a.rows), size = blocks(end - begin, count);
  for (int64_t row = begin; row < end; row += size) use(row, static_cast<int>(std::min(size, end - row)));
}

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
int share_count(int64_t rows, const Team& team) {
  const int64_t rounds = blocks(rows, CHUNK * team.threads());
  return static_cast<int>(std::min<int64_t>(MOST_SHARES, rounds * team.threads()));
}

Rows share(int64_t rows, int index, int shares) { return {rows * index / shares, rows * (index + 1) / shares}; }

Span all_panels(const bg_weight& w, const Rows& rows) { return {0, blocks(w.outputs, PANEL), rows.begin, rows.end}; }

Finish finish(const Arithmetic& a, const bg_weight& w, int64_t panel, void* out, int64_t stride, int64_t row) {
  const int64_t column = panel * PANEL;
  return {w.bias ? w.bias + column : nullptr, at(out, (row * stride + column) * a.item), stride,
          static_cast<int>(std::min<int64_t>(PANEL, w.outputs - column))};
}

using Finisher = void (*)(const float*, int, const Finish&);

// x [tokens, inputs] times one weight, into `out` whose rows are `stride` apart.
void multiply(const Arithmetic& a, const void* x, const bg_weight& w, const Span& span, void* out, int64_t stride,
              Finisher finisher) {
  Tile tile;
  const int64_t bytes = panel_bytes(a, w.inputs);
  for (int64_t panel = span.first_panel; panel < span.last_panel; panel++)
    row_blocks(a, span.first_row, span.last_row, [&](int64_t row, int rows) {
      a.product(at(x, row * w.inputs * a.item), w.inputs, rows, at(w.panels, panel * bytes), w.inputs, tile.value);
      finisher(tile.value, rows, finish(a, w, panel, out, stride, row));
    });
}

// out = silu(x gate) * (x up)
void multiply_gated(const Arithmetic& a, const void* x, const bg_weight& gate, const bg_weight& up, const Span& span,
                    void* out) {
  Tile gates, ups;
  const int64_t bytes = panel_bytes(a, gate.inputs);
  for (int64_t panel = span.first_panel; panel < span.last_panel; panel++)
    row_blocks(a, span.first_row, span.last_row, [&](int64_t row, int rows) {
      const void* line = at(x, row * gate.inputs * a.item);
      a.product(line, gate.inputs, rows, at(gate.panels, panel * bytes), gate.inputs, gates.value);
      a.product(line, gate.inputs, rows, at(up.panels, panel * bytes), up.inputs, ups.value);
      a.gate(gates.value, ups.value, rows, finish(a, gate, panel, out, gate.outputs, row),
             finish(a, up, panel, out, gate.outputs, row));
    });
}

// --- attention -------------------------------------------------------------------------------------------------------

// Bytes of one page of one KV head.
int64_t page_bytes(const Arithmetic& a, const bg_attention_shape& shape) {
  return PAGE * (shape.int8_pages ? shape.size + static_cast<int64_t>(sizeof(float)) : shape.size * a.item);
}

// Consecutive tokens of one row.
struct Block {
  int64_t row, token, count;
};

// The longest contexts first: what is left for the end is short.
std::vector<Block> query_blocks(const bg_batch& batch, const bg_attention_shape& shape) {
  const int64_t most = std::max<int64_t>(1, QUERY_LINES / (shape.heads / shape.kv_heads));
  std::vector<Block> found;
  for (int64_t row = 0; row < batch.rows; row++)
    for (int64_t token = batch.offsets[row]; token < batch.offsets[row + 1]; token += most)
      found.push_back({row, token, std::min(most, batch.offsets[row + 1] - token)});
  std::stable_sort(found.begin(), found.end(), [&](const Block& one, const Block& other) {
    return batch.positions[one.token] * one.count > batch.positions[other.token] * other.count;
  });
  return found;
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
            shape.window, shape.scale, unit + 1 < units() ? first_keys(unit + 1, cache) : nullptr},
           scratch);
  }
};

// Row of each token.
std::vector<int64_t> rows_of(const bg_batch& batch) {
  std::vector<int64_t> row(batch.tokens);
  for (int64_t r = 0; r < batch.rows; r++)
    std::fill(row.begin() + batch.offsets[r], row.begin() + batch.offsets[r + 1], r);
  return row;
}

// The page of a token's position in its row: one KV head of `cache`.
void* page_of(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row, int64_t token,
              int64_t kv_head, void* cache) {
  const int64_t page = batch.page_table[row * batch.table_width + batch.positions[token] / PAGE];
  return at(cache, (page * shape.kv_heads + kv_head) * page_bytes(a, shape));
}

void append_key(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row, int64_t token,
                const void* x, void* cache) {
  const auto put = shape.int8_pages ? a.put_key_int8 : a.put_key;
  for (int64_t head = 0; head < shape.kv_heads; head++)
    put(at(x, head * shape.size * a.item), shape.size, page_of(a, batch, shape, row, token, head, cache),
        batch.positions[token] % PAGE);
}

void append_value(const Arithmetic& a, const bg_batch& batch, const bg_attention_shape& shape, int64_t row,
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

// --- head ------------------------------------------------------------------------------------------------------------

// A group is the panels of one task: small enough for the second cache, so that all rows can go past it.
class Head {
 public:
  Head(const Arithmetic& a, const bg_weight& weight, int64_t tokens, const bg_result& result)
      : a_(a), w_(weight), result_(result), spans_(weight.outputs, tokens, HEAD_PANELS),
        groups_(blocks(weight.outputs, PANEL * HEAD_PANELS)), best_(tokens * groups_) {}

  int64_t count() const { return spans_.count(); }

  void run(int64_t task, const void* x) { run(spans_[task], x); }

  // All logits of some rows.
  void run(const Rows& rows, const void* x) {
    const int64_t panels = blocks(w_.outputs, PANEL);
    for (int64_t panel = 0; panel < panels; panel += HEAD_PANELS)
      run(Span{panel, std::min(panels, panel + HEAD_PANELS), rows.begin, rows.end}, x);
  }

  // Of one token, once all tasks have run: the groups in ascending order.
  void settle(int64_t token) const {
    if (result_.logits_at[token] >= 0) return;
    const Best* found = &best_[token * groups_];
    float greatest = found->greatest;
    const Best* choice = found;
    for (int64_t group = 1; group < groups_; group++) {
      greatest = std::max(greatest, found[group].greatest);
      if (found[group].choice > choice->choice) choice = found + group;
    }
    double sum = 0;
    for (int64_t group = 0; group < groups_; group++)
      sum += found[group].sum * std::exp(static_cast<double>(found[group].greatest) - greatest);
    result_.ids[token] = choice->id;
    result_.logprobs[token] = static_cast<float>(choice->choice - (greatest + std::log(sum)));
  }

 private:
  void run(const Span& span, const void* x) {
    Tile tiles[HEAD_PANELS];
    const int64_t bytes = panel_bytes(a_, w_.inputs);
    row_blocks(a_, span.first_row, span.last_row, [&](int64_t row, int rows) {
      for (int64_t panel = span.first_panel; panel < span.last_panel; panel++)
        a_.product(at(x, row * w_.inputs * a_.item), w_.inputs, rows, at(w_.panels, panel * bytes), w_.inputs,
                   tiles[panel - span.first_panel].value);
      for (int r = 0; r < rows; r++) take(tiles, r, row + r, span.first_panel);
    });
  }

  void take(const Tile* tiles, int r, int64_t row, int64_t first_panel) {
    const int64_t column = first_panel * PANEL, line = result_.logits_at[row];
    const int columns = static_cast<int>(std::min<int64_t>(PANEL * HEAD_PANELS, w_.outputs - column));
    const int eligible = static_cast<int>(std::clamp<int64_t>(result_.eligible - column, 0, columns));
    if (line < 0)
      return a_.best(tiles->value + r * PANEL, sizeof(Tile) / sizeof(float), columns, eligible,
                     static_cast<int32_t>(column), &best_[row * groups_ + first_panel / HEAD_PANELS]);
    for (int c = 0; c < columns; c += PANEL)
      std::memcpy(result_.logits + line * w_.outputs + column + c, tiles[c / PANEL].value + r * PANEL,
                  std::min(PANEL, columns - c) * sizeof(float));
  }

  const Arithmetic& a_;
  const bg_weight& w_;
  const bg_result& result_;
  const Spans spans_;
  const int64_t groups_;
  std::vector<Best> best_;
};

// --- decoder ---------------------------------------------------------------------------------------------------------

// Adds the time since the last call to a part's sum.
class Laps {
 public:
  explicit Laps(double* seconds) : seconds_(seconds), last_(std::chrono::steady_clock::now()) {}
  void operator()(bg_part part) {
    if (!seconds_) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* const seconds_;
  std::chrono::steady_clock::time_point last_;
};

// Buffers of one forward pass.  Never cleared: everything is written before it is read.
struct Buffers {
  std::vector<char> bytes[6];
  void* get(int i, int64_t size) {
    if (static_cast<int64_t>(bytes[i].size()) < size) bytes[i].resize(size + size / 4);
    return bytes[i].data();
  }
};

// One forward pass as its phases; every thread of the team goes through all of them.
class Pass {
 public:
  Pass(const Arithmetic& a, const bg_decoder& decoder, const bg_batch& batch, const bg_cache* caches,
       const bg_result& result, double* seconds, Buffers& buffers, int threads)
      : a_(a), d_(decoder), b_(batch), caches_(caches), seconds_(seconds), shape_(decoder.attention),
        tokens_(batch.tokens), line_(decoder.hidden * a.item),
        width_((shape_.heads + 2 * shape_.kv_heads) * shape_.size), mixed_width_(shape_.heads * shape_.size),
        row_(rows_of(batch)), queries_(query_blocks(batch, shape_)), attention_(a, batch, shape_, queries_, threads),
        head_(a, decoder.head, batch.wanted, result), scratch_(attention_.scratch()) {
    hidden_ = buffers.get(0, tokens_ * line_);
    normed_ = buffers.get(1, std::max(tokens_, b_.wanted) * line_);
    qkv_ = buffers.get(2, tokens_ * width_ * a.item);
    mixed_ = buffers.get(3, tokens_ * mixed_width_ * a.item);
    inner_ = buffers.get(4, tokens_ * d_.inner * a.item);
    lines_ = buffers.get(5, threads * scratch_);
  }

  void run(Team& team, int thread) {
    Laps lap(thread ? nullptr : seconds_);
    team.each(d_.layer_count, thread, [&](int64_t layer, int) { touch(caches_[layer]); });
    lap(BG_APPEND);
    if (tokens_ >= OWN_ROWS * team.threads())
      layers_by_rows(team, thread, lap);
    else
      layers_by_panels(team, thread, lap);
    team.each(blocks(b_.wanted, LINES), thread, [&](int64_t i, int) {
      for (int64_t w = i * LINES; w < std::min(b_.wanted, (i + 1) * LINES); w++)
        a_.norm(at(hidden_, b_.wanted_at[w] * line_), d_.norm, d_.hidden, d_.epsilon, at(normed_, w * line_));
    });
    lap(BG_NORM);
    if (b_.wanted >= OWN_ROWS * team.threads()) {
      const int shares = share_count(b_.wanted, team);
      team.own(shares, thread, [&](int i) { head_.run(share(b_.wanted, i, shares), normed_); });
    } else {
      team.each(head_.count(), thread, [&](int64_t i, int) { head_.run(i, normed_); });
    }
    team.each(b_.wanted, thread, [&](int64_t w, int) { head_.settle(w); });
    lap(BG_HEAD);
  }

 private:
  // Few rows: all threads work on all rows, each on some panels, so that each weight is read once.
  void layers_by_panels(Team& team, int thread, Laps& lap) {
    each_rows(team, thread, [&](const Rows& rows) { embed(rows); });
    for (int64_t i = 0; i < d_.layer_count; i++) {
      const bg_layer& layer = d_.layers[i];
      each_rows(team, thread, [&](const Rows& rows) { norm(layer.attention_norm, rows); });
      lap(BG_NORM);
      project(team, thread, layer);
      lap(BG_QKV);
      each_rows(team, thread, [&](const Rows& rows) { append(caches_[i], rows); });
      lap(BG_APPEND);
      attend(team, thread, caches_[i]);
      lap(BG_ATTENTION);
      product(team, thread, mixed_, layer.out);
      lap(BG_OUT);
      each_rows(team, thread, [&](const Rows& rows) { norm(layer.feed_forward_norm, rows); });
      lap(BG_NORM);
      each_panels(team, thread, blocks(d_.inner, PANEL), [&](int64_t first, int64_t last) {
        multiply_gated(a_, normed_, layer.gate, layer.up, {first, last, 0, tokens_}, inner_);
      });
      lap(BG_GATE_UP);
      product(team, thread, inner_, layer.down);
      lap(BG_DOWN);
    }
  }

  // Many rows: each thread works on its own rows and finds them in its caches; only attention, whose cost differs from
  // row to row and which reads what others appended, is shared out anew.
  void layers_by_rows(Team& team, int thread, Laps& lap) {
    const int shares = share_count(tokens_, team);
    team.own(shares, thread, [&](int i) {
      embed(share(tokens_, i, shares));
      before_attention(0, share(tokens_, i, shares), lap);
    });
    for (int64_t layer = 0; layer < d_.layer_count; layer++) {
      lap(BG_WAIT);
      attend(team, thread, caches_[layer]);
      lap(BG_ATTENTION);
      team.own(shares, thread, [&](int i) {
        after_attention(layer, share(tokens_, i, shares), lap);
        if (layer + 1 < d_.layer_count) before_attention(layer + 1, share(tokens_, i, shares), lap);
      });
    }
    lap(BG_WAIT);
  }

  void before_attention(int64_t index, const Rows& rows, Laps& lap) {
    const bg_layer& layer = d_.layers[index];
    norm(layer.attention_norm, rows);
    lap(BG_NORM);
    void* out = qkv_;
    for (const bg_weight& weight : layer.qkv) {
      multiply(a_, normed_, weight, all_panels(weight, rows), out, width_, a_.keep);
      out = at(out, weight.outputs * a_.item);
    }
    lap(BG_QKV);
    append(caches_[index], rows);
    lap(BG_APPEND);
  }

  void after_attention(int64_t index, const Rows& rows, Laps& lap) {
    const bg_layer& layer = d_.layers[index];
    multiply(a_, mixed_, layer.out, all_panels(layer.out, rows), hidden_, d_.hidden, a_.add);
    lap(BG_OUT);
    norm(layer.feed_forward_norm, rows);
    lap(BG_NORM);
    multiply_gated(a_, normed_, layer.gate, layer.up, all_panels(layer.gate, rows), inner_);
    lap(BG_GATE_UP);
    multiply(a_, inner_, layer.down, all_panels(layer.down, rows), hidden_, d_.hidden, a_.add);
    lap(BG_DOWN);
  }

  template <class Use> void each_rows(Team& team, int thread, Use use) {
    team.each(blocks(tokens_, LINES), thread,
              [&](int64_t i, int) { use(Rows{i * LINES, std::min(tokens_, (i + 1) * LINES)}); });
  }

  void embed(const Rows& rows) {
    for (int64_t t = rows.begin; t < rows.end; t++)
      std::memcpy(at(hidden_, t * line_), at(d_.table, b_.token_ids[t] * line_), line_);
  }

  void norm(const void* weight, const Rows& rows) {
    for (int64_t t = rows.begin; t < rows.end; t++)
      a_.norm(at(hidden_, t * line_), weight, d_.hidden, d_.epsilon, at(normed_, t * line_));
  }

  // Panels that follow each other in memory, the same for a thread in every layer: `use(first, last)`.
  template <class Use> void each_panels(Team& team, int thread, int64_t panels, Use use) {
    const int shares = std::min(MOST_SHARES, SHARES * team.threads());
    team.own(shares, thread, [&](int i) { use(panels * i / shares, panels * (i + 1) / shares); });
  }

  // Into the hidden states.
  void product(Team& team, int thread, const void* x, const bg_weight& w) {
    each_panels(team, thread, blocks(w.outputs, PANEL), [&](int64_t first, int64_t last) {
      multiply(a_, x, w, {first, last, 0, tokens_}, hidden_, d_.hidden, a_.add);
    });
  }

  // Queries, keys and values are three weights but one phase.
  void project(Team& team, int thread, const bg_layer& layer) {
    int64_t panels = 0;
    for (const bg_weight& weight : layer.qkv) panels += blocks(weight.outputs, PANEL);
    each_panels(team, thread, panels, [&](int64_t first, int64_t last) {
      void* out = qkv_;
      for (const bg_weight& weight : layer.qkv) {
        const int64_t count = blocks(weight.outputs, PANEL);
        if (first < count && last > 0)
          multiply(a_, normed_, weight, {std::max<int64_t>(0, first), std::min(count, last), 0, tokens_}, out, width_,
                   a_.keep);
        first -= count, last -= count;
        out = at(out, weight.outputs * a_.item);
      }
    });
  }

  // Write to the pages that begin with this batch, so that the system hands out their memory now, to all threads alike:
  // while one thread waits for memory within a layer, the others would wait for it.
  void touch(const bg_cache& cache) {
    const int64_t bytes = shape_.kv_heads * page_bytes(a_, shape_);
    for (int64_t t = 0; t < tokens_; t++) {
      if (b_.positions[t] % PAGE) continue;
      for (void* kept : {cache.keys, cache.values}) {
        auto* page = static_cast<volatile char*>(page_of(a_, b_, shape_, row_[t], t, 0, kept));
        for (int64_t i = 0; i < bytes; i += MEMORY_PAGE) page[i] = 0;
      }
    }
  }

  // Rotate queries and keys in place and put keys and values into their pages.
  void append(const bg_cache& cache, const Rows& rows) {
    const int64_t half = shape_.size / 2, turned = shape_.heads + shape_.kv_heads, head = shape_.size * a_.item;
    for (int64_t t = rows.begin; t < rows.end; t++) {
      void* line = at(qkv_, t * width_ * a_.item);
      for (int64_t h = 0; h < turned; h++)
        a_.rope(at(line, h * head), d_.cosines + b_.positions[t] * half, d_.sines + b_.positions[t] * half, half,
                at(line, h * head));
      append_key(a_, b_, shape_, row_[t], t, at(line, shape_.heads * head), cache.keys);
      append_value(a_, b_, shape_, row_[t], t, at(line, turned * head), cache.values);
    }
  }

  void attend(Team& team, int thread, const bg_cache& cache) {
    team.each(attention_.count(), thread, [&](int64_t i, int who) {
      attention_.run(i, qkv_, width_, cache, mixed_, at(lines_, who * scratch_));
    });
  }

  const Arithmetic& a_;
  const bg_decoder& d_;
  const bg_batch& b_;
  const bg_cache* caches_;
  double* const seconds_;
  const bg_attention_shape& shape_;
  const int64_t tokens_, line_, width_, mixed_width_;
  const std::vector<int64_t> row_;
  const std::vector<Block> queries_;
  const Attention attention_;
  Head head_;
  const int64_t scratch_;
  void *hidden_, *normed_, *qkv_, *mixed_, *inner_, *lines_;
};

}  // namespace

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

void forward(const Arithmetic& a, int threads, const bg_decoder& decoder, const bg_batch& batch,
             const bg_cache* caches, const bg_result& result, double* seconds) {
  if (!batch.tokens) return;
  thread_local Buffers buffers;
  Pass pass(a, decoder, batch, caches, result, seconds, buffers, threads);
  run_team(threads, [&](Team& team, int thread) { pass.run(team, thread); });
}

}  // namespace batchgen
