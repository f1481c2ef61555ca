#include "ops/device.h"

namespace quern::ops {

std::string_view platform_name(Platform platform) {
  switch (platform) {
    case Platform::kCpu: return "cpu";
    case Platform::kOpenCl: return "opencl";
    case Platform::kCuda: return "cuda";
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::ops
