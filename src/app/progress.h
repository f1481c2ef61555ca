#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace quern::app {

/// "loading weights  [######------]  42 %  11.3 of 26.9 GiB  2.10 GiB/s  8 s left", in at most `width` columns: what does not fit is left
/// out, the bar first. Without a size of the whole only bar and percentage.
std::string progress_line(std::string_view what, double share, uint64_t total_bytes, double seconds, int width);

/// Progress of one long task on stderr: a bar that renews itself on a terminal, a log line every ten seconds elsewhere. Used by one thread
/// at a time.
class Progress {
 public:
  /// `total_bytes` 0: not known.
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
