#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/opencl/driver.h"
#include "ops/counted_memory.h"
#include "ops/device.h"
#include "ops/found_device.h"

namespace quern::opencl {

/// The driver's context of one device; what a Device shares with the buffers and streams that may outlive it.
struct Context {
  const Driver& driver;
  PlatformObject* platform;
  DeviceObject* device;
  ContextObject* handle;
  std::string device_name;
  std::atomic<size_t> allocated_bytes{0};
  std::atomic<uint64_t> num_launches{0};  // of kernels, on all streams
  // Unified shared memory (cl_intel_unified_shared_memory); null where the driver has none.
  void* (*allocate_host)(ContextObject* context, const uint64_t* properties, size_t size, uint32_t alignment, Status* status) = nullptr;
  Status (*free_shared)(ContextObject* context, void* address) = nullptr;
  // Memory that the host sees and nobody has any more, by size: a driver may take milliseconds to make or to give up such memory. Of Buffers, whose thread is one.
  struct Spare {
    MemoryObject* handle = nullptr;
    std::byte* host = nullptr;
  };
  std::multimap<size_t, Spare> spares;
  size_t spare_bytes = 0;

  Context(const Driver& d, PlatformObject* p, DeviceObject* o, ContextObject* h, std::string name)
      : driver(d), platform(p), device(o), handle(h), device_name(std::move(name)) {}
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

class FirstError;

/// Memory of one device. The host sees it only where the device is inspectable: it is the host's alone then until work is enqueued that uses it, and is mapped for who asks
/// for its address, which waits for that work. Used by one thread.
class Buffer final : public ops::Buffer {
 public:
  /// `handle` null and `host` not: the device learns of the memory when it is lent first, with `extra_flags`.
  Buffer(std::shared_ptr<Context> context, MemoryObject* handle, std::byte* host, size_t size_bytes, uint64_t extra_flags = 0);
  ~Buffer() override;
  [[nodiscard]] std::byte* address() const override {
    if (lent_to_ != nullptr) take_back();
    return host_;
  }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }
  /// Null before what the host sees was lent.
  [[nodiscard]] MemoryObject* handle() const { return handle_; }
  /// Hands what the host sees to work that is enqueued next. `error` learns what goes wrong with it.
  void lend(QueueObject* queue, const std::shared_ptr<FirstError>& error) const;

 private:
  /// Maps it for the host again. False: the work that uses it has failed.
  bool take_back() const;

  std::shared_ptr<Context> context_;
  mutable MemoryObject* handle_;
  std::byte* host_;  // null: the host does not see it
  size_t size_bytes_;
  uint64_t extra_flags_;
  mutable QueueObject* lent_to_ = nullptr;
  mutable std::shared_ptr<FirstError> error_;
};

/// A place in a Buffer as kernels take it: two parameters, the memory and an offset in bytes (PLACE in numeric.clh). No buffer: a null pointer.
struct Place {
  const Buffer* buffer = nullptr;
  uint64_t offset_bytes = 0;
};
/// Place of a view's first element; of nothing where the view is empty.
Place place_of(const ops::TensorView& view);
/// Place `offset_bytes` into a buffer.
Place place_in(const ops::Buffer& buffer, size_t offset_bytes);

/// A kernel of a built program.
struct Function {
  KernelObject* handle = nullptr;
  const char* name = "";  // for messages
};

/// Work-groups along each axis, and work-items of a group. A zero extent launches nothing.
struct LaunchShape {
  size_t groups[3] = {1, 1, 1};
  size_t items[3] = {1, 1, 1};
};

struct DeviceOptions {
  /// For tests that read and write tensors with the host's pointers: memory is host memory, and who asks for its address waits for the launches that use it.
  bool inspectable = false;
  /// For tests: the device says that it is an Arc Pro B60, and kernels for its matrix units are built with these spelled out (xe2.clh). Needs sub-groups of 16.
  bool emulates_xe2 = false;
  bool emulates_flushing = false;  // and they take half subnormals for zeros
  /// For tests that plant faults: changes the whole source of a unit before it is built.
  std::function<void(std::string_view unit, std::string& source)> edit_source = {};
  /// For tests: machine code of a program instead of this build's, which only Xe2 takes; empty: none.
  std::function<std::string_view(std::string_view unit, std::string_view definitions)> binary = {};
  /// Where built programs are kept; empty: nowhere. The default is nowhere for PoCL, which keeps them itself.
  std::string program_cache = default_program_cache();

