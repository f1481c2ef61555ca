#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace quern::app {

/// SIGTERM, SIGINT and SIGUSR1 as events. Make it before any other thread starts, since it blocks them for the threads that come after.
/// Until listen() a signal ends the process at once; afterwards the first one is reported by wait_for(), and the second ends the process at
/// once.
class ShutdownSignals {
 public:
  ShutdownSignals();
  ~ShutdownSignals();
  ShutdownSignals(const ShutdownSignals&) = delete;
  ShutdownSignals& operator=(const ShutdownSignals&) = delete;

  void listen() { listening_ = true; }
  /// `act` is called on SIGUSR1 until the handle is gone; otherwise that signal does nothing. Quick; on a thread of its own.
  [[nodiscard]] std::shared_ptr<const void> on_user_signal(std::function<void()> act);
  /// True when a signal to stop has come; waits for one at most this long.
  bool wait_for(std::chrono::milliseconds timeout);

 private:
  void run(const std::stop_token& stop);
  std::atomic<bool> listening_{false};
  std::mutex mutex_;
  std::condition_variable arrived_;
  bool asked_ = false;                    // under mutex_
  std::function<void()> on_user_signal_;  // under mutex_
  std::jthread thread_;
};

}  // namespace quern::app
