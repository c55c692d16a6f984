// A whole decoder in one call.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "attention_units.h"
#include "products.h"
#include "team.h"
#include "vocabulary_head.h"

namespace batchgen {
namespace {

constexpr int64_t OWN_ROWS = 24;          // from so many rows for each thread on, threads share out rows, not panels
constexpr int SHARES = 2;                 // of one thread where panels are shared out
constexpr int64_t LINES = 8;              // tokens of one task that goes token by token
constexpr int64_t MEMORY_PAGE = 4096;     // bytes, the least that the system hands out

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

// One forward pass as its phases; every thread of the team goes through all of them.
class Pass {
 public:
  Pass(const Arithmetic& a, const bg_decoder& decoder, const bg_batch& batch, const bg_cache* caches,
       const bg_result& result, double* seconds, Buffers<8>& buffers, int threads)
      : a_(a), d_(decoder), b_(batch), caches_(caches), seconds_(seconds), shape_(decoder.attention),
        tokens_(batch.tokens), line_(decoder.hidden * a.item),
        width_((shape_.heads + 2 * shape_.kv_heads) * shape_.size), mixed_width_(shape_.heads * shape_.size),
        row_(rows_of(batch)), queries_(query_blocks(batch, shape_)), attention_(a, batch, shape_, queries_, threads),
        wanted_queries_(wanted_blocks(batch, shape_, row_)),
        wanted_attention_(a, batch, shape_, wanted_queries_, threads), head_(a, decoder.head, batch.wanted, result),
        scratch_(attention_.scratch()) {
    const int64_t most = std::max(tokens_, b_.wanted);
    all_ = {tokens_, buffers.get(0, tokens_ * line_), buffers.get(3, tokens_ * mixed_width_ * a.item)};
    wanted_ = {b_.wanted, buffers.get(6, b_.wanted * line_), buffers.get(7, b_.wanted * mixed_width_ * a.item)};
    normed_ = buffers.get(1, most * line_);
    qkv_ = buffers.get(2, tokens_ * width_ * a.item);
    inner_ = buffers.get(4, most * d_.inner * a.item);
    lines_ = buffers.get(5, threads * scratch_);
  }

  void run(Team& team, int thread) {
    Laps lap(thread ? nullptr : seconds_);
    team.each(d_.layer_count, thread, [&](int64_t layer, int) { touch(caches_[layer]); });
    lap(BG_APPEND);
    if (many(all_, team))
      layers_by_rows(team, thread, lap);
    else
      layers_by_panels(team, thread, lap);
    if (b_.wanted) last_layer(team, thread, lap);
    if (many(wanted_, team)) {
      const int shares = share_count(b_.wanted, team);
      team.own(shares, thread, [&](int i) { head_.run(share(b_.wanted, i, shares), normed_); });
    } else {
      team.each(head_.count(), thread, [&](int64_t i, int) { head_.run(i, normed_); });
    }
    team.each(b_.wanted, thread, [&](int64_t w, int) { head_.settle(w); });
    lap(BG_HEAD);
  }

 private:
  // The states of some tokens of the batch, and what attention made of them.
  struct Lines {
    int64_t count;
    void *hidden, *mixed;
  };

  static bool many(const Lines& lines, const Team& team) { return lines.count >= OWN_ROWS * team.threads(); }

  // Few rows: all threads work on all rows, each on some panels, so that each weight is read once.  Up to the entries
  // of the last layer.
  void layers_by_panels(Team& team, int thread, Laps& lap) {
    each_rows(all_, team, thread, [&](const Rows& rows) { embed(rows); });
    for (int64_t i = 0; i < d_.layer_count; i++) {
      const bg_layer& layer = d_.layers[i];
      each_rows(all_, team, thread, [&](const Rows& rows) { norm(layer.attention_norm, all_, rows); });
      lap(BG_NORM);
      project(team, thread, layer);
      lap(BG_QKV);
      each_rows(all_, team, thread, [&](const Rows& rows) { append(caches_[i], rows); });
      lap(BG_APPEND);
      if (i + 1 == d_.layer_count) break;
      attend(attention_, team, thread, caches_[i]);
      lap(BG_ATTENTION);
      after_attention_by_panels(layer, all_, team, thread, lap);
    }
  }

  void after_attention_by_panels(const bg_layer& layer, const Lines& lines, Team& team, int thread, Laps& lap) {
    product(lines, team, thread, lines.mixed, layer.out);
    lap(BG_OUT);
    each_rows(lines, team, thread, [&](const Rows& rows) { norm(layer.feed_forward_norm, lines, rows); });
    lap(BG_NORM);
    each_panels(team, thread, blocks(d_.inner, PANEL), [&](int64_t first, int64_t last) {
      multiply_gated(a_, normed_, layer.gate, layer.up, {first, last, 0, lines.count}, inner_, a_.gate);
    });
    lap(BG_GATE_UP);
    product(lines, team, thread, inner_, layer.down);
    lap(BG_DOWN);
  }

