#pragma once

#include <string>

#include "ops/device.h"

namespace quern::cpu {

/// Cores this process may use: its affinity mask, and the CPU quota of its control group where there is one.
int usable_cores();

/// This machine's processor: name, memory (the control group's limit where it is lower), cores, instruction sets that processor and
/// operating system both offer. `read_bandwidth` is 0: see measure_read_bandwidth.
ops::DeviceTraits host_traits();

/// Bytes per second that `num_threads` threads read from memory together. Takes a fraction of a second and 256 MiB.
double measure_read_bandwidth(int num_threads);

}  // namespace quern::cpu
