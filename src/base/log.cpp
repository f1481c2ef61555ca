#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <string>

#include "base/check.h"
#include "base/log_mark.h"

namespace quern {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::string g_mark;

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "DEBUG";
    case LogLevel::kInfo: return "INFO ";
    case LogLevel::kWarning: return "WARN ";
    case LogLevel::kError: return "ERROR";
  }
  CHECK_UNREACHABLE();
}

}  // namespace

void set_log_level(LogLevel level) { g_level.store(level, std::memory_order_relaxed); }
LogLevel log_level() { return g_level.load(std::memory_order_relaxed); }

std::string timestamp_now() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &parts);
  return fmt::format("{}.{:03}Z", stamp, milliseconds);
}

void set_log_mark(std::string_view mark) { g_mark = fmt::format("[{}] ", mark); }
const std::string& log_mark() { return g_mark; }

void log_line(LogLevel level, std::string_view message) {
  const std::string line = fmt::format("{} {} {}{}\n", timestamp_now(), level_name(level), g_mark, message);
  // One write call a line: lines of several threads do not mix.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace quern
