#pragma once

#include <memory>
#include <vector>

#include "ops/kernel_table.h"
#include "worker/plan.h"
#include "worker/sizes.h"

namespace quern::worker {

/// Where the tables of one step lie in one tensor of i32, so that one copy carries them: those that the host writes for the device, and those that it reads back.
struct StepLayout {
  explicit StepLayout(const WorkerLimits& limits);

  struct Table {
    int64_t offset = 0, capacity = 0, width = 1;  // entries of `width` integers
  };
  // To the device, one entry a run: RunEntry, (t, h, w), SampleRun, DraftRun, RunEntry of the further draft passes; then one a sampled row; then one a row.
  Table runs, run_positions, sample_runs, draft_runs, draft_table, draft_row_runs, logit_rows, row_runs, given_tokens;
  int64_t num_inputs = 0;
  // To the host, one entry a run.
  Table tokens, num_tokens, non_finite, drafts;
  int64_t num_results = 0;
};

/// Where the rows of one step live on the device: tables, activations, logits, scratch. Made once, reused by every step.
class StepMemory {
 public:
  static Result<StepMemory> allocate(const ExecutionPlan& plan, const RankPlan& rank, const Sizes& sizes, size_t kernel_workspace_bytes, ops::Device& device);

  ops::TensorView inputs, results;                 // i32: see StepLayout
  ops::TensorView tokens, indices, positions;      // i32 [max_rows], [max_rows], [max_rows, 3]
  ops::TensorView x;                               // activation [max_rows, hidden]
  ops::TensorView partial;                         // likewise, with tensor parallelism: what this rank adds to x
  // On the last stage.
  ops::TensorView hidden;                          // activation [max_rows, hidden]
  ops::TensorView logits;                          // f32 [max_logit_rows, vocab]
  ops::TensorView own_logits;                      // f32 [max_logit_rows, the rank's part of the vocabulary]; without tensor parallelism empty
  ops::TensorView own_candidates, candidates;      // i32 [max_logit_rows * candidate_words(kMaxCandidates)] of this rank, and of all; without tensor parallelism empty
  ops::TensorView exported_rows;                   // i32 [max_logit_rows]: rows whose logits go to the host
  ops::TensorView masks;                           // u32 as i32 [max_logit_rows, ceil(vocab / 32)]
  ops::SampleOutput sampled;                       // partly in `results`

  ops::TensorView workspace;                       // u8

  /// With MTP, on the last stage. The rows of two successive passes, and the hidden states that a further pass begins with.
  struct DraftPass {
    ops::TensorView tokens, indices, positions;    // as above
  };
  DraftPass draft_passes[2];
  ops::TensorView draft_embedding;                 // activation [max_rows, hidden]
  ops::TensorView draft_hidden;                    // activation [num_slots, hidden]
  ops::TensorView draft_ids, last_rows;            // i32 [num_slots]
  ops::TensorView drafts;                          // i32 [num_slots, k_max], in `results`

  // Attention, GDN and MLP take turns with one scratch; rows is the number of rows of the step.
  [[nodiscard]] ops::TensorView query(int64_t rows) const;
  [[nodiscard]] ops::TensorView gate(int64_t rows) const;
  [[nodiscard]] ops::Activation attention_out(int64_t rows) const;
  [[nodiscard]] ops::GdnInputs gdn_inputs(int64_t rows) const;
  [[nodiscard]] ops::Activation gdn_out(int64_t rows) const;
  [[nodiscard]] ops::Activation mlp(int64_t rows) const;
  /// i32 [rows, words] at the beginning of own_candidates.
  [[nodiscard]] ops::TensorView own_candidates_of(int64_t rows, int64_t words) const { return {own_candidates.buffer, own_candidates.offset_bytes, DType::kI32, {rows, words}}; }

  /// A table of `layout` in `inputs` or `results`: [entries] or [entries, width].
  static ops::TensorView table(const ops::TensorView& base, const StepLayout::Table& table, int64_t entries);

 private:
  Result<ops::TensorView> tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape);
  /// `elements` per row of the scratch, starting `offset` elements per row into it (for max_rows rows).
  [[nodiscard]] ops::TensorView slice(int64_t offset, const Shape& shape) const;

  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
  ops::TensorView scratch_;  // activation [max_rows * scratch_elements]
  int64_t max_rows_ = 0;
  int64_t num_q_heads_ = 0, head_dim_ = 0, channels_ = 0, num_v_heads_ = 0, value_width_ = 0, intermediate_ = 0;
};

/// Page-locked memory of one step in flight.
struct StepStaging {
  /// Small uploads of a step: slot parameters, block table entries, cursors. Larger ones take memory of their own.
  static constexpr size_t kUploadBytes = 256 << 10;
  static Result<StepStaging> allocate(const StepMemory& step, ops::Device& device);

  std::unique_ptr<ops::Buffer> inputs, results, logprobs, uploads;
  size_t used = 0;  // of uploads
};

}  // namespace quern::worker
