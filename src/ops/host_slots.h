#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/hash.h"
#include "base/shape.h"

// Slots in host memory through which messages pass, for transports that stage.

namespace quern::ops {

/// What stands before a message in its slot. A reader that finds another number, size or checksum than it expects has met a rank that computes another step, or a broken copy.
struct SlotHeader {
  uint64_t number = 0;  // of the message; counts from 1
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

/// Places of `num_slots` slots of a rank; message n lies in slot n mod num_slots. Plain arithmetic: the memory is the transport's. Two slots do for exchanges of all ranks, since whoever writes
/// message n has seen everybody's message n - 1, and so everybody has read n - 2.
struct SlotLayout {
  static constexpr size_t kHeaderBytes = 128;  // two cache lines: neighbours are fetched in pairs
  size_t message_bytes = 0;
  int32_t num_slots = 2;

  [[nodiscard]] size_t slot_bytes() const { return kHeaderBytes + static_cast<size_t>(round_up(static_cast<int64_t>(message_bytes), 4096)); }
  [[nodiscard]] size_t rank_bytes() const { return slot_bytes() * static_cast<size_t>(num_slots); }
  [[nodiscard]] size_t header_offset(int32_t rank, uint64_t number) const { return static_cast<size_t>(rank) * rank_bytes() + number % static_cast<uint64_t>(num_slots) * slot_bytes(); }
  [[nodiscard]] size_t data_offset(int32_t rank, uint64_t number) const { return header_offset(rank, number) + kHeaderBytes; }
};

/// A checksum that sees changed, swapped and shifted words, at the speed of memory: sums and sums of sums of 64-bit words in eight lanes.
class Checksum {
 public:
  void add(const std::byte* data, size_t bytes) {
    const size_t blocks = bytes / kBlock;
    for (size_t block = 0; block < blocks; ++block) add_block(data + block * kBlock);
    if (const size_t rest = bytes % kBlock; rest != 0) {
      std::byte padded[kBlock] = {};
      std::memcpy(padded, data + blocks * kBlock, rest);
      add_block(padded);
    }
    length_ += bytes;
  }
  [[nodiscard]] uint64_t value() const {
    uint64_t result = length_;
    for (size_t lane = 0; lane < kLanes; ++lane) result = hash_combine(hash_combine(result, sum_[lane]), sum_of_sums_[lane]);
    return result;
  }

 private:
  static constexpr size_t kLanes = 8, kBlock = kLanes * sizeof(uint64_t);
  void add_block(const std::byte* data) {
    uint64_t words[kLanes];
    std::memcpy(words, data, kBlock);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      sum_[lane] += words[lane];
      sum_of_sums_[lane] += sum_[lane];
    }
  }
  uint64_t sum_[kLanes] = {}, sum_of_sums_[kLanes] = {}, length_ = 0;
};

inline uint64_t checksum(const std::byte* data, size_t bytes) {
  Checksum sum;
  sum.add(data, bytes);
  return sum.value();
}

}  // namespace quern::ops
