#pragma once

#include <array>

#include "worker/host_store.h"
#include "worker/kernel_cache.h"
#include "worker/sequence_memory.h"
#include "worker/step_memory.h"

namespace quern::worker {

/// What a rank keeps in memory beside weights and kernels. The runner allocates it on its device; the plan does on an imagined one, and so knows to the byte how much it is.
struct RankMemory {
  /// Steps that may be enqueued and not collected.
  static constexpr size_t kMaxInFlight = 4;
  static Result<RankMemory> allocate(const ExecutionPlan& plan, const RankPlan& rank, const KernelCache& kernels, ops::Device& device, ops::Stream& stream);

  SequenceMemory sequences;
  HostStore host;
  StepMemory step;
  std::array<StepStaging, kMaxInFlight> staging;
};

/// Counts what a rank allocates, on a device that exists in numbers only.
class RankCounter {
 public:
  RankCounter(const ExecutionPlan& plan, const RankPlan& rank, const ops::KernelTable& table, const ops::SelectionRules& rules);

  /// Packed weights, and what kernels keep for themselves. Ops that no kernel takes count as they are stored.
  [[nodiscard]] uint64_t weights_bytes() const { return weights_bytes_; }
  /// Everything else with the plan's limits, but for places in host memory.
  [[nodiscard]] uint64_t other_bytes(const ExecutionPlan& plan, const RankPlan& rank) const;

 private:
  std::unique_ptr<ops::Device> device_;
  KernelCache kernels_;
  uint64_t weights_bytes_ = 0;
};

}  // namespace quern::worker
