#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "ops/device.h"
#include "worker/processes.h"

namespace quern::worker {

/// Rows in host memory on their way from a stage to the next, and what stands before them.
class StageRows {
 public:
  StageRows() = default;
  /// `memory` from Device::allocate_host, of room_for(max_bytes) bytes.
  explicit StageRows(std::shared_ptr<ops::Buffer> memory) : memory_(std::move(memory)) {}
  static size_t room_for(size_t max_bytes) { return kHeaderBytes + max_bytes; }
  [[nodiscard]] std::byte* rows() const { return memory_->address() + kHeaderBytes; }

 private:
  friend class StageLink;
  static constexpr size_t kHeaderBytes = 64;
  std::shared_ptr<ops::Buffer> memory_;
};

/// A rank's way to the ranks of its tp_rank in the stages before and behind, where those are in other processes. What is sent are bytes in host memory; the runner copies them from and to its
/// device outside of what it records. Every wait has the deadline; an error names ranks, message, transport and age.
class StageLink {
 public:
  struct Place {
    int32_t rank = 0, tp_rank = 0;  // of all; of the stage, and so of the stages before and behind
    int32_t stage = 0;              // the process's
    int32_t tp_size = 1;
  };
  StageLink(Processes& processes, const Place& place, std::chrono::milliseconds deadline) : processes_(processes), place_(place), deadline_(deadline) {}

  /// To the next stage; `step` goes with the rows.
  Result<void> send(uint64_t step, const StageRows& rows, size_t num_bytes);
  /// From the stage before: the rows of that step, so many bytes of them.
  Result<void> receive(uint64_t step, const StageRows& rows, size_t num_bytes);
  /// From any thread: no wait goes on, and none begins.
  void abort(const Error& error);

 private:
  [[nodiscard]] Error explain(const Error& error, std::string_view op, int32_t stage, uint64_t number, size_t num_bytes, std::chrono::steady_clock::duration age);

  Processes& processes_;
  const Place place_;
  const std::chrono::milliseconds deadline_;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  std::optional<Error> why_stopped_;              // under mutex_
  uint64_t num_sent_ = 0, num_received_ = 0;      // each of its thread
};

}  // namespace quern::worker
