#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace quern::worker {

/// The processes that serve one model together, perhaps on several hosts, and how bytes get from one to another. Thread-safe, but for leave().
class Processes {
 public:
  virtual ~Processes() = default;
  [[nodiscard]] virtual int32_t rank() const = 0;
  [[nodiscard]] virtual int32_t size() const = 0;
  [[nodiscard]] virtual const std::string& host() const = 0;    // the name of this one's
  [[nodiscard]] virtual int32_t num_on_host() const = 0;        // so many of them share this one's, itself included
  [[nodiscard]] virtual std::string_view transport() const = 0;  // "mpi"

  /// What ends a wait.
  struct Patience {
    std::chrono::milliseconds deadline{0};
    std::function<bool()> stop = {};  // asked now and then
  };
  /// Bytes for process `to`; those of one tag arrive in order. When it returns without an error, they may be overwritten; after one they are kept as long as `owner` says, since the
  /// transport may still look at them. kUnavailable: the deadline has come; kCancelled: the wait was stopped.
  virtual Result<void> send(int32_t to, int32_t tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner, const Patience& patience) = 0;
  /// The next bytes of that tag from process `from`.
  virtual Result<std::vector<std::byte>> receive(int32_t from, int32_t tag, const Patience& patience) = 0;
  /// The same into memory that is there, of which so many bytes are used then; kInternal where they are more than it has room for.
  virtual Result<size_t> receive(int32_t from, int32_t tag, std::span<std::byte> room, std::shared_ptr<void> owner, const Patience& patience) = 0;

  /// Nothing more is expected of the others: waits until all have said so, and nothing follows. A process that ends without it is a loss for the others.
  virtual void leave() = 0;

  /// Whether one who is silent for a moment counts as lost (ProcessChannel): when the launcher asks for the end, as it does when one of its processes has died, little time is left.
  void set_impatient(bool impatient) { impatient_ = impatient; }
  [[nodiscard]] bool impatient() const { return impatient_; }

  /// Why nothing goes on with the others, once one of them is lost; also while no step is under way. The first reason stays.
  void set_failure(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
  }
  [[nodiscard]] std::optional<Error> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  std::atomic<bool> impatient_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> failure_;  // under mutex_
};

/// Those that mpirun has started this one with; null where it was started alone. kUnsupported where Open MPI's library cannot be opened, or another MPI's launcher was used.
Result<std::unique_ptr<Processes>> join_processes();

}  // namespace quern::worker
