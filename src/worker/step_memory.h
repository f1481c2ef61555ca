#pragma once

#include <memory>
#include <vector>

#include "ops/kernel_table.h"
#include "worker/plan.h"
#include "worker/sizes.h"

namespace quern::worker {

/// Where the rows of one step live on the device: activations, logits, tables, scratch. Made once, reused by every step.
class StepMemory {
 public:
  static Result<StepMemory> allocate(const ExecutionPlan& plan, const Sizes& sizes, size_t kernel_workspace_bytes, ops::Device& device);

  ops::TensorView tokens, indices, positions;      // i32 [max_rows], [max_rows], [max_rows, 3]
  ops::TensorView x, hidden;                       // activation [max_rows, hidden]
  ops::TensorView mtp_embedding, mtp_hidden;       // the same, with MTP only
  ops::TensorView logits;                          // f32 [max_logit_rows, vocab]
  ops::TensorView masks;                           // u32 as i32 [max_logit_rows, ceil(vocab / 32)]
  ops::TensorView workspace;                       // u8
  ops::SampleOutput sampled;

  // Attention, GDN and MLP take turns with one scratch; rows is the number of rows of the step.
  [[nodiscard]] ops::TensorView query(int64_t rows) const;
  [[nodiscard]] ops::TensorView gate(int64_t rows) const;
  [[nodiscard]] ops::Activation attention_out(int64_t rows) const;
  [[nodiscard]] ops::GdnInputs gdn_inputs(int64_t rows) const;
  [[nodiscard]] ops::Activation gdn_out(int64_t rows) const;
  [[nodiscard]] ops::Activation mlp(int64_t rows) const;

 private:
  Result<ops::TensorView> tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape);
  /// `elements` per row of the scratch, starting `offset` elements per row into it (for max_rows rows).
  [[nodiscard]] ops::TensorView slice(int64_t offset, const Shape& shape) const;

  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
  ops::TensorView scratch_;  // activation [max_rows * scratch_elements]
  int64_t max_rows_ = 0;
  int64_t num_q_heads_ = 0, head_dim_ = 0, channels_ = 0, num_v_heads_ = 0, value_width_ = 0, intermediate_ = 0;
};

}  // namespace quern::worker
