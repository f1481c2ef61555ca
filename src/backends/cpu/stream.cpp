#include "backends/cpu/stream.h"

#include <cstring>

#include "base/check.h"

namespace quern::cpu {

void Stream::copy_to_device(const void* source, const ops::TensorView& destination) {
  if (!destination.empty()) std::memcpy(destination.data<std::byte>(), source, destination.size_bytes());
}

void Stream::copy_to_host(const ops::TensorView& source, void* destination) {
  if (!source.empty()) std::memcpy(destination, source.data<std::byte>(), source.size_bytes());
}

void Stream::copy(const ops::TensorView& source, const ops::TensorView& destination) {
  CHECK(source.size_bytes() == destination.size_bytes());
  if (!source.empty()) std::memmove(destination.data<std::byte>(), source.data<std::byte>(), source.size_bytes());
}

void Stream::fill_zero(const ops::TensorView& destination) {
  if (!destination.empty()) std::memset(destination.data<std::byte>(), 0, destination.size_bytes());
}

void Stream::fail(Error error) {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = std::move(error);
  failed_.store(true, std::memory_order_release);
}

Result<void> Stream::outcome() const {
  if (!failed_.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(mutex_);
  return *error_;
}

}  // namespace quern::cpu
