#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "float_state.h"

namespace batchgen {
namespace {

constexpr int SPINS = 4000;  // as long as `team.h` says: a pause differs between processors

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  static_assert(sizeof(word) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void await_change(std::atomic<uint32_t>& word, uint32_t from, int spins = SPINS) {
  for (int spin = 0; spin < spins; spin++) {
    if (word.load(std::memory_order_acquire) != from) return;
    __builtin_ia32_pause();
  }
  while (word.load(std::memory_order_acquire) == from) sleep_while(word, from);
}

// The helpers of this process.  Never destroyed: threads may sleep in it when the process ends.
class Helpers {
 public:
  void run(int threads, const std::function<void(Team&, int)>& work) {
    Team team(threads);
    while (static_cast<int>(count_) < threads - 1) add();
    team_ = &team;
    work_ = &work;
    left_.store(static_cast<int>(count_), std::memory_order_relaxed);
    call_.fetch_add(1, std::memory_order_release);
    wake_all(call_);
    work(team, 0);
    for (uint32_t seen; (seen = ended_.load(std::memory_order_acquire)) != call_.load(std::memory_order_relaxed);)
      await_change(ended_, seen);
  }

 private:
  void add() {
    const int thread = static_cast<int>(count_) + 1;
    const uint32_t from = call_.load();
    std::thread([this, thread, from] { live(thread, from); }).detach();  // throws where there can't be another
    count_++;
  }

  void live(int thread, uint32_t seen) {
    const FloatState floats;
    for (;; seen++) {
      await_change(call_, seen);
      if (thread < team_->threads()) (*work_)(*team_, thread);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ended_.store(seen + 1, std::memory_order_release);
        wake_all(ended_);
      }
    }
  }

  uint32_t count_ = 0;
  Team* team_ = nullptr;
  const std::function<void(Team&, int)>* work_ = nullptr;
  std::atomic<int> left_{0};
  std::atomic<uint32_t> call_{0}, ended_{0};
};

// The helpers of one process.  A fork leaves threads behind, and whatever lock they held.
struct Owner {
  explicit Owner(pid_t id) : process(id) {}
  const pid_t process;
  std::mutex busy;
  Helpers helpers;
};

Owner& owner() {
  static std::atomic<Owner*> current{nullptr};
  Owner* found = current.load();
  if (found && found->process == getpid()) return *found;
  auto made = std::make_unique<Owner>(getpid());
  return current.compare_exchange_strong(found, made.get()) ? *made.release() : *found;
}

}  // namespace

// Whether another thread was last seen on this thread's core.
bool Team::crowded(int thread) const {
  const int core = cores_[thread].load(std::memory_order_relaxed);
  for (int other = 0; other < std::min(threads_, MOST_PLACED); other++)
    if (other != thread && cores_[other].load(std::memory_order_relaxed) == core) return true;
  return false;
}

void Team::wait(int thread) {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  const bool placed = threads_ > 1 && thread < MOST_PLACED;
  if (placed) cores_[thread].store(sched_getcpu(), std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) {
    await_change(phase_, phase, placed && crowded(thread) ? 0 : SPINS);
    if (placed) cores_[thread].store(sched_getcpu(), std::memory_order_relaxed);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  taken_.store(0, std::memory_order_relaxed);
  phase_.store(phase + 1, std::memory_order_release);
  if (threads_ > 1) wake_all(phase_);
}

void run_team(int threads, const std::function<void(Team&, int)>& work) {
  if (threads <= 1) {
    Team alone(1);
    return work(alone, 0);
  }
  Owner& here = owner();
  const std::lock_guard<std::mutex> lock(here.busy);
  here.helpers.run(threads, work);
}

}  // namespace batchgen
