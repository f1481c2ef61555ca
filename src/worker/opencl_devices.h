#pragma once

#include <vector>

#include "base/result.h"
#include "ops/found_device.h"

namespace quern::worker {

using OpenClDevice = ops::FoundDevice;

/// What the OpenCL loader lists, in the order of opencl:0, opencl:1, ... Error: there is no loader, or it lists nothing.
Result<std::vector<OpenClDevice>> opencl_devices();

}  // namespace quern::worker
