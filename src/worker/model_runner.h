#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "ops/collective.h"
#include "worker/activation_ranges.h"
#include "worker/loaded_model.h"
#include "worker/rank_memory.h"
#include "worker/slot_values.h"
#include "worker/stage_link.h"
#include "worker/start.h"
#include "worker/step.h"

namespace quern::worker {

/// The rank's ends of its groups; null where there is nobody else. They outlive the runner.
struct RankLinks {
  ops::Collective* stage = nullptr;     // the ranks of one stage, by tp_rank
  ops::Collective* pipeline = nullptr;  // the ranks of this tp_rank, by stage
  StageLink* processes = nullptr;       // the same, where every stage is a process
};

/// Executes StepPlans on one device, one after the other. A step is enqueued as a whole: the host waits for nothing that the device computes, so that the next step
/// stands in the queue before this one is done. (Logits for the host, prompt log-probabilities and rows to or from a stage in another process are the exceptions.) All ranks execute the same plans in the same order; those of
/// the last stage sample, each the same tokens, and the first of them reports.
class ModelRunner {
 public:
  struct Setup {
    const ops::KernelTable& table;
    ops::SelectionRules rules;
    ops::Device& device;              // outlives the runner
    RankLinks links;
    LoadProgress progress;
    const std::atomic<bool>* stop_loading = nullptr;
  };
  /// Loads rank number `rank` of `plan`.
  static Result<std::unique_ptr<ModelRunner>> create(const ExecutionPlan& plan, size_t rank, weights::WeightSource& source, const Setup& setup);

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
    size_t row_bytes = 0;  // of the rows that go on to a stage in another process
    ops::Mark mark = 0;
    std::chrono::steady_clock::time_point begin;
  };
  static constexpr size_t kMaxInFlight = RankMemory::kMaxInFlight;

  /// `masks` is called when runs with mask_pending are about to be sampled, and may wait. `slots` are the values that the sampler's device has; where they are given, this device takes them.
  InFlight submit(const StepPlan& plan, const std::function<StepMasks()>& masks, const SlotValues* slots = nullptr);
  /// Waits for the oldest step that was not collected. May be called from another thread than submit.
  StepResult collect(InFlight step);
  StepResult run(const StepPlan& plan, const std::function<StepMasks()>& masks) { return collect(submit(plan, masks)); }
  /// From any thread: no wait for another rank goes on.
  void abort(const Error& error);

  /// Recurrent state of a slot, for tests: S [num_v_heads, d_v, d_k] of one of the rank's GDN layers with the rows since the boundary folded in, and the last three columns
  /// [3, channels] widened to f32.
  struct StateDump {
    std::vector<float> state, columns;
  };
  Result<StateDump> dump_state(int32_t slot, int32_t gdn_layer);

 private:
  /// Steps of one key have the same launches: so many runs of as many rows, so many draft passes (0: none, 1: the first without a draft, ...), and so many candidates of each row.
  struct GraphKey {
    int32_t num_runs = 0, rows_per_run = 0, num_passes = 0, num_candidates = 0;
    auto operator<=>(const GraphKey&) const = default;
  };
  struct RecordedStep {
    std::unique_ptr<ops::Graph> graph;
    uint64_t last_used = 0;  // the number of the step
  };
  /// Runs [first, first + count) of a step, whose logits fit at once.
  struct SampleGroup {
    int64_t first = 0, count = 0, first_logits = 0, num_logits = 0;
  };

  void apply_state_ops(const StepPlan& plan);
  void apply_slot_updates(const StepPlan& plan);
  void apply_block_tables(const StepPlan& plan);
  void apply_drafts(const StepPlan& plan);
  void apply_slot_values(const SlotValues& slots);
  void make_rows(const StepPlan& plan);
  void add_padding(int32_t number, int32_t first_row);
  void write_inputs(const StepPlan& plan);
  Result<void> compute(const StepPlan& plan, const std::function<StepMasks()>& masks);
  Result<void> replay_or_enqueue(const StepPlan& plan, const std::function<StepMasks()>& masks);
  /// The step as it was recorded; null where it has not been. Makes room for it where as many as may be are recorded.
  std::unique_ptr<ops::Graph>& recorded(const GraphKey& key);
  Result<void> enqueue_step(const StepPlan& plan, const std::function<StepMasks()>& masks);
  void layer(const LoadedLayer& layer, const ops::Rows& rows, const ops::TensorView& x, size_t gdn_index, size_t kv_index, int32_t first_index,
             ActivationRanges* ranges, size_t index);
  /// Final norm and the logits of the rows in `logit_rows`: of this rank's ids. For drafts those of the FP8 copy of lm_head, where there is one.
  ops::TensorView head(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows, const ops::TensorView& hidden,
                       bool for_drafts = false);
  /// All ranks' logits of these rows, whole.
  ops::TensorView whole(const ops::TensorView& own_logits);
  /// All ranks' candidates of `own`, i32 [n, words].
  ops::TensorView gather_candidates(const ops::TensorView& own);
  Result<void> export_logits(const StepPlan& plan);
  /// How many candidates of each rank the step's rows need (ops::candidates_needed); 0: whole rows, as where there is one rank.
  [[nodiscard]] int32_t candidates_needed(const StepPlan& plan) const;
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
  [[nodiscard]] bool shares_layers() const { return links_.stage != nullptr; }
  /// Of this rank's part of the vocabulary.
  [[nodiscard]] int32_t first_id() const { return static_cast<int32_t>(rank_.shard.vocab.begin); }
  /// What an op with a residual adds to: x, or what the ranks then add up in x.
  [[nodiscard]] ops::TensorView target(const ops::TensorView& x) const { return shares_layers() ? step_.partial.first(x.shape[0]) : x; }
  void add_up(const ops::TensorView& x);
  /// x <- embeddings of the ids, or of the rows where `tokens` is null.
  void embed(const ops::Rows& rows, const ops::TensorView* tokens, const ops::TensorView& x);
  [[nodiscard]] bool reports() const { return rank_.shard.last_stage() && rank_.shard.tp_rank == 0; }
  [[nodiscard]] int64_t num_runs() const { return std::ssize(runs_); }

  ExecutionPlan plan_;
  const RankPlan& rank_;                // of plan_
  RankLinks links_;
  std::vector<int64_t> vocab_shares_;   // ids of each rank of the stage
  std::vector<int64_t> candidate_shares_;  // words of each rank's candidates
  std::unique_ptr<ops::Stream> stream_;
  std::unique_ptr<KernelCache> kernels_;
  ActivationRanges* ranges_ = nullptr;
  LoadedModel model_;
  SequenceMemory memory_;
  HostStore host_;
  StepMemory step_;
  StepLayout layout_;
  std::vector<int32_t> num_logprobs_;  // of each slot, as last given
  std::vector<std::array<int32_t, 2>> candidates_needed_;  // likewise: by its rows, and by those of verifies in which drafts count as accepted
  std::map<GraphKey, RecordedStep> recorded_;
  std::array<StepStaging, kMaxInFlight> staging_;
  std::array<StageRows, kMaxInFlight> arriving_, leaving_;  // from and to stages in other processes
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
  int32_t num_candidates_ = 0;  // of each row and rank; 0: whole rows
  int32_t draft_depth_ = 0;
  bool fills_mtp_ = false;
  ops::Rows rows_;

  ModelRunner(ExecutionPlan plan, size_t rank, const RankLinks& links) : plan_(std::move(plan)), rank_(plan_.ranks[rank]), links_(links), layout_(plan_.limits) {}
};

}  // namespace quern::worker