  /// $XDG_CACHE_HOME/quern/opencl or ~/.cache/quern/opencl
  static std::string default_program_cache();
};

/// One OpenCL device, used by one worker thread.
class Device final : public ops::Device {
 public:
  /// `ordinal` counts all devices, Intel GPUs first; without one, the first Intel GPU is meant and no other device will do.
  static Result<std::unique_ptr<Device>> open(std::optional<int> ordinal, const DeviceOptions& options = {});
  /// One that counts what it would allocate; kernels made for it are asked for sizes alone.
  static std::unique_ptr<Device> imagine(ops::DeviceTraits traits);
  ~Device() override;

  [[nodiscard]] const ops::DeviceTraits& traits() const override { return traits_; }
  Result<std::unique_ptr<ops::Buffer>> allocate(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Stream>> make_stream() override;
  [[nodiscard]] size_t allocated_bytes() const override { return imagined_ ? imagined_->bytes() : context_->allocated_bytes.load(std::memory_order_relaxed); }

  [[nodiscard]] const Context& context() const { return *context_; }
  [[nodiscard]] bool emulates_xe2() const { return options_.emulates_xe2; }
  /// What kernels for matrix units are built with on this device: " -DEMULATED" where they are spelled out.
  [[nodiscard]] std::string_view emulation() const {
    return !options_.emulates_xe2 ? "" : options_.emulates_flushing ? " -DEMULATED -DEMULATED_FLUSHES" : " -DEMULATED";
  }
  /// Whether the matrix units take half subnormals for zeros; asked of the device once.
  Result<bool> flushes_half_subnormals();

  /// Kernel `name` of `unit` (a .cl file of this folder), built with `definitions` such as "-DACTIVATION_BF16 -DKV_E4M3". A program is built at its first use, or
  /// taken from the cache on disk; "-cl-std=CL3.0" among them replaces 1.2. An error holds the first line of the build log that names a fault.
  Result<Function> function(std::string_view unit, const char* name, std::string_view definitions = {});
  /// The programs built so far: "unit definitions".
  [[nodiscard]] std::vector<std::string> programs() const;
  /// A small table in device memory, there when this returns.
  Result<std::unique_ptr<ops::Buffer>> upload(std::span<const int32_t> values, std::string_view purpose);

 private:
  explicit Device(ops::DeviceTraits traits) : traits_(std::move(traits)), imagined_(std::in_place) {}
  Device(std::shared_ptr<Context> context, QueueObject* queue, ops::DeviceTraits traits, std::string driver_version, bool on_intel, const DeviceOptions& options);
  Result<ProgramObject*> build(std::string_view unit, std::string_view definitions);
  Result<ProgramObject*> build_from(const std::string& source, const std::string& options, std::string_view unit);
  /// What this build has of a program's machine code, where the device is one that it was compiled for; empty: nothing.
  [[nodiscard]] std::string_view binary_of(std::string_view unit, std::string_view definitions) const;
  ProgramObject* take_binary(std::string_view binary, const std::string& options) const;
  ProgramObject* load_cached(const std::string& path, const std::string& options) const;
  void store_cached(const std::string& path, ProgramObject* program) const;

  std::shared_ptr<Context> context_;
  QueueObject* queue_ = nullptr;  // for what is done while things are made
  ops::DeviceTraits traits_;
  std::string driver_version_;
  bool binary_refused_ = false;  // and said so
  bool on_intel_ = false;
  DeviceOptions options_;
  std::optional<ops::CountedMemory> imagined_;  // there is no context then
  size_t largest_allocation_ = 0;
  bool exact_division_ = false;
  std::optional<bool> flushes_half_subnormals_;
  struct Program {
    ProgramObject* handle = nullptr;
    std::map<std::string, KernelObject*, std::less<>> kernels;
  };
  std::map<std::string, Program, std::less<>> programs_;  // by unit and definitions
};

/// The Device behind an ops::Device of this platform.
Device& opencl_device(ops::Device& device);

/// Traits of a device that is not opened: those of opencl:N.
Result<ops::DeviceTraits> traits_of(std::optional<int> ordinal);

/// What `doctor` says of every device, or of why there is none.
std::vector<std::string> describe_devices();
/// The same as facts, in the order of opencl:N. Error: there is no loader, or it lists nothing.
Result<std::vector<ops::FoundDevice>> list_devices();

}  // namespace quern::opencl
