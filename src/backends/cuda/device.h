#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/function.h"
#include "ops/counted_memory.h"
#include "ops/device.h"
#include "ops/found_device.h"

namespace quern::cuda {

/// The stack of a thread, for which the driver sets memory aside for as many threads as the GPU holds, by default 1 KiB each. No kernel of ours needs more (decode_bf16_256, the head of many decode rows on Hopper, has 336 bytes, all
/// others up to 224); where one does, the limit is raised with it, which takes memory that was not planned.
inline constexpr size_t kStackBytes = 336;
/// Shared memory that a block takes of a multiprocessor beside its own (CUDA programming guide, compute capabilities 8.0 and newer).
inline constexpr int kReservedSharedBytes = 1 << 10;
/// What a context takes of a GPU where that cannot be asked. An H200, 2026-11-30, driver 580.159: 328.8 MiB with stacks of 256 bytes, of which 66 are these; 80 bytes more are 21.
inline constexpr uint64_t kUsualContextBytes = uint64_t{356} << 20;
/// Room for device code, which takes 10 MiB there once all kernels of the 27B model have run, and for recorded steps: 1 MiB for each of 350 to 410 launches, and the worker keeps 96 at most.
inline constexpr uint64_t kCodeAndGraphBytes = uint64_t{128} << 20;

/// The driver's context of one GPU; what a Device shares with the buffers and streams that may outlive it.
struct Context {
  const Driver& driver;
  DeviceOrdinal device;
  ContextObject* handle;
  std::string device_name;
  std::atomic<size_t> allocated_bytes{0};

  Context(const Driver& d, DeviceOrdinal o, ContextObject* h, std::string name) : driver(d), device(o), handle(h), device_name(std::move(name)) {}
  ~Context() { driver.context_release(device); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Page-locked memory that the program allocated: copies from and to it are not staged.
  void add_host_memory(const std::byte* address, size_t size_bytes);
  void remove_host_memory(const std::byte* address);
  [[nodiscard]] bool is_page_locked(const void* address, size_t size_bytes) const;

  /// Makes the context the calling thread's; every use of the driver begins with it, since devices are opened on one thread and used on another.
  void make_current() const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, size_t> host_memory_;  // address, size
};

struct DeviceOptions {
  bool quantizes_activations = true;  // else its FP8 matrix units are hidden
  /// For tests that read and write tensors with the host's pointers: memory is host memory that the GPU maps at the same address, and every launch is awaited.
  bool inspectable = false;
  /// For tests: a newer GPU is taken for a workstation card, sm_89 with the shared memory of one. It runs what such a card would choose, translated from the code for sm_89 by the driver, which has to be told
  /// so (CUDA_FORCE_PTX_JIT=1 in the environment).
  bool emulates_workstation = false;
};

/// One NVIDIA GPU, used by one worker thread.
class Device final : public ops::Device {
 public:
  static Result<std::unique_ptr<Device>> open(int ordinal, const DeviceOptions& options = {});
  /// One that counts what it would allocate; kernels made for it are asked for sizes alone.
  static std::unique_ptr<Device> imagine(ops::DeviceTraits traits);
  ~Device() override;

  [[nodiscard]] const ops::DeviceTraits& traits() const override { return traits_; }
  /// 256-byte aligned.
  Result<std::unique_ptr<ops::Buffer>> allocate(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Stream>> make_stream() override;
  [[nodiscard]] size_t allocated_bytes() const override { return imagined_ ? imagined_->bytes() : context_->allocated_bytes.load(std::memory_order_relaxed); }
  [[nodiscard]] std::optional<uint64_t> used_bytes() const override;

  [[nodiscard]] const Context& context() const { return *context_; }
  [[nodiscard]] const std::shared_ptr<Context>& shared_context() const { return context_; }
  [[nodiscard]] int num_sms() const { return traits_.num_cores; }
  /// Dynamic shared memory that one block may have.
  [[nodiscard]] int max_shared_bytes() const { return max_shared_bytes_; }
  /// How many blocks with `shared_bytes` of dynamic shared memory fit a multiprocessor, as far as that goes.
  [[nodiscard]] int blocks_by_shared_bytes(int shared_bytes) const { return shared_bytes_per_sm_ / (shared_bytes + kReservedSharedBytes); }
  [[nodiscard]] int l2_bytes() const { return l2_bytes_; }

  /// Kernel `name` of `unit` (a .cu file of this folder), allowed to use `shared_bytes` of dynamic shared memory. The unit is loaded at its first use.
  template <class Args>
  Result<Function<Args>> function(std::string_view unit, const char* name, int shared_bytes = 0) {
    ASSIGN_OR_RETURN(FunctionObject * handle, find_function(unit, name, shared_bytes));
    return Function<Args>{handle, name};
  }
  /// A small table in device memory, there when this returns.
  Result<std::unique_ptr<ops::Buffer>> upload(std::span<const int32_t> values, std::string_view purpose);
  /// `words` of `value`, by name: made when first asked for, the same for all kernels of the device that ask, gone with the last of them.
  Result<std::shared_ptr<ops::Buffer>> shared_words(std::string_view name, size_t words, int32_t value);
  /// Blocks of a kernel that fit one SM at a time.
  template <class Args>
  int blocks_per_sm(const Function<Args>& function, int threads, int shared_bytes) const {
    int blocks = 0;
    if (imagined_) return 0;
    context_->make_current();
    return context_->driver.occupancy(&blocks, function.handle, threads, static_cast<size_t>(shared_bytes)) == kSuccess ? blocks : 0;
  }
  /// Clusters of a kernel that the device holds at a time; `shape.grid` means nothing.
  template <class Args>
  int clusters_at_a_time(const Function<Args>& function, const LaunchShape& shape) const {
    return clusters_at_a_time(function.handle, shape);
  }

 private:
  explicit Device(ops::DeviceTraits traits);
  int clusters_at_a_time(FunctionObject* function, const LaunchShape& shape) const;
  Device(std::shared_ptr<Context> context, ops::DeviceTraits traits, const DeviceOptions& options);
  Result<FunctionObject*> find_function(std::string_view unit, const char* name, int shared_bytes);

  std::shared_ptr<Context> context_;
  ops::DeviceTraits traits_;
  DeviceOptions options_;
  std::optional<ops::CountedMemory> imagined_;  // there is no context then
  int max_shared_bytes_ = 0, shared_bytes_per_sm_ = 0, l2_bytes_ = 0;
  size_t stack_bytes_ = kStackBytes;  // of a thread, as it was last set
  std::map<std::string, ModuleObject*, std::less<>> modules_;
  std::map<std::string, std::weak_ptr<ops::Buffer>, std::less<>> shared_words_;
};

/// The Device behind an ops::Device of this platform.
Device& cuda_device(ops::Device& device);

/// What `doctor` says of every GPU, or of why there is none.
std::vector<std::string> describe_devices();
/// In the order of cuda:0, cuda:1, ... Error: no driver, or it finds none.
Result<std::vector<ops::FoundDevice>> list_devices();

}  // namespace quern::cuda
