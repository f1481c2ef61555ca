#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
  uint64_t overhead_bytes = 0;      // what driver, code and recorded steps take of it beside what is allocated; measured
  double read_bandwidth = 0;        // bytes per second: the datasheet's, or measured on the machine
  int num_cores = 0;                // threads (CPU), SMs, XVE groups
  int architecture = 0;             // CUDA: 90 for sm_90; OpenCL: 2021 for bmg-g21, 2031 for bmg-g31, 0 for others
  bool fp8_matrix = false;          // has FP8 matrix units: W8A8 is used
  bool avx2 = false, avx512 = false, avx512_vbmi = false, avx512_bf16 = false, amx_bf16 = false;  // CPU, from CPUID
  bool device_code = true;          // this build holds device code for the platform; otherwise its candidates refuse with `why_no_device_code`
  std::string why_no_device_code;
};

/// Work that a Stream recorded, to be replayed.
class Graph {
 public:
  virtual ~Graph() = default;
};

/// A place in a Stream's order.
using Mark = uint64_t;

/// An in-order queue of work on one device. Enqueuing returns before the device has finished.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void copy_to_device(const void* source, const TensorView& destination) = 0;   // source is free for reuse once a later mark is reached
  virtual void copy_to_host(const TensorView& source, void* destination) = 0;           // valid once a later mark is reached
  virtual void copy(const TensorView& source, const TensorView& destination) = 0;
  virtual void fill_zero(const TensorView& destination) = 0;
  /// Waits for everything enqueued so far; reports what went wrong on the device.
  virtual Result<void> finish() = 0;

  /// Marks the work enqueued so far. At most kMaxMarks of a stream may be awaited at a time.
  virtual Mark mark() = 0;
  /// As finish(), for the work before the mark. May be called from another thread than the one that enqueues.
  virtual Result<void> wait(Mark mark) = 0;
  static constexpr int kMaxMarks = 8;

  /// Whether launches can be recorded: between the two calls nothing is executed, and only kernels and fill_zero are enqueued. No graph: they were executed after all.
  [[nodiscard]] virtual bool can_record() const { return false; }
  virtual void begin_recording() {}
  virtual Result<std::unique_ptr<Graph>> end_recording() { return std::unique_ptr<Graph>(); }
  virtual void replay(const Graph& /*graph*/) {}
};

/// One device, used by one worker thread.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual const DeviceTraits& traits() const = 0;
  /// Zero-filled memory. kResourceExhausted with sizes when the device has none left; `purpose` goes into the message.
  virtual Result<std::unique_ptr<Buffer>> allocate(size_t size_bytes, std::string_view purpose) = 0;
  /// Host memory from which and to which copies run at full speed and without waiting: page-locked where that matters. address() is the host's.
  virtual Result<std::unique_ptr<Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) = 0;
  virtual Result<std::unique_ptr<Stream>> make_stream() = 0;
  /// True where kernels read host memory in place, so that loading needs no staging copy.
  [[nodiscard]] virtual bool reads_host_memory() const { return false; }
  /// A read-only Buffer over host memory that outlives it; null where reads_host_memory() is false. Not counted as allocated.
  [[nodiscard]] virtual std::unique_ptr<Buffer> wrap_host_memory(std::span<const std::byte> /*memory*/) { return nullptr; }
  /// Bytes handed out and not returned, as the device takes them.
  [[nodiscard]] virtual size_t allocated_bytes() const = 0;
  /// What the driver says is in use of the device's memory, by whomever; nothing where it does not say.
  [[nodiscard]] virtual std::optional<uint64_t> used_bytes() const { return std::nullopt; }
};

}  // namespace quern::ops
