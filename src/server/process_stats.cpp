#include "server/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace quern::server {
namespace {

std::string text_of(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Seconds since 1970 at which this machine started.
double boot_time() {
  std::istringstream lines(text_of("/proc/stat"));
  for (std::string line; std::getline(lines, line);) {
    double seconds = 0;
    if (std::sscanf(line.c_str(), "btime %lf", &seconds) == 1) return seconds;
  }
  return 0;
}

}  // namespace

ProcessStats process_stats() {
  ProcessStats result;
  const std::string stat = text_of("/proc/self/stat");
  // "pid (name) state ppid ...": the name may hold anything, so counting begins behind its last bracket, with field 3 (proc(5)).
  if (const size_t name_end = stat.rfind(')'); name_end != std::string::npos) {
    std::istringstream fields(stat.substr(name_end + 1));
    const double ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
    std::string field;
    for (int number = 3; number <= 24 && fields >> field; ++number) {
      const double value = number == 3 ? 0 : std::strtod(field.c_str(), nullptr);
      if (number == 14 || number == 15) result.cpu_seconds += value / ticks;
      if (number == 22) result.start_time_seconds = boot_time() + value / ticks;
      if (number == 23) result.virtual_bytes = static_cast<uint64_t>(value);
      if (number == 24) result.resident_bytes = static_cast<uint64_t>(value) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    }
  }
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator("/proc/self/fd", error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    ++result.open_fds;
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) result.max_fds = limit.rlim_cur;
  return result;
}

}  // namespace quern::server
