#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "backends/cpu/thread_pool.h"
#include "ops/counted_memory.h"
#include "ops/device.h"

namespace quern::cpu {

/// The host, or a part of its threads and memory, as a device: memory is host memory, a Stream runs what it is given at once. Used by one worker thread.
class Device final : public ops::Device {
 public:
  /// `num_threads` 0: one per usable core. `records`: for tests of steps that are laid out for replay. `num_sharing` devices share the machine: each has its part of cores and memory.
  explicit Device(int num_threads, bool records = false, int num_sharing = 1);
  /// One that counts what it would allocate; kernels made for it are asked for sizes alone.
  static std::unique_ptr<Device> imagine(ops::DeviceTraits traits, int num_threads);

  [[nodiscard]] const ops::DeviceTraits& traits() const override { return traits_; }
  /// 64-byte aligned. Pages of large buffers take memory when they are first touched; what was promised is limited by memory_bytes.
  Result<std::unique_ptr<ops::Buffer>> allocate(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) override;
  Result<std::unique_ptr<ops::Stream>> make_stream() override;
  [[nodiscard]] bool reads_host_memory() const override { return true; }
  std::unique_ptr<ops::Buffer> wrap_host_memory(std::span<const std::byte> memory) override;
  [[nodiscard]] size_t allocated_bytes() const override { return imagined_ ? imagined_->bytes() : allocated_->load(std::memory_order_relaxed); }

  [[nodiscard]] ThreadPool& pool() { return pool_; }

 private:
  Device(ops::DeviceTraits traits, int num_threads);

  ops::DeviceTraits traits_;
  ThreadPool pool_;
  bool records_;
  std::optional<ops::CountedMemory> imagined_;
  std::shared_ptr<std::atomic<size_t>> allocated_;  // shared with the buffers, which may outlive the device
};

}  // namespace quern::cpu
