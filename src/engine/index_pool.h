#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"

namespace quern::engine {

/// The indices 0 .. size - 1 of equal things on the devices with one holder each. They are handed out as handles that return themselves.
/// Owned by the engine thread; outlives its handles.
template <class Tag>
class IndexPool {
 public:
  /// One index, held. Move-only; a moved-from handle holds nothing.
  class Ref {
   public:
    Ref(Ref&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
    Ref& operator=(Ref&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(index_, other.index_);
      return *this;
    }
    ~Ref() {
      if (pool_ != nullptr) pool_->free_.push_back(index_);
    }
    [[nodiscard]] int32_t index() const {
      CHECK(pool_ != nullptr);
      return index_;
    }

   private:
    friend IndexPool;
    Ref(IndexPool* pool, int32_t index) : pool_(pool), index_(index) {}
    IndexPool* pool_;
    int32_t index_;
  };

  explicit IndexPool(int32_t size) : size_(size) {
    free_.reserve(static_cast<size_t>(size));
    for (int32_t i = size - 1; i >= 0; --i) free_.push_back(i);
  }
  ~IndexPool() { CHECK(num_free() == size_); }
  IndexPool(const IndexPool&) = delete;
  IndexPool& operator=(const IndexPool&) = delete;

  /// The index that was returned last, or nothing when all are held.
  [[nodiscard]] std::optional<Ref> acquire() {
    if (free_.empty()) return std::nullopt;
    const int32_t index = free_.back();
    free_.pop_back();
    return Ref(this, index);
  }
  [[nodiscard]] int32_t size() const { return size_; }
  [[nodiscard]] int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

 private:
  const int32_t size_;
  std::vector<int32_t> free_;
};

/// Places for the recurrent state, sampling parameters and block table of one sequence.
using SlotPool = IndexPool<struct SlotTag>;
using StateSlot = SlotPool::Ref;
/// Places in host memory for KV blocks and for snapshots.
using HostBlockPool = IndexPool<struct HostBlockTag>;
using HostBlock = HostBlockPool::Ref;
using HostSnapshotPool = IndexPool<struct HostSnapshotTag>;
using HostSnapshot = HostSnapshotPool::Ref;

}  // namespace quern::engine
