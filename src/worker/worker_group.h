#pragma once

#include <cstdint>
#include <memory>

#include "base/result.h"
#include "worker/step.h"

namespace quern::worker {

/// What the engine may count on; fixed once the workers have started.
struct WorkerLimits {
  int32_t num_slots = 0;         // sequences with state at the same time
  int32_t num_blocks = 0;        // KV blocks of 64 tokens
  int32_t num_snapshots = 0;     // stored boundaries kept aside
  int32_t num_host_blocks = 0;     // places for KV blocks
  int32_t num_host_snapshots = 0;  // and for snapshots in host memory
  uint64_t block_bytes = 0;      // of one KV block
  uint64_t snapshot_bytes = 0;   // of one snapshot
  int32_t max_model_len = 0;     // tokens of prompt and output
  int32_t max_rows = 0;          // rows of one step
  int32_t vocab_size = 0;
  int32_t k_max = 0;             // drafts of one verify
  bool has_mtp = false;
  // Of a pipeline. Where there is more than one, a sequence has one step in flight, and steps in flight name disjoint sequences; as many as there are stages keep all of them at
  // work, and one more may be there before its turn.
  int32_t num_stages = 1;
};

/// The ranks that execute steps, seen from the engine thread. submit() returns at once; results come back in the order of submission.
class WorkerGroup {
 public:
  virtual ~WorkerGroup() = default;
  [[nodiscard]] virtual const WorkerLimits& limits() const = 0;
  virtual void submit(StepPlan plan) = 0;
  virtual void submit_masks(StepMasks masks) = 0;
  /// The result of the oldest step that was submitted and not yet fetched; waits for it.
  virtual StepResult wait() = 0;
  /// The same, but nothing when wake() was called meanwhile or since this last returned, and no result is there.
  virtual std::optional<StepResult> wait_or_wake() = 0;
  /// From any thread.
  virtual void wake() = 0;
  /// The same if it is there already.
  virtual std::optional<StepResult> poll() = 0;
};

}  // namespace quern::worker
