#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace quern::app {

/// Progress of one long task on stderr: a line that renews itself on a terminal, a log line every ten seconds elsewhere. Used by one thread
/// at a time.
class Progress {
 public:
  Progress(std::string what, uint64_t total_bytes);
  /// `share` of the task is done, 0 to 1.
  void update(double share);
  /// Clears the line; a success is logged with its duration.
  void finish(bool succeeded);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  uint64_t total_bytes_;
  bool terminal_;
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
};

}  // namespace quern::app
