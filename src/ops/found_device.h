#pragma once

#include <cstdint>
#include <string>

namespace quern::ops {

/// A device as its driver lists it, usable or not; for `doctor`, not for plans.
struct FoundDevice {
  std::string platform, platform_version;  // "Intel(R) OpenCL Graphics", "OpenCL 3.0"
  std::string name, driver_version;
  std::string pci_address;  // "0000:03:00.0"; empty: the driver does not say, or it is on no bus
  bool is_intel_gpu = false;
  uint64_t memory_bytes = 0, largest_allocation_bytes = 0;
  std::string why_not_usable;  // empty: it is
};

}  // namespace quern::ops
