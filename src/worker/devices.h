#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "ops/transport.h"

namespace quern::worker {

/// A device that was opened and measured.
struct MeasuredDevice {
  std::string name;         // as for --device: "cuda:0"
  std::string product;      // "NVIDIA H200"
  std::string platform;     // "cuda"
  std::string pci_address;  // "0000:3b:00.0"; empty: the driver does not say, or it is on no bus
  uint64_t memory_bytes = 0;
  double bytes_to_device = 0, bytes_to_host = 0;  // a second, from and to page-locked host memory
  std::string error;                              // why it could not be opened or measured
};

/// Two devices of a platform, by their places in the report.
struct DevicePair {
  size_t a = 0, b = 0;
  std::string refusal;  // why they do not read each other's memory as the drivers say, empty: they claim that they do
  std::string failure;  // what the self-test found wrong, empty: nothing, or not tried
  double seconds = 0;   // of one add_partials of a decode row; 0: not tried
};

/// Devices of one platform, which can be ranks of one model.
struct DeviceGroup {
  std::string platform;
  std::vector<size_t> devices;                   // places in the report
  std::string error;                             // why their messages cannot be tried
  std::vector<DevicePair> pairs;                 // with transport direct
  std::vector<ops::TransportTrial> transports;   // between all of them
  std::string chosen;
};

struct DevicesReport {
  std::vector<MeasuredDevice> devices;
  std::vector<DeviceGroup> groups;  // of two devices and more
};

/// The devices of this machine that a model would run on: all of CUDA, else all of Intel's through OpenCL, else the CPU.
std::vector<std::string> default_devices();

/// Opens and measures devices, and everything that can pass between them, with messages of one, 64, 512 and 4000 rows of 10 KB. A device that does not open is in the report with its reason. Takes a
/// second or two for each pair.
DevicesReport measure_devices(const std::vector<std::string>& names, const std::string& transport);

}  // namespace quern::worker
