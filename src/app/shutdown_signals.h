#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace quern::app {

/// SIGTERM and SIGINT as events. Make it before any other thread starts, since it blocks both signals for the threads that come after.
/// Until listen() a signal ends the process at once; afterwards the first one is reported by wait_for(), and the second ends the process at
/// once.
class ShutdownSignals {
 public:
  ShutdownSignals();
  ~ShutdownSignals();
  ShutdownSignals(const ShutdownSignals&) = delete;
  ShutdownSignals& operator=(const ShutdownSignals&) = delete;

  void listen() { listening_ = true; }
  /// True when a signal has come; waits for one at most this long.
  bool wait_for(std::chrono::milliseconds timeout);

 private:
  void run(const std::stop_token& stop);
  std::atomic<bool> listening_{false};
  std::mutex mutex_;
  std::condition_variable arrived_;
  bool asked_ = false;  // under mutex_
  std::jthread thread_;
};

}  // namespace quern::app
