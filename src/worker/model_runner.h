#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "worker/loaded_model.h"
#include "worker/sequence_memory.h"
#include "worker/start.h"
#include "worker/step.h"
#include "worker/step_memory.h"

namespace quern::worker {

/// Executes StepPlans on one device, one after the other, on the thread that calls it.
class ModelRunner {
 public:
  /// Loads the model of `plan` onto `device`, which must outlive the runner.
  static Result<std::unique_ptr<ModelRunner>> create(const ExecutionPlan& plan, weights::WeightSource& source, const ops::KernelTable& table,
                                                     const ops::SelectionRules& rules, ops::Device& device, const LoadProgress& progress);

  /// `masks` is called when runs with mask_pending are about to be sampled.
  StepResult run(const StepPlan& plan, const std::function<StepMasks()>& masks);

  /// Recurrent state of a slot, for tests: S [num_v_heads, d_v, d_k] of one GDN layer with the rows since the boundary folded in, and the last three columns
  /// [3, channels] widened to f32.
  struct StateDump {
    std::vector<float> state, columns;
  };
  Result<StateDump> dump_state(int32_t slot, int32_t gdn_layer);

 private:
  void apply_state_ops(const StepPlan& plan);
  void apply_slot_updates(const StepPlan& plan);
  void apply_block_tables(const StepPlan& plan);
  void make_rows(const StepPlan& plan);
  void forward(const ops::Rows& rows, const ops::TensorView& x);
  void layer(const LoadedLayer& layer, const ops::Rows& rows, const ops::TensorView& x, size_t gdn_index, size_t kv_index, int32_t first_index);
  Result<void> sample(const StepPlan& plan, const std::function<StepMasks()>& masks, StepResult& result);
  Result<void> read_logits(const StepPlan& plan, StepResult& result);
  Result<void> propose(const StepPlan& plan, StepResult& result);

  /// Copies host values to a device tensor; the values are kept until the stream has finished.
  template <class T>
  void upload(std::vector<T> values, const ops::TensorView& destination);
  template <class T>
  Result<std::vector<T>> download(const ops::TensorView& source);
  ops::Launch launch() { return {*stream_, step_.workspace}; }

  ExecutionPlan plan_;
  std::unique_ptr<ops::Stream> stream_;
  std::unique_ptr<KernelCache> kernels_;
  LoadedModel model_;
  SequenceMemory memory_;
  StepMemory step_;
  std::vector<int32_t> cursor_;                 // host's copy of the device's cursors, exact after each step
  std::vector<int32_t> position_delta_, num_logprobs_;  // of each slot, as last given
  std::vector<std::unique_ptr<std::vector<std::byte>>> uploads_;
  std::vector<ops::RowRun> runs_;
  std::vector<ops::Embed::RunInput> inputs_;
  ops::Rows rows_;

  explicit ModelRunner(ExecutionPlan plan) : plan_(std::move(plan)) {}
};

}  // namespace quern::worker
