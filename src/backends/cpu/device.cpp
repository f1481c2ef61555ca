#include "backends/cpu/device.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "backends/cpu/cpu_info.h"
#include "backends/cpu/stream.h"
#include "base/log.h"
#include "base/shape.h"

namespace quern::cpu {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

/// On a machine with several memory nodes the pages of fresh memory lie on all of them in turn: threads take work as they come, so no page has an owner to be near to, and
/// reading uses the channels of all nodes. A wish, like huge pages: where the kernel refuses, pages lie where they are first touched.
void interleave(void* data, size_t size_bytes) {
  static const std::vector<int> nodes = memory_nodes();
  if (nodes.size() < 2) return;
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of <linux/mempolicy.h>
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(nodes.back()) / kBits + 1);
  for (const int node : nodes) mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  static std::once_flag told;
  if (syscall(SYS_mbind, data, size_bytes, kInterleave, mask.data(), mask.size() * kBits + 1, 0) != 0)
    std::call_once(told, [] { log_debug("memory is not spread over the nodes of this machine: {}", std::strerror(errno)); });
}

/// Pages of our own, zero-filled by the kernel on first touch.
class MappedBuffer final : public ops::Buffer {
 public:
  MappedBuffer(std::byte* data, size_t size_bytes, std::shared_ptr<std::atomic<size_t>> allocated)
      : data_(data), size_bytes_(size_bytes), allocated_(std::move(allocated)) {
    allocated_->fetch_add(size_bytes_, std::memory_order_relaxed);
  }
  ~MappedBuffer() override {
    munmap(data_, size_bytes_);
    allocated_->fetch_sub(size_bytes_, std::memory_order_relaxed);
  }
  [[nodiscard]] std::byte* address() const override { return data_; }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }

 private:
  std::byte* data_;
  size_t size_bytes_;
  std::shared_ptr<std::atomic<size_t>> allocated_;
};

/// Somebody else's memory, read in place.
class BorrowedBuffer final : public ops::Buffer {
 public:
  explicit BorrowedBuffer(std::span<const std::byte> memory) : memory_(memory) {}
  [[nodiscard]] std::byte* address() const override { return const_cast<std::byte*>(memory_.data()); }
  [[nodiscard]] size_t size_bytes() const override { return memory_.size(); }

 private:
  std::span<const std::byte> memory_;
};

}  // namespace

Device::Device(int num_threads, bool records, int num_sharing)
    : traits_(host_traits()),
      pool_(num_threads > 0 ? num_threads : std::max(usable_cores() / num_sharing, 1)),
      records_(records),
      allocated_(std::make_shared<std::atomic<size_t>>(0)) {
  traits_.memory_bytes /= static_cast<uint64_t>(num_sharing);
}

Device::Device(ops::DeviceTraits traits, int num_threads)
    : traits_(std::move(traits)), pool_(std::max(num_threads > 0 ? num_threads : traits_.num_cores, 1), false), records_(false), imagined_(std::in_place) {}

std::unique_ptr<Device> Device::imagine(ops::DeviceTraits traits, int num_threads) {
  return std::unique_ptr<Device>(new Device(std::move(traits), num_threads));
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate(size_t size_bytes, std::string_view purpose) {
  if (imagined_) return imagined_->allocate(size_bytes, size_bytes);
  const size_t used = allocated_bytes();
  if (used + size_bytes > traits_.memory_bytes)
    return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes of memory; {} of {} are already allocated", purpose, size_bytes,
                      used, traits_.memory_bytes);
  if (size_bytes == 0) return std::unique_ptr<ops::Buffer>(std::make_unique<BorrowedBuffer>(std::span<const std::byte>()));
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes of memory, which the system refuses: {}", purpose, size_bytes,
                      std::strerror(errno));
  if (size_bytes >= kHugePage) madvise(data, size_bytes, MADV_HUGEPAGE);  // a wish; small pages do as well
  interleave(data, size_bytes);
  return std::unique_ptr<ops::Buffer>(std::make_unique<MappedBuffer>(static_cast<std::byte*>(data), size_bytes, allocated_));
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate_host(size_t size_bytes, std::string_view purpose) { return allocate(size_bytes, purpose); }

Result<std::unique_ptr<ops::Stream>> Device::make_stream() {
  if (imagined_) return std::unique_ptr<ops::Stream>(std::make_unique<ops::IdleStream>());
  return std::unique_ptr<ops::Stream>(std::make_unique<Stream>(records_));
}

std::unique_ptr<ops::Buffer> Device::wrap_host_memory(std::span<const std::byte> memory) {
  return std::make_unique<BorrowedBuffer>(memory);
}

}  // namespace quern::cpu
