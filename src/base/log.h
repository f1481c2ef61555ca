#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace quern {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// Lines below `level` are dropped. Default: kInfo.
void set_log_level(LogLevel level);
LogLevel log_level();
/// Now, in UTC: "2026-11-30T12:00:00.123Z".
std::string timestamp_now();
/// Writes one whole line to stderr: "2026-11-30T12:00:00.123Z INFO  message". Thread-safe.
void log_line(LogLevel level, std::string_view message);

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (level >= log_level()) log_line(level, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) { log(LogLevel::kDebug, format, std::forward<Args>(args)...); }
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) { log(LogLevel::kInfo, format, std::forward<Args>(args)...); }
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) { log(LogLevel::kWarning, format, std::forward<Args>(args)...); }
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) { log(LogLevel::kError, format, std::forward<Args>(args)...); }

}  // namespace quern
