// Experts on batches of tokens: each one's weights are read once, for all the tokens that go to it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "products.h"
#include "team.h"

namespace batchgen {
namespace {

constexpr int64_t LINES = 8;              // assignments that are gathered together
constexpr int64_t MOST_ASSIGNED = 8192;   // of the experts that are computed together, where they are several

// The tasks of all experts' first products, one expert after the other.
class Tasks {
 public:
  Tasks(const bg_experts& some, int64_t first, int64_t last) : first_(first) {
    for (int64_t e = first, begin = first ? some.ends[first - 1] : 0; e < last; begin = some.ends[e++]) {
      spans_.emplace_back(some.experts[e].gate.outputs, some.ends[e] - begin, PANELS);
      ends_.push_back(count() + spans_.back().count());
    }
  }
  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // `use(expert, span)`, whose rows count from the expert's first assignment.
  template <class Use> void run(int64_t task, Use use) const {
    const int64_t i = std::upper_bound(ends_.begin(), ends_.end(), task) - ends_.begin();
    use(first_ + i, spans_[i][i ? task - ends_[i - 1] : task]);
  }

 private:
  int64_t first_;
  std::vector<Spans> spans_;
  std::vector<int64_t> ends_;
};

// The experts [first, last) as phases of a team.
class Group {
 public:
  Group(const Arithmetic& a, const bg_experts& some, int64_t first, int64_t last, const void* x, float* totals,
        Buffers<2>& buffers)
      : a_(a), some_(some), first_(first), last_(last), x_(x), totals_(totals),
        by_{some.alpha, some.limit, some.shift}, width_(some.experts[first].gate.inputs),
        inner_width_(some.experts[first].gate.outputs), begin_(begin(first)), assigned_(some.ends[last - 1] - begin_),
        tasks_(some, first, last), gathered_(buffers.get(0, assigned_ * width_ * a.item)),
        inner_(buffers.get(1, assigned_ * inner_width_ * a.item)) {}

  void run(Team& team, int thread) const {
    team.each(blocks(assigned_, LINES), thread,
              [&](int64_t i, int) { gather({i * LINES, std::min(assigned_, (i + 1) * LINES)}); });
    team.each(tasks_.count(), thread, [&](int64_t i, int) {
      tasks_.run(i, [&](int64_t e, const Span& span) { widen(e, span); });
    });
    // A column's sums go through the experts in ascending order, whoever computes it.
    const int64_t panels = blocks(width_, PANEL);
    team.each(blocks(panels, PANELS), thread, [&](int64_t i, int) {
      for (int64_t e = first_; e < last_; e++) narrow(e, i * PANELS, std::min(panels, (i + 1) * PANELS));
    });
  }

 private:
  int64_t begin(int64_t e) const { return e ? some_.ends[e - 1] : 0; }

  void gather(const Rows& rows) const {
    const int64_t line = width_ * a_.item;
    for (int64_t i = rows.begin; i < rows.end; i++)
      std::memcpy(at(gathered_, i * line), at(x_, some_.tokens_at[begin_ + i] * line), line);
  }

  void widen(int64_t e, const Span& span) const {
    const bg_expert& w = some_.experts[e];
    const int64_t row = begin(e) - begin_;
    multiply_gated(a_, at(gathered_, row * width_ * a_.item), w.gate, w.up, span,
                   at(inner_, row * inner_width_ * a_.item),
                   [&](float* gates, const float* ups, int rows, const Finish& gate, const Finish& up) {
                     a_.activate(gates, ups, rows, gate, up, by_);
                   });
  }

  void narrow(int64_t e, int64_t first_panel, int64_t last_panel) const {
    const bg_weight& w = some_.experts[e].down;
    const int64_t last = some_.ends[e];
    Tile tile;
    for (int64_t chunk = begin(e); chunk < last; chunk += CHUNK)
      for (int64_t panel = first_panel; panel < last_panel; panel++)
        row_blocks(a_, chunk, std::min(last, chunk + CHUNK), [&](int64_t row, int rows) {
          a_.product(at(inner_, (row - begin_) * inner_width_ * a_.item), inner_width_, rows,
                     at(w.panels, panel * panel_bytes(a_, inner_width_)), inner_width_, tile.value);
          const int64_t column = panel * PANEL;
          const int columns = static_cast<int>(std::min<int64_t>(PANEL, width_ - column));
          a_.weigh(tile.value, rows, {w.bias ? w.bias + column : nullptr, totals_ + column, width_, columns},
                   some_.tokens_at + row, some_.weights + row);
        });
  }

  const Arithmetic& a_;
  const bg_experts& some_;
  const int64_t first_, last_;
  const void* const x_;
  float* const totals_;
  const Activation by_;
  const int64_t width_, inner_width_, begin_, assigned_;
  const Tasks tasks_;
  void *const gathered_, *const inner_;
};

}  // namespace

void experts(const Arithmetic& a, int threads, const void* x, const bg_experts& some, float* totals) {
  thread_local Buffers<2> buffers;
  int64_t begin = 0;
  for (int64_t first = 0, last = 0; first < some.count; first = last) {
    do last++;
    while (last < some.count && some.ends[last] - begin <= MOST_ASSIGNED);
    const Group group(a, some, first, last, x, totals, buffers);
    run_team(threads, [&](Team& team, int thread) { group.run(team, thread); });
    begin = some.ends[last - 1];
  }
}

}  // namespace batchgen
