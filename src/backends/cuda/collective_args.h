#pragma once

#include <cstdint>

#include "base/dtype.h"

// What ranks share in memory that all of them reach, and the arguments of the kernels that pass messages through it. Included by host and device code.

namespace quern::cuda {

inline constexpr int kMaxRanks = 8;
/// Every launch has as many blocks: they are resident together on any GPU, and the blocks of one number meet on all ranks.
#ifdef QUERN_EMULATED_EXCHANGE  // tests run the kernels thread by thread on a CPU
inline constexpr int kExchangeBlocks = 3, kSmallThreads = 8, kBulkThreads = 8;
#else
inline constexpr int kExchangeBlocks = 32, kSmallThreads = 256, kBulkThreads = 512;
#endif
/// A small message is a word of 8 bytes for each thread of a round.
inline constexpr int kSmallRounds = 4;
inline constexpr int64_t kSmallWordBytes = 8, kSmallWords = int64_t{kExchangeBlocks} * kSmallThreads * kSmallRounds, kSmallBytes = kSmallWords * kSmallWordBytes;

/// A word in flight: each half holds 4 bytes of it below and the number of the message above, and arrives whole.
struct alignas(16) Line {
  uint64_t half[2];
};

/// What one rank writes and others read in exchanges of all, in twos that take turns; `data`, 2 x capacity bytes, follows.
struct alignas(4096) Mailbox {
  Line lines[2][kSmallWords];
  uint32_t arrived[2][2][kExchangeBlocks];  // [turn][phase][block]: number of the message of which the block has written its part
};
/// What one rank sends another; `data`, 2 x capacity bytes, follows.
struct alignas(4096) Channel {
  uint32_t arrived[2][kExchangeBlocks];
};
/// Data behind its header; turn 0 or 1.
template <class Header>
constexpr uint64_t data_offset(uint64_t capacity, int turn) {
  return sizeof(Header) + capacity * static_cast<uint64_t>(turn);
}
template <class Header>
constexpr uint64_t box_bytes(uint64_t capacity) {
  return data_offset<Header>(capacity, 2);
}

/// How far a rank has come, in its own memory, so that a launch can be replayed. Blocks count for themselves: none waits for another of its rank.
struct ExchangeCounters {
  uint32_t failed;  // not 0: a wait was given up, and there are no more
  uint32_t calls[kExchangeBlocks];
  uint32_t words[kExchangeBlocks][kSmallRounds];  // small messages in which the block had words of the round
  uint32_t bulks[kExchangeBlocks];
  uint32_t sent[kMaxRanks][kExchangeBlocks], received[kMaxRanks][kExchangeBlocks];
};

enum class ExchangeOp : int32_t { kAllGather, kAddPartials, kSend, kReceive };
enum class FaultKind : uint32_t { kNone, kDeadline, kStopped };

/// In page-locked host memory: the first wait of a rank that was given up.
struct alignas(128) Fault {
  FaultKind kind;  // written last
  ExchangeOp op;
  uint32_t missed;  // a bit for each rank
  uint64_t number, bytes, waited_ns;
};
/// In page-locked host memory, of the group.
struct alignas(128) GroupWords {
  Fault faults[kMaxRanks];
  alignas(128) uint32_t stopped;  // not 0: a rank has stopped; whoever misses something waits no more
};

/// What a wait needs.
struct WaitArgs {
  ExchangeCounters* counters;
  GroupWords* group;
  uint64_t deadline_ns;
  int32_t rank;
  ExchangeOp op;
};

/// A message of every rank to every rank, at most capacity bytes of each.
struct ExchangeArgs {
  WaitArgs wait;
  int32_t num_ranks;
  int32_t num_targets;
  int32_t target_ranks[kMaxRanks];  // -1: the mailbox is there for all
  Mailbox* targets[kMaxRanks];      // where this rank writes
  const Mailbox* sources[kMaxRanks];  // by rank, where their messages are read; its own is not
  uint64_t capacity;
  const void* mine;
  uint32_t bytes[kMaxRanks];  // of each rank's message
  uint32_t max_bytes;
  // all_gather: rank r's rows of row_bytes[r] go to all + offsets[r] + row * stride.
  void* all;
  int64_t stride, offsets[kMaxRanks];
  uint32_t row_bytes[kMaxRanks];
  // add_partials
  void* x;
  DType dtype;
  int32_t two_phases;  // each rank adds its share and shows the others the sum
};

/// One piece of a message from one rank to another.
struct MessageArgs {
  WaitArgs wait;
  int32_t peer;
  Channel* channel;   // where the receiver reads
  uint32_t* taken;    // [kExchangeBlocks], where the sender reads: number of the message that the receiver's block has done with
  uint64_t capacity;
  void* message;
  uint32_t bytes;
};

// For messages that a library passes: the host sees from these how far each rank's device has come.

/// In page-locked host memory, of one rank.
struct alignas(128) Passage {
  uint32_t begun, ended;  // calls
  ExchangeOp op;          // of the last that has begun
  uint64_t bytes;
};
struct PassageArgs {
  Passage* passage;
  uint32_t* count;  // in the rank's own memory
  ExchangeOp op;
  int32_t ends;
  uint64_t bytes;
};
/// Messages that were gathered, `capacity` bytes apart, to their rows.
struct PlaceArgs {
  ExchangeArgs exchange;  // num_ranks, capacity, mine: the gathered messages, bytes, all, stride, offsets, row_bytes
};

}  // namespace quern::cuda
