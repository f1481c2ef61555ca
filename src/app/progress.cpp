#include "app/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "app/format.h"
#include "base/log.h"

namespace quern::app {

Progress::Progress(std::string what, uint64_t total_bytes)
    : what_(std::move(what)), total_bytes_(total_bytes), terminal_(isatty(STDERR_FILENO) != 0 && log_level() <= LogLevel::kInfo) {}

void Progress::update(double share) {
  using namespace std::chrono_literals;
  const Clock::time_point now = Clock::now();
  if (now - last_shown_ < (terminal_ ? Clock::duration(100ms) : Clock::duration(10s))) return;
  last_shown_ = now;
  share = std::clamp(share, 0.0, 1.0);
  const std::string text = fmt::format("{}: {:3.0f} % of {}", what_, share * 100, format_bytes(total_bytes_));
  if (terminal_) {
    fmt::print(stderr, "\r{}\033[K", text);
    std::fflush(stderr);
  } else {
    log_info("{}", text);
  }
}

void Progress::finish(bool succeeded) {
  if (terminal_) {
    fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (succeeded) log_info("{}: {} in {:.1f} s", what_, format_bytes(total_bytes_), seconds);
}

}  // namespace quern::app
