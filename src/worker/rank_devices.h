#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ops/device.h"

namespace quern::worker {

/// The device of every rank, from --device: a list of so many names, or one name that the others follow: cuda and cuda:0 as cuda:0, cuda:1, ..., opencl as the Intel GPUs like the first, a card's name for
/// as many of that card.
Result<std::vector<std::string>> rank_devices(std::string_view device, int32_t tp_size, int32_t pp_size);

/// Their traits. Devices on the CPU are thread groups of one machine, and an OpenCL device may be named more than once: each rank has its part of memory, bandwidth and cores. Of `num_processes`
/// on this machine each has as many thread groups of the CPU. Errors: unknown names, ranks of different kinds where they cannot work together.
Result<std::vector<ops::DeviceTraits>> traits_of_ranks(const std::vector<std::string>& devices, int32_t tp_size, int32_t num_processes = 1);

/// How many of the devices are thread groups of the CPU, at least 1.
int num_sharing_cpu(const std::vector<std::string>& devices);

}  // namespace quern::worker
