#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quern::cpu {

/// Fixed threads that share index ranges with the calling thread. One caller at a time: the worker thread that owns the device.
/// Whoever is free takes the next piece of the range: of what is left a share that all threads could take twice, so that first pieces are long
/// streams and last ones short waits, and a thread whose core is busy elsewhere delays only the piece it holds. Kernels compute each output element whole inside one piece, so who takes which never changes bits.
/// Waiting threads spin for some tens of microseconds, the gap between two kernels, then sleep. A call allocates nothing.
class ThreadPool {
 public:
  /// `num_threads` counts the caller; at least 1. One that is not `started` can only be asked how many it has.
  explicit ThreadPool(int num_threads, bool started = true);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const { return num_threads_; }

  /// body(begin, end, thread) over disjoint pieces that cover [0, n); returns when all are done. `thread` < num_threads() names the
  /// executing thread, for its own scratch memory. `item_cost` is roughly the multiply-adds of one item: what takes no longer than
  /// waking a thread stays with the caller.
  template <class Body>
  void parallel_for(int64_t n, int64_t item_cost, const Body& body) {
    run(
        n, item_cost,
        [](const void* context, int64_t begin, int64_t end, int thread) { (*static_cast<const Body*>(context))(begin, end, thread); },
        &body);
  }

 private:
  using Function = void (*)(const void* context, int64_t begin, int64_t end, int thread);
  void run(int64_t n, int64_t item_cost, Function function, const void* context);
  void work(int thread, uint32_t job);
  void worker_loop(int thread);

  int num_threads_;
  // The job. Written by the caller while nothing is left to take, read by whoever has taken a piece.
  Function function_ = nullptr;
  const void* context_ = nullptr;
  int64_t n_ = 0;
  std::atomic<uint32_t> min_piece_{1};  // items

  // Job number in the upper half, items not yet taken in the lower: taking from a job that is over cannot succeed.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> items_done_{0};
  alignas(64) std::atomic<uint32_t> job_{0};  // what sleeping threads wait on
  std::atomic<bool> stopping_{false};
  std::vector<std::jthread> threads_;
};

}  // namespace quern::cpu
