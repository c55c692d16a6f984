// Threads that work through phases together.
//
// Owns the threads of the process: made when first needed, made again after a fork, kept for the next call.  Tasks of a
// phase go to whoever is free, some first to whom they belong, so results must not depend on who computes what.
// Waiting, for the next call as for the end of a phase, spins for tens to hundreds of microseconds and then sleeps: the
// others of a thread whose core is taken away, and all of them between calls that are further apart, burn little time.
// At the end of a phase a thread that shares its core with another one of the team sleeps at once: the other can't go
// on before.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace batchgen {

constexpr int MOST_PLACED = 64;

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int i = 0; i < MOST_PLACED; i++) cores_[i].store(-1 - i, std::memory_order_relaxed);
  }
  int threads() const { return threads_; }

  // Every thread of the team calls `each` with the same arguments; `task(i, thread)` runs once for each i < count.  All
  // are done when it returns.
  template <class Task> void each(int64_t count, int thread, Task task) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, thread);
    wait(thread);
  }

  // The same for at most 64 tasks of which each thread takes its own share first, the same share in every phase: what
  // it left in its caches is there.  Then it takes what others have not begun.
  template <class Task> void own(int count, int thread, Task task) {
    for (int k = 0; k < count; k++) {
      const int i = (thread * count / threads_ + k) % count;
      const uint64_t bit = uint64_t{1} << i;
      if (!(taken_.fetch_or(bit, std::memory_order_relaxed) & bit)) task(i);
    }
    wait(thread);
  }

 private:
  void wait(int thread);
  bool crowded(int thread) const;

  const int threads_;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> taken_{0};
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> cores_[MOST_PLACED] = {};  // where each of the first threads was when it last came or went
};

// Run `work(team, thread)` on so many threads, the caller among them.  Calls for several threads run one after the
// other in a process; one for a single thread runs on the caller at once.  Throws before any work begins where memory
// or a thread can't be had; `work` itself must not throw, for the others would wait.
void run_team(int threads, const std::function<void(Team&, int)>& work);

}  // namespace batchgen
