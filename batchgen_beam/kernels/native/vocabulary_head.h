// The output projection: whole logits, or of each token the greatest and its log-probability.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "products.h"

namespace batchgen {
namespace {

constexpr int64_t HEAD_PANELS = 8;        // of one task

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

}  // namespace
}  // namespace batchgen
