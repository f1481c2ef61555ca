#include "worker/opencl_devices.h"

#include "backends/platforms.h"

namespace quern::worker {

Result<std::vector<OpenClDevice>> opencl_devices() { return backends::opencl_devices(); }

}  // namespace quern::worker
