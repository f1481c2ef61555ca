#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

// What the transports of all platforms share: counters that ranks of one process advance and await, with a deadline, an end for all when one stops, and one sentence for what went wrong.

namespace quern::ops {

/// What a wait is about, for its error.
struct MessageId {
  std::string_view op;  // "all_gather", "add_partials", "send", "receive"
  uint64_t number = 0;  // counts from 1 within the group, or within the pair of ranks
  size_t bytes = 0;     // of one rank
};

/// "rank 0 waited 10.0 s for ranks 1 and 3 in add_partials (message 1234, 10240 bytes, transport staged)"
[[nodiscard]] Error missed_ranks(int32_t rank, std::span<const int32_t> missed, const MessageId& message, std::string_view transport, std::chrono::nanoseconds age);

/// A number that one rank advances and others await: how many messages it has published, or read. On a cache line of its own.
class alignas(64) Counter {
 public:
  [[nodiscard]] bool reached(uint64_t number) const { return static_cast<int32_t>(value_.load(std::memory_order_acquire) - static_cast<uint32_t>(number)) >= 0; }

 private:
  friend class Rendezvous;
  std::atomic<uint32_t> value_{0};  // the number's lower half: ranks are never 2^31 messages apart
  mutable std::atomic<uint32_t> num_sleepers_{0};
};

/// Where the ranks of a group wait for each other. A rank's calls come from one thread, stop() from any. A wait spins for some microseconds, then sleeps; several ranks may share a core.
class Rendezvous {
 public:
  Rendezvous(std::string_view transport, int32_t num_ranks, std::chrono::milliseconds deadline);

  [[nodiscard]] int32_t num_ranks() const { return static_cast<int32_t>(stops_.size()); }
  [[nodiscard]] const std::string& transport() const { return transport_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const { return deadline_; }

  /// What was written before is seen by those whose wait for `number` returns.
  void advance(Counter& counter, uint64_t number);

  /// `counter` is `rank`'s.
  struct Awaited {
    const Counter* counter;
    int32_t rank;
  };
  /// Returns when all counters have reached `number`. An error: the deadline came, `rank` was stopped, or a rank of the group has stopped and something is missing. After an error `rank` has stopped, too.
  Result<void> wait(int32_t rank, std::span<const Awaited> awaited, uint64_t number, const MessageId& message);

  /// No wait of this rank goes on, and none of the group for what is not there yet. The first error of a rank stays.
  void stop(int32_t rank, Error error);
  /// Why `rank` shall not begin another exchange: it has stopped, or another has, and then it stops, too.
  Result<void> goes_on(int32_t rank);

 private:
  struct Stop {
    std::atomic<bool> set{false};
    std::optional<Error> error;  // under mutex_; constant once set
  };
  [[nodiscard]] bool stopped(int32_t rank) const { return stops_[static_cast<size_t>(rank)]->set.load(std::memory_order_acquire); }
  [[nodiscard]] Error why_stopped(int32_t rank) const;  // only of a stopped rank
  /// What a rank says that stops because another has.
  [[nodiscard]] Error stopped_by_another(int32_t rank, std::string_view during) const;

  std::string transport_;
  std::chrono::milliseconds deadline_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Stop>> stops_;  // a rank's each
  std::atomic<int32_t> first_stopped_{-1};
};

}  // namespace quern::ops
