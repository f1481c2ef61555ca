#pragma once

#include <cstdint>

namespace quern::server {

/// This process, as the kernel sees it now. What /proc does not tell stays 0.
struct ProcessStats {
  uint64_t resident_bytes = 0, virtual_bytes = 0;
  double cpu_seconds = 0;         // user and system
  double start_time_seconds = 0;  // since 1970
  uint64_t open_fds = 0, max_fds = 0;
};

ProcessStats process_stats();

}  // namespace quern::server
