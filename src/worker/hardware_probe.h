#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "worker/selftest.h"

// What a device is able to, measured in a minute through Device, Stream and the kernels that would serve on it: for reports from machines that we do not have.

namespace quern::worker {

struct Measurement {
  std::string name;      // "decode_read_bandwidth"
  double value = 0;
  std::string unit;      // "bytes/s", "s", ...
  std::string remark;    // what was done, or why there is no value
  bool measured = true;
};

struct HardwareProbe {
  std::string device, name;  // "opencl:0", "Intel(R) Arc(TM) Pro B60 Graphics"
  std::vector<Measurement> measurements;
  int32_t num_op_tests = 0;  // candidates compared with plain
  std::vector<SelfTestReport::Fault> op_faults;
  double op_test_seconds = 0;
};

struct ProbeOptions {
  int num_threads = 0;  // CPU: 0 = one per core
  bool quick = false;   // small weights and buffers: for tests, and to see whether it works at all
};

/// Opens the device by name and measures. Error: it cannot be opened, or plain kernels do not work on it.
Result<HardwareProbe> probe_hardware(const std::string& device, const ProbeOptions& options);

}  // namespace quern::worker
