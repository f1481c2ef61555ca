#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "model/config.h"
#include "ops/device.h"
#include "ops/select.h"
#include "weights/source.h"
#include "worker/numerics.h"
#include "worker/options.h"
#include "worker/shard.h"
#include "worker/worker_group.h"

// Everything is decided before a weight byte is read: a kernel for every op, and a place for every byte (architecture.md section 2).

namespace quern::worker {

/// One op on one problem: what every candidate said, and who asks for it.
struct OpChoice {
  std::string op, problem;
  std::string device_name;    // what runs it
  std::string wanted_by;      // the first place in the model that asks
  int32_t num_wanting = 0;    // places that ask; of ranks that share a layer, one counts
  std::string candidate;  // empty: none took it
  ops::LaunchCounts launches;  // of the candidate, each time
  struct Answer {
    std::string candidate, reason;
    bool accepted = false;
  };
  std::vector<Answer> answers;
};

/// Bytes of one rank's device memory, by purpose. The runner allocates exactly these, but for the first four.
struct MemoryPlan {
  uint64_t device_bytes = 0;     // what the device has
  uint64_t budget_bytes = 0;     // what may be used of it
  uint64_t driver_bytes = 0;     // what the driver, code and recorded steps take: not allocated by us, and not ours to choose
  uint64_t message_bytes = 0;    // messages between ranks, at most
  uint64_t weights_bytes = 0;    // packed, and what kernels keep for themselves
  uint64_t workspace_bytes = 0;  // activations, logits, tables, scratch, and what allocations are rounded up by
  uint64_t state_bytes = 0;      // S and boundary columns of all slots
  uint64_t ring_bytes = 0;       // rings and conv windows of all slots
  uint64_t sampler_bytes = 0;    // penalty counts and parameters of all slots
  uint64_t snapshot_bytes = 0;
  uint64_t kv_bytes = 0;         // all blocks, MTP layer included
  uint64_t slot_bytes = 0;       // of one slot: state, ring, sampler
  uint64_t block_bytes = 0;      // of one KV block of 64 tokens, all layers
  /// What is there before the first sequence.
  [[nodiscard]] uint64_t allocated_before() const { return driver_bytes + message_bytes + weights_bytes + workspace_bytes; }
  /// What a single sequence with one block needs.
  [[nodiscard]] uint64_t smallest_bytes() const { return allocated_before() + slot_bytes + block_bytes; }
  /// What may be used beyond that; negative: it does not fit.
  [[nodiscard]] int64_t margin_bytes() const { return static_cast<int64_t>(budget_bytes) - static_cast<int64_t>(smallest_bytes()); }
  /// What Device::allocated_bytes() says after loading, without messages.
  [[nodiscard]] uint64_t planned_allocations() const { return total_bytes() - driver_bytes - message_bytes; }
  [[nodiscard]] uint64_t total_bytes() const {
    return allocated_before() + state_bytes + ring_bytes + sampler_bytes + snapshot_bytes + kv_bytes;
  }
};

/// Tensors of one scheme, for the table that `plan` prints.
struct SchemeTotal {
  std::string scheme;
  int64_t num_tensors = 0;
  uint64_t bytes = 0;
};

/// One device's part of the plan.
struct RankPlan {
  std::string device;             // by name
  ops::DeviceTraits traits;
  Shard shard;
  model::ModelConfig config;      // its part of the model
  weights::Inventory inventory;   // and of the checkpoint
  MemoryPlan memory;
  double decode_bytes_per_token = 0;  // as ExecutionPlan's, of this rank
};

struct ExecutionPlan {
  WorkerOptions options;
  model::ModelConfig config;       // whole
  weights::Inventory inventory;    // whole
  std::vector<RankPlan> ranks;     // stage by stage; in each the ranks of tensor parallelism
  std::vector<std::string> hosts;  // of several processes, of which each has a stage; else empty
  int32_t process = 0;             // this one
  ops::DeviceTraits traits;        // of the first rank
  bool with_mtp = false;
  bool draft_head = false;         // there is an FP8 copy of lm_head for drafts
  DType activation = DType::kBF16, kv = DType::kBF16, ring = DType::kBF16;
  std::vector<OpChoice> choices;       // one per op and problem
  std::vector<SchemeTotal> schemes;
  MemoryPlan memory;                   // of the rank with the least to spare
  WorkerLimits limits;                 // what every rank has room for
  int32_t max_logit_rows = 0;          // rows whose logits have a place at once: a step with more of them computes them group by group
  double decode_bytes_per_token = 0;   // read from memory for one token at 1k context, one sequence; of several ranks what is read one after the other
  double expected_decode_tokens_per_second = 0;
  bool fits = false;
  std::string verdict;                 // why it fits or not, and what would
  std::vector<std::string> notes;      // clamps and choices worth a log line

  [[nodiscard]] Numerics numerics() const { return {activation, kv, ring, options.k_max, draft_head}; }
  /// The ranks of this process.
  [[nodiscard]] Range local_ranks() const;
  /// "rank 1 (cuda:1)", with the process where there are several.
  [[nodiscard]] std::string rank_name(size_t rank) const;
  /// "process 1 (hostname, ranks 2 and 3)"
  [[nodiscard]] std::string process_name(int32_t process) const;
  /// The refusals as the message that a failed start shows; empty when every op has a kernel.
  [[nodiscard]] std::string refusals() const;
  [[nodiscard]] std::vector<ops::DeviceTraits> device_traits() const;
  /// How ranks reach each other: as options.collective says, with no longer messages than this model's steps need.
  [[nodiscard]] ops::CollectiveOptions collective_options() const;
  /// That a device may take for a step.
  [[nodiscard]] std::chrono::milliseconds step_timeout() const;
  /// The --kv-cache-memory-bytes that gives so many blocks.
  [[nodiscard]] uint64_t kv_bytes_for(int64_t num_blocks) const;
};

/// Config, inventory and candidates only: no weight byte is read and no device opened. Errors: a broken config or checkpoint, an unknown device or
/// kernel name, options that contradict. A plan that does not fit, or an op without kernel, is not an error here: see `fits` and refusals().
Result<ExecutionPlan> make_plan(const WorkerOptions& options);

/// As make_plan, from parts already known: traits of every rank, or of one kind that all of them are.
Result<ExecutionPlan> make_plan(const WorkerOptions& options, model::ModelConfig config, weights::Inventory inventory, std::vector<ops::DeviceTraits> traits);

/// As make_plan, on devices of several processes: their names and traits, rank by rank.
Result<ExecutionPlan> make_plan_on(const WorkerOptions& options, const std::vector<std::string>& devices, const std::vector<ops::DeviceTraits>& traits);

/// The whole matrix: every candidate of every op on a platform for the ops of a plan, for `quern kernels`.
struct KernelRow {
  std::string platform, op, candidate, reason;
  bool accepted = false;
};
std::vector<KernelRow> kernel_matrix(const ExecutionPlan& plan);
/// The plan of Qwen3.6-27B in block FP8 on a device, for `quern kernels` without a model.
Result<ExecutionPlan> plan_reference_model(const std::string& device);

/// Names for --device that need no hardware to plan for.
std::vector<std::string> known_cards();

}  // namespace quern::worker
