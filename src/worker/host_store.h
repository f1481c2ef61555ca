#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ops/device.h"
#include "worker/sequence_memory.h"
#include "worker/step.h"

namespace quern::worker {

/// Places in host memory for KV blocks and snapshots that the device has no room for, and the copies to and fro, in the order of the stream.
/// Owned by the worker; used by its thread alone.
class HostStore {
 public:
  static Result<HostStore> allocate(const ExecutionPlan& plan, const Sizes& sizes, ops::Device& device);

  /// One of the four kinds between device and host.
  void apply(const StateOp& op, const SequenceMemory& memory, ops::Stream& stream) const;

 private:
  std::unique_ptr<ops::Buffer> blocks_, snapshots_;  // null: no places
  uint64_t block_bytes_ = 0, snapshot_bytes_ = 0;
};

}  // namespace quern::worker
