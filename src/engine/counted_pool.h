#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"

namespace quern::engine {

/// The indices 0 .. size - 1 of equal things on the devices that may have several holders: KV blocks, snapshots. An index is free again when
/// its last handle goes. Handles that the prefix cache keeps are marked, so that one number says what it could give back.
/// Owned by the engine thread; outlives its handles.
template <class Tag>
class CountedPool {
 public:
  /// A share in one index. A moved-from handle holds nothing.
  class Ref {
   public:
    Ref(const Ref& other) : pool_(other.pool_), index_(other.index_) {
      if (pool_ != nullptr) pool_->add(index_);
    }
    Ref(Ref&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
    Ref& operator=(Ref other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(index_, other.index_);
      return *this;
    }
    ~Ref() {
      if (pool_ != nullptr) pool_->drop(index_);
    }
    [[nodiscard]] int32_t index() const {
      CHECK(pool_ != nullptr);
      return index_;
    }
    /// Nobody else holds it.
    [[nodiscard]] bool unique() const { return pool_->entries_[static_cast<size_t>(index())].holders == 1; }

   private:
    friend CountedPool;
    Ref(CountedPool* pool, int32_t index) : pool_(pool), index_(index) {}
    CountedPool* pool_;
    int32_t index_;
  };

  explicit CountedPool(int32_t size) : entries_(static_cast<size_t>(size)) {
    free_.reserve(static_cast<size_t>(size));
    for (int32_t i = size - 1; i >= 0; --i) free_.push_back(i);
  }
  ~CountedPool() { CHECK(num_free() == size()); }
  CountedPool(const CountedPool&) = delete;
  CountedPool& operator=(const CountedPool&) = delete;

  /// The index that was returned last, or nothing when all are held.
  [[nodiscard]] std::optional<Ref> acquire() {
    if (free_.empty()) return std::nullopt;
    const int32_t index = free_.back();
    free_.pop_back();
    entries_[static_cast<size_t>(index)].holders = 1;
    return Ref(this, index);
  }
  /// One of the holders is the cache, or no longer is.
  void mark_cached(const Ref& ref, bool cached) {
    Entry& entry = entries_[static_cast<size_t>(ref.index())];
    CHECK(entry.cached != cached);
    entry.cached = cached;
    if (entry.holders == 1) num_idle_ += cached ? 1 : -1;
  }

  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(entries_.size()); }
  [[nodiscard]] int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  /// Held by the cache alone.
  [[nodiscard]] int32_t num_idle() const { return num_idle_; }

 private:
  struct Entry {
    int32_t holders = 0;
    bool cached = false;
  };

  void add(int32_t index) {
    Entry& entry = entries_[static_cast<size_t>(index)];
    if (entry.holders++ == 1 && entry.cached) --num_idle_;
  }
  void drop(int32_t index) {
    Entry& entry = entries_[static_cast<size_t>(index)];
    if (--entry.holders == 1 && entry.cached) ++num_idle_;
    if (entry.holders > 0) return;
    CHECK(!entry.cached);
    free_.push_back(index);
  }

  std::vector<Entry> entries_;
  std::vector<int32_t> free_;
  int32_t num_idle_ = 0;
};

/// KV blocks of 64 tokens.
using BlockPool = CountedPool<struct BlockTag>;
using BlockRef = BlockPool::Ref;
/// Recurrent states of boundaries, kept aside.
using SnapshotPool = CountedPool<struct SnapshotTag>;
using SnapshotRef = SnapshotPool::Ref;

}  // namespace quern::engine
