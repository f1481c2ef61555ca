#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "ops/device.h"

// What imagined devices give out (backends::imagine_device): memory and streams in numbers only, for plans.

namespace quern::ops {

/// Memory that nobody can touch: its address is null.
class CountedBuffer final : public Buffer {
 public:
  CountedBuffer(size_t size_bytes, size_t taken_bytes, std::shared_ptr<std::atomic<size_t>> total) : size_bytes_(size_bytes), taken_bytes_(taken_bytes), total_(std::move(total)) {
    if (total_ != nullptr) total_->fetch_add(taken_bytes_, std::memory_order_relaxed);
  }
  ~CountedBuffer() override {
    if (total_ != nullptr) total_->fetch_sub(taken_bytes_, std::memory_order_relaxed);
  }
  CountedBuffer(const CountedBuffer&) = delete;
  CountedBuffer& operator=(const CountedBuffer&) = delete;
  [[nodiscard]] std::byte* address() const override { return nullptr; }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }

 private:
  size_t size_bytes_, taken_bytes_;
  std::shared_ptr<std::atomic<size_t>> total_;
};

/// The memory of an imagined device.
class CountedMemory {
 public:
  /// `taken_bytes`: what the device would take for it.
  [[nodiscard]] std::unique_ptr<Buffer> allocate(size_t size_bytes, size_t taken_bytes) const { return std::make_unique<CountedBuffer>(size_bytes, taken_bytes, total_); }
  /// Memory that is not the device's.
  [[nodiscard]] static std::unique_ptr<Buffer> allocate_host(size_t size_bytes) { return std::make_unique<CountedBuffer>(size_bytes, 0, nullptr); }
  [[nodiscard]] size_t bytes() const { return total_->load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<std::atomic<size_t>> total_ = std::make_shared<std::atomic<size_t>>(0);
};

/// A stream of an imagined device: nothing is done.
class IdleStream final : public Stream {
 public:
  void copy_to_device(const void* /*source*/, const TensorView& /*destination*/) override {}
  void copy_to_host(const TensorView& /*source*/, void* /*destination*/) override {}
  void copy(const TensorView& /*source*/, const TensorView& /*destination*/) override {}
  void fill_zero(const TensorView& /*destination*/) override {}
  Result<void> finish() override { return {}; }
  Mark mark() override { return 0; }
  Result<void> wait(Mark /*mark*/) override { return {}; }
};

}  // namespace quern::ops
