#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "ops/device.h"

namespace quern::testing {

/// A device whose memory is the host's, for tests of what comes before kernels. `in_place`: it reads host memory where it lies, as CPUs do;
/// otherwise everything is copied, as to a card.
class HostDevice final : public ops::Device {
 public:
  explicit HostDevice(bool in_place) : in_place_(in_place) {}

  [[nodiscard]] const ops::DeviceTraits& traits() const override { return traits_; }
  Result<std::unique_ptr<ops::Buffer>> allocate(size_t size_bytes, std::string_view /*purpose*/) override {
    allocated_ += size_bytes;
    return std::unique_ptr<ops::Buffer>(std::make_unique<OwnedBuffer>(size_bytes, allocated_));
  }
  Result<std::unique_ptr<ops::Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) override { return allocate(size_bytes, purpose); }
  Result<std::unique_ptr<ops::Stream>> make_stream() override { return std::unique_ptr<ops::Stream>(std::make_unique<HostStream>()); }
  [[nodiscard]] bool reads_host_memory() const override { return in_place_; }
  [[nodiscard]] std::unique_ptr<ops::Buffer> wrap_host_memory(std::span<const std::byte> memory) override {
    return in_place_ ? std::make_unique<WrappedBuffer>(memory) : nullptr;
  }
  [[nodiscard]] size_t allocated_bytes() const override { return allocated_; }

 private:
  class OwnedBuffer final : public ops::Buffer {
   public:
    OwnedBuffer(size_t size, size_t& counter) : bytes_(size), counter_(counter) {}
    ~OwnedBuffer() override { counter_ -= bytes_.size(); }
    [[nodiscard]] std::byte* address() const override { return const_cast<std::byte*>(bytes_.data()); }
    [[nodiscard]] size_t size_bytes() const override { return bytes_.size(); }

   private:
    std::vector<std::byte> bytes_;
    size_t& counter_;
  };
  class WrappedBuffer final : public ops::Buffer {
   public:
    explicit WrappedBuffer(std::span<const std::byte> bytes) : bytes_(bytes) {}
    [[nodiscard]] std::byte* address() const override { return const_cast<std::byte*>(bytes_.data()); }
    [[nodiscard]] size_t size_bytes() const override { return bytes_.size(); }

   private:
    std::span<const std::byte> bytes_;
  };
  /// Copies happen at finish(), so that a source that went away too early is seen by the sanitizers.
  class HostStream final : public ops::Stream {
   public:
    void copy_to_device(const void* source, const ops::TensorView& destination) override {
      pending_.push_back({source, destination.data<std::byte>(), destination.size_bytes()});
    }
    void copy_to_host(const ops::TensorView& source, void* destination) override {
      pending_.push_back({source.data<std::byte>(), destination, source.size_bytes()});
    }
    void copy(const ops::TensorView& source, const ops::TensorView& destination) override {
      pending_.push_back({source.data<std::byte>(), destination.data<std::byte>(), source.size_bytes()});
    }
    void fill_zero(const ops::TensorView& destination) override {
      pending_.push_back({nullptr, destination.data<std::byte>(), destination.size_bytes()});
    }
    Result<void> finish() override {
      for (const Copy& c : pending_)
        c.source != nullptr ? std::memcpy(c.destination, c.source, c.size) : std::memset(c.destination, 0, c.size);
      pending_.clear();
      return {};
    }
    ops::Mark mark() override { return 0; }
    Result<void> wait(ops::Mark) override { return finish(); }

   private:
    struct Copy {
      const void* source;
      void* destination;
      size_t size;
    };
    std::vector<Copy> pending_;
  };

  ops::DeviceTraits traits_;
  bool in_place_;
  size_t allocated_ = 0;
};

}  // namespace quern::testing
