#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quern::app {

/// What /proc and /sys say about this machine; empty or 0 where they are silent.
struct Machine {
  std::string system, cpu;
  int num_cores = 0;                      // that this process may use
  std::vector<std::string> cpu_features;  // those that kernels of any platform ask for
  uint64_t memory_bytes = 0, available_bytes = 0;
  uint64_t memory_limit_bytes = 0;  // of the control group; 0: none
};
Machine inspect_machine();

/// Shared libraries mapped into this process, by path, without duplicates.
std::vector<std::string> opened_libraries();

}  // namespace quern::app
