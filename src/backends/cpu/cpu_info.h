#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/device.h"

namespace quern::cpu {

/// Cores this process may use: its affinity mask, and the CPU quota of its control group where there is one.
int usable_cores();

/// This machine's processor: name, memory (the control group's limit where it is lower), cores, instruction sets that processor and
/// operating system both offer. `read_bandwidth` is 0: see measure_read_bandwidth.
ops::DeviceTraits host_traits();

/// Numbers of a list as the kernel writes it, "0-2,5"; empty where the text is none.
std::vector<int> parse_number_list(std::string_view text);
/// Nodes of this machine that have memory (NUMA); node 0 alone where the kernel knows of none.
std::vector<int> memory_nodes();

/// Bytes per second that `num_threads` threads read from memory together. Takes a fraction of a second and 256 MiB.
double measure_read_bandwidth(int num_threads);

}  // namespace quern::cpu
