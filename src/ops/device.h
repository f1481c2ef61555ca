#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "ops/tensor.h"

namespace quern::ops {

enum class Platform : uint8_t { kCpu, kOpenCl, kCuda };

std::string_view platform_name(Platform platform);  // "cpu", "opencl", "cuda"

/// What a candidate may ask about a device; plain numbers, so that plans can be made for cards that the machine lacks.
struct DeviceTraits {
  Platform platform = Platform::kCpu;
  std::string name;                 // "NVIDIA H200", "Arc Pro B60", "Intel Xeon ..."
  uint64_t memory_bytes = 0;        // what the device has in all
  double read_bandwidth = 0;        // bytes per second: the datasheet's, or measured on the machine
  int num_cores = 0;                // threads (CPU), SMs, XVE groups
  int architecture = 0;             // CUDA: 90 for sm_90; OpenCL: 2021 for bmg-g21, 2031 for bmg-g31, 0 for others
  bool fp8_matrix = false;          // has FP8 matrix units: W8A8 is used
  bool avx2 = false, avx512 = false, avx512_vbmi = false, avx512_bf16 = false, amx_bf16 = false;  // CPU, from CPUID
  bool device_code = true;          // this build holds device code for the platform; otherwise its candidates refuse with `why_no_device_code`
  std::string why_no_device_code;
};

/// An in-order queue of work on one device. Enqueuing returns before the device has finished.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_to_device(const void* source, const TensorView& destination) = 0;   // source is free for reuse after finish()
  virtual void copy_to_host(const TensorView& source, void* destination) = 0;           // valid after finish()
  virtual void copy(const TensorView& source, const TensorView& destination) = 0;
  virtual void fill_zero(const TensorView& destination) = 0;
  /// Waits for everything enqueued so far; reports what went wrong on the device.
  virtual Result<void> finish() = 0;
};

/// One device, used by one worker thread.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual const DeviceTraits& traits() const = 0;
  /// Zero-filled memory. kResourceExhausted with sizes when the device has none left; `purpose` goes into the message.
  virtual Result<std::unique_ptr<Buffer>> allocate(size_t size_bytes, std::string_view purpose) = 0;
  virtual Result<std::unique_ptr<Stream>> make_stream() = 0;
  /// True where kernels read host memory in place, so that loading needs no staging copy.
  [[nodiscard]] virtual bool reads_host_memory() const { return false; }
  /// A read-only Buffer over host memory that outlives it; null where reads_host_memory() is false. Not counted as allocated.
  [[nodiscard]] virtual std::unique_ptr<Buffer> wrap_host_memory(std::span<const std::byte> /*memory*/) { return nullptr; }
  /// Bytes handed out and not returned.
  [[nodiscard]] virtual size_t allocated_bytes() const = 0;
};

}  // namespace quern::ops
