#include "app/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "app/format.h"
#include "app/terminal.h"
#include "base/log.h"

namespace quern::app {

std::string progress_line(std::string_view what, double share, uint64_t total_bytes, double seconds, int width) {
  share = std::clamp(share, 0.0, 1.0);
  const std::string percent = fmt::format("{:3.0f} %", std::floor(share * 100));
  std::string sizes, rest;
  if (total_bytes > 0) {
    const double done = share * static_cast<double>(total_bytes);
    sizes = fmt::format("  {} of {}", format_bytes(static_cast<uint64_t>(done)), format_bytes(total_bytes));
    if (seconds > 0.5 && share > 0) {
      rest = fmt::format("  {}/s", format_bytes(static_cast<uint64_t>(done / seconds)));
      if (share < 1) rest += fmt::format("  {:.0f} s left", std::ceil(seconds / share * (1 - share)));
    }
  }
  const auto columns = [](const auto&... parts) { return (static_cast<int>(parts.size()) + ...); };
  std::string line = fmt::format("{}  ", what);
  constexpr int kShortestBar = 10, kLongestBar = 40, kFrame = 4;  // [, ] and two blanks
  if (const int room = width - columns(line, percent, sizes, rest) - kFrame; room >= kShortestBar) {
    const int length = std::min(room, kLongestBar), full = static_cast<int>(share * length);
    line += "[" + std::string(static_cast<size_t>(full), '#') + std::string(static_cast<size_t>(length - full), '-') + "]  ";
  }
  line += percent;
  if (columns(line, sizes) <= width) line += sizes;
  if (columns(line, rest) <= width) line += rest;
  return line.substr(0, static_cast<size_t>(std::max(width, 0)));
}

Progress::Progress(std::string what, uint64_t total_bytes)
    : what_(std::move(what)), total_bytes_(total_bytes), terminal_(isatty(STDERR_FILENO) != 0 && log_level() <= LogLevel::kWarning) {}

void Progress::update(double share) {
  using namespace std::chrono_literals;
  const Clock::time_point now = Clock::now();
  if (now - last_shown_ < (terminal_ ? Clock::duration(100ms) : Clock::duration(10s))) return;
  last_shown_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  if (terminal_) {
    fmt::print(stderr, "\r{}\033[K", progress_line(what_, share, total_bytes_, seconds, terminal_width() - 1));
    std::fflush(stderr);
  } else {
    log_info("{}", progress_line(what_, share, total_bytes_, seconds, 200));
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
