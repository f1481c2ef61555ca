#include "backends/cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "base/check.h"

namespace quern::cpu {

namespace {

constexpr int64_t kMinPieceCost = 16384;  // some microseconds
constexpr std::chrono::microseconds kSpinTime{40};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Waits until `value` differs from `old`: spins a while, then sleeps.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, bool started) : num_threads_(num_threads) {
  CHECK(num_threads >= 1);
  if (!started) return;
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { worker_loop(thread); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_release);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
}

void ThreadPool::worker_loop(int thread) {
  const std::string name = "quern-cpu-" + std::to_string(thread);
  pthread_setname_np(pthread_self(), name.c_str());
  for (uint32_t seen = 0;;) {
    wait_for_change(job_, seen);
    if (stopping_.load(std::memory_order_acquire)) return;
    seen = job_.load(std::memory_order_acquire);
    work(thread, seen);
  }
}

void ThreadPool::work(int thread, uint32_t job) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const auto left = static_cast<uint32_t>(ticket);
    if (static_cast<uint32_t>(ticket >> 32) != job || left == 0) return;
    // Of a job that is over these may be the next one's: taking from it fails.
    const uint32_t min_piece = min_piece_.load(std::memory_order_relaxed);
    const uint32_t piece = std::min(left, std::max(min_piece, left / (2 * static_cast<uint32_t>(num_threads()))));
    if (!ticket_.compare_exchange_weak(ticket, ticket - piece, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    // The piece is ours, and the job cannot end before it is done: its fields stand still.
    const int64_t begin = n_ - left;
    function_(context_, begin, begin + piece, thread);
    if (items_done_.fetch_add(piece, std::memory_order_acq_rel) + piece == n_) items_done_.notify_all();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::run(int64_t n, int64_t item_cost, Function function, const void* context) {
  if (n <= 0) return;
  item_cost = std::max<int64_t>(item_cost, 1);
  if (threads_.empty() || n == 1 || n * item_cost < 2 * kMinPieceCost) {
    function(context, 0, n, 0);
    return;
  }
  CHECK(n < int64_t{1} << 31);
  function_ = function;
  context_ = context;
  n_ = n;
  min_piece_.store(static_cast<uint32_t>(std::clamp<int64_t>(kMinPieceCost / item_cost, 1, n)), std::memory_order_relaxed);
  items_done_.store(0, std::memory_order_relaxed);
  const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  ticket_.store(uint64_t{job} << 32 | static_cast<uint32_t>(n), std::memory_order_release);
  job_.store(job, std::memory_order_release);
  job_.notify_all();
  work(0, job);
  for (uint32_t done = items_done_.load(std::memory_order_acquire); done != n; done = items_done_.load(std::memory_order_acquire))
    wait_for_change(items_done_, done);
}

}  // namespace quern::cpu
