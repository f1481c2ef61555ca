#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "worker/activation_ranges.h"
#include "worker/host_store.h"
#include "worker/loaded_model.h"
#include "worker/sequence_memory.h"
#include "worker/start.h"
#include "worker/step.h"
#include "worker/step_memory.h"

namespace quern::worker {

/// Executes StepPlans on one device, one after the other. A step is enqueued as a whole: the host waits for nothing that the device computes, so that the next step
/// stands in the queue before this one is done. (Logits for the host and prompt log-probabilities are the exception.)
class ModelRunner {
 public:
  /// Loads the model of `plan` onto `device`, which must outlive the runner.
  static Result<std::unique_ptr<ModelRunner>> create(const ExecutionPlan& plan, weights::WeightSource& source, const ops::KernelTable& table,
                                                     const ops::SelectionRules& rules, ops::Device& device, const LoadProgress& progress);

  /// Steps add what they see to `ranges`, which outlives the runner. Slow: every op is waited for.
  void observe(ActivationRanges& ranges) { ranges_ = &ranges; }

  /// A step that was enqueued.
  struct InFlight {
    /// What the result of a run depends on beside what the device says.
    struct Run {
      bool samples = false, verify = false;
      int32_t num_rows = 0, num_logprobs = -1, num_drafts = 0, following_token = -1;
    };
    StepResult result;  // as far as the host knows it
    std::vector<Run> runs;
    std::vector<std::unique_ptr<std::vector<std::byte>>> uploads;  // what the device reads until `mark`
    size_t staging = 0;
    ops::Mark mark = 0;
    std::chrono::steady_clock::time_point begin;
  };
  /// Steps that may be enqueued and not collected.
  static constexpr size_t kMaxInFlight = 4;

  /// `masks` is called when runs with mask_pending are about to be sampled, and may wait.
  InFlight submit(const StepPlan& plan, const std::function<StepMasks()>& masks);
  /// Waits for the oldest step that was not collected. May be called from another thread than submit.
  StepResult collect(InFlight step);
  StepResult run(const StepPlan& plan, const std::function<StepMasks()>& masks) { return collect(submit(plan, masks)); }

  /// Recurrent state of a slot, for tests: S [num_v_heads, d_v, d_k] of one GDN layer with the rows since the boundary folded in, and the last three columns
  /// [3, channels] widened to f32.
  struct StateDump {
    std::vector<float> state, columns;
  };
  Result<StateDump> dump_state(int32_t slot, int32_t gdn_layer);

 private:
  /// Steps of one key have the same launches: so many runs of as many rows, and so many draft passes (0: none, 1: the first without a draft, ...).
  struct GraphKey {
    int32_t num_runs = 0, rows_per_run = 0, num_passes = 0;
    auto operator<=>(const GraphKey&) const = default;
  };
  /// Runs [first, first + count) of a step, whose logits fit at once.
  struct SampleGroup {
    int64_t first = 0, count = 0, first_logits = 0, num_logits = 0;
  };

  void apply_state_ops(const StepPlan& plan);
  void apply_slot_updates(const StepPlan& plan);
  void apply_block_tables(const StepPlan& plan);
  void apply_drafts(const StepPlan& plan);
  void make_rows(const StepPlan& plan);
  void add_padding(int32_t number, int32_t first_row);
  void write_inputs(const StepPlan& plan);
  Result<void> compute(const StepPlan& plan, const std::function<StepMasks()>& masks);
  Result<void> enqueue_step(const StepPlan& plan, const std::function<StepMasks()>& masks);
  void layer(const LoadedLayer& layer, const ops::Rows& rows, const ops::TensorView& x, size_t gdn_index, size_t kv_index, int32_t first_index,
             ActivationRanges* ranges, size_t index);
  Result<void> export_logits(const StepPlan& plan);
  void sample(const StepPlan& plan, const std::function<StepMasks()>& masks);
  ops::TensorView upload_masks(const SampleGroup& group, const StepMasks& masks);
  Result<void> draft(const StepPlan& plan);

  /// Memory that the host writes and the device reads until the step is done.
  std::byte* staged(size_t size_bytes);
  /// Copies host values to a device tensor.
  template <class T>
  void upload(std::span<const T> values, const ops::TensorView& destination);
  template <class T>
  Result<std::vector<T>> download(const ops::TensorView& source);
  ops::Launch launch() { return {*stream_, step_.workspace}; }
  [[nodiscard]] int64_t num_runs() const { return std::ssize(runs_); }

  /// Page-locked memory of one step in flight.
  struct Staging {
    std::unique_ptr<ops::Buffer> inputs, results, logprobs, uploads;
    size_t used = 0;  // of uploads
  };

  ExecutionPlan plan_;
  std::unique_ptr<ops::Stream> stream_;
  std::unique_ptr<KernelCache> kernels_;
  ActivationRanges* ranges_ = nullptr;
  LoadedModel model_;
  SequenceMemory memory_;
  HostStore host_;
  StepMemory step_;
  StepLayout layout_;
  std::vector<int32_t> num_logprobs_;  // of each slot, as last given
  std::map<GraphKey, std::unique_ptr<ops::Graph>> graphs_;
  std::array<Staging, kMaxInFlight> staging_;
  uint64_t num_submitted_ = 0;
  std::chrono::steady_clock::time_point last_done_;  // of collect

  // The step that is being submitted.
  InFlight* current_ = nullptr;
  std::vector<ops::RowRun> runs_, draft_runs_;
  std::vector<ops::SampleRun> sample_runs_;
  std::vector<int32_t> logit_rows_;
  std::vector<uint32_t> mask_words_;
  std::vector<SampleGroup> groups_;
  int32_t rows_per_run_ = 0;  // of a step that is laid out for replay, else 0
  int32_t draft_depth_ = 0;
  bool fills_mtp_ = false;
  ops::Rows rows_;

  explicit ModelRunner(ExecutionPlan plan) : plan_(std::move(plan)), layout_(plan_.limits) {}
};

}  // namespace quern::worker
