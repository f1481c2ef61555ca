#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace quern::server {

/// How many requests of each key are answered at once. Thread-safe.
class RequestSlots {
 public:
  /// limit 0: any number.
  RequestSlots(int32_t limit, size_t num_keys) : limit_(limit), used_(std::make_shared<std::vector<std::atomic<int32_t>>>(num_keys)) {}

  [[nodiscard]] int32_t limit() const { return limit_; }
  /// A place for one request, given back when the last copy is destroyed; null when all of this key are taken.
  [[nodiscard]] std::shared_ptr<const void> take(size_t key_idx) const {
    std::atomic<int32_t>& used = (*used_)[key_idx];
    if (used.fetch_add(1) >= limit_) {
      used.fetch_sub(1);
      return nullptr;
    }
    return std::shared_ptr<const void>(&used, [all = used_](const void* place) {
      const_cast<std::atomic<int32_t>*>(static_cast<const std::atomic<int32_t>*>(place))->fetch_sub(1);
    });
  }

 private:
  int32_t limit_;
  std::shared_ptr<std::vector<std::atomic<int32_t>>> used_;
};

}  // namespace quern::server