  // Many rows: each thread works on its own rows and finds them in its caches; only attention, whose cost differs from
  // row to row and which reads what others appended, is shared out anew.  Up to the entries of the last layer.
  void layers_by_rows(Team& team, int thread, Laps& lap) {
    const int shares = share_count(tokens_, team);
    team.own(shares, thread, [&](int i) {
      embed(share(tokens_, i, shares));
      before_attention(0, share(tokens_, i, shares), lap);
    });
    lap(BG_WAIT);
    for (int64_t layer = 0; layer + 1 < d_.layer_count; layer++) {
      attend(attention_, team, thread, caches_[layer]);
      lap(BG_ATTENTION);
      team.own(shares, thread, [&](int i) {
        after_attention(d_.layers[layer], all_, share(tokens_, i, shares), lap);
        before_attention(layer + 1, share(tokens_, i, shares), lap);
      });
      lap(BG_WAIT);
    }
  }

  // What follows the entries of the last layer, for the wanted tokens alone: nobody reads the others' states.
  void last_layer(Team& team, int thread, Laps& lap) {
    const int64_t last = d_.layer_count - 1, mixed = mixed_width_ * a_.item;
    attend(wanted_attention_, team, thread, caches_[last]);
    lap(BG_ATTENTION);
    each_rows(wanted_, team, thread, [&](const Rows& rows) {
      for (int64_t w = rows.begin; w < rows.end; w++) {
        std::memcpy(at(wanted_.hidden, w * line_), at(all_.hidden, b_.wanted_at[w] * line_), line_);
        std::memcpy(at(wanted_.mixed, w * mixed), at(all_.mixed, b_.wanted_at[w] * mixed), mixed);
      }
    });
    if (many(wanted_, team)) {
      const int shares = share_count(wanted_.count, team);
      team.own(shares, thread, [&](int i) {
        after_attention(d_.layers[last], wanted_, share(wanted_.count, i, shares), lap);
      });
      lap(BG_WAIT);
    } else {
      after_attention_by_panels(d_.layers[last], wanted_, team, thread, lap);
    }
    each_rows(wanted_, team, thread, [&](const Rows& rows) { norm(d_.norm, wanted_, rows); });
    lap(BG_NORM);
  }

  void before_attention(int64_t index, const Rows& rows, Laps& lap) {
    const bg_layer& layer = d_.layers[index];
    norm(layer.attention_norm, all_, rows);
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

  void after_attention(const bg_layer& layer, const Lines& lines, const Rows& rows, Laps& lap) {
    multiply(a_, lines.mixed, layer.out, all_panels(layer.out, rows), lines.hidden, d_.hidden, a_.add);
    lap(BG_OUT);
    norm(layer.feed_forward_norm, lines, rows);
    lap(BG_NORM);
    multiply_gated(a_, normed_, layer.gate, layer.up, all_panels(layer.gate, rows), inner_, a_.gate);
    lap(BG_GATE_UP);
    multiply(a_, inner_, layer.down, all_panels(layer.down, rows), lines.hidden, d_.hidden, a_.add);
    lap(BG_DOWN);
  }

  template <class Use> void each_rows(const Lines& lines, Team& team, int thread, Use use) {
    team.each(blocks(lines.count, LINES), thread,
              [&](int64_t i, int) { use(Rows{i * LINES, std::min(lines.count, (i + 1) * LINES)}); });
  }

  void embed(const Rows& rows) {
    for (int64_t t = rows.begin; t < rows.end; t++)
      std::memcpy(at(all_.hidden, t * line_), at(d_.table, b_.token_ids[t] * line_), line_);
  }

  void norm(const void* weight, const Lines& lines, const Rows& rows) {
    for (int64_t t = rows.begin; t < rows.end; t++)
      a_.norm(at(lines.hidden, t * line_), weight, d_.hidden, d_.epsilon, at(normed_, t * line_));
  }

  // Panels that follow each other in memory, the same for a thread in every layer: `use(first, last)`.
  template <class Use> void each_panels(Team& team, int thread, int64_t panels, Use use) {
    const int shares = std::min(MOST_SHARES, SHARES * team.threads());
    team.own(shares, thread, [&](int i) { use(panels * i / shares, panels * (i + 1) / shares); });
  }

  // Into the hidden states.
  void product(const Lines& lines, Team& team, int thread, const void* x, const bg_weight& w) {
    each_panels(team, thread, blocks(w.outputs, PANEL), [&](int64_t first, int64_t last) {
      multiply(a_, x, w, {first, last, 0, lines.count}, lines.hidden, d_.hidden, a_.add);
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

  void attend(const Attention& attention, Team& team, int thread, const bg_cache& cache) {
    team.each(attention.count(), thread, [&](int64_t i, int who) {
      attention.run(i, qkv_, width_, cache, all_.mixed, at(lines_, who * scratch_));
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
  const std::vector<Block> wanted_queries_;
  const Attention wanted_attention_;
  Head head_;
  const int64_t scratch_;
  Lines all_, wanted_;
  void *normed_, *qkv_, *inner_, *lines_;
};

}  // namespace

void forward(const Arithmetic& a, int threads, const bg_decoder& decoder, const bg_batch& batch,
             const bg_cache* caches, const bg_result& result, double* seconds) {
  if (!batch.tokens) return;
  thread_local Buffers<8> buffers;
  Pass pass(a, decoder, batch, caches, result, seconds, buffers, threads);
  run_team(threads, [&](Team& team, int thread) { pass.run(team, thread); });
}

}  // namespace batchgen
