#include "worker/step_memory.h"

namespace quern::worker {

Result<ops::TensorView> StepMemory::tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape) {
  ASSIGN_OR_RETURN(auto buffer, device.allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), purpose));
  buffers_.push_back(std::move(buffer));
  return ops::TensorView{buffers_.back().get(), 0, dtype, shape};
}

Result<StepMemory> StepMemory::allocate(const ExecutionPlan& plan, const Sizes& sizes, size_t kernel_workspace_bytes, ops::Device& device) {
  const model::ModelConfig& c = plan.config;
  const WorkerLimits& limits = plan.limits;
  const int64_t rows = limits.max_rows;
  StepMemory m;
  m.max_rows_ = rows;
  m.num_q_heads_ = c.num_attention_heads;
  m.head_dim_ = c.head_dim;
  m.channels_ = sizes.channels;
  m.num_v_heads_ = c.linear_num_value_heads;
  m.value_width_ = c.linear_num_value_heads * c.linear_value_head_dim;
  m.intermediate_ = c.intermediate_size;
  ASSIGN_OR_RETURN(m.tokens, m.tensor(device, "step tokens", DType::kI32, {rows}));
  ASSIGN_OR_RETURN(m.indices, m.tensor(device, "step indices", DType::kI32, {rows}));
  ASSIGN_OR_RETURN(m.positions, m.tensor(device, "step positions", DType::kI32, {rows, 3}));
  ASSIGN_OR_RETURN(m.x, m.tensor(device, "residual", plan.activation, {rows, c.hidden_size}));
  ASSIGN_OR_RETURN(m.hidden, m.tensor(device, "final hidden", plan.activation, {rows, c.hidden_size}));
  if (plan.with_mtp) {
    ASSIGN_OR_RETURN(m.mtp_embedding, m.tensor(device, "MTP embedding", plan.activation, {rows, c.hidden_size}));
    ASSIGN_OR_RETURN(m.mtp_hidden, m.tensor(device, "MTP hidden", plan.activation, {rows, c.hidden_size}));
  }
  ASSIGN_OR_RETURN(m.scratch_, m.tensor(device, "activations", plan.activation, {rows * sizes.scratch_elements}));
  ASSIGN_OR_RETURN(m.logits, m.tensor(device, "logits", DType::kF32, {limits.max_logit_rows, c.vocab_size}));
  ASSIGN_OR_RETURN(m.masks, m.tensor(device, "grammar masks", DType::kI32, {limits.max_logit_rows, ceil_div(c.vocab_size, 32)}));
  ASSIGN_OR_RETURN(m.workspace, m.tensor(device, "kernel workspace", DType::kU8, {static_cast<int64_t>(std::max<size_t>(kernel_workspace_bytes, 64))}));
  const int64_t runs = limits.num_slots, per_run = limits.k_max + 1, width = 1 + ops::kMaxLogprobs;
  ASSIGN_OR_RETURN(m.sampled.tokens, m.tensor(device, "sampled tokens", DType::kI32, {runs, per_run}));
  ASSIGN_OR_RETURN(m.sampled.num_tokens, m.tensor(device, "sampled counts", DType::kI32, {runs}));
  ASSIGN_OR_RETURN(m.sampled.non_finite, m.tensor(device, "non-finite flags", DType::kI32, {runs}));
  ASSIGN_OR_RETURN(m.sampled.logprobs, m.tensor(device, "logprobs", DType::kF32, {runs, per_run, width}));
  ASSIGN_OR_RETURN(m.sampled.logprob_ids, m.tensor(device, "logprob ids", DType::kI32, {runs, per_run, width}));
  ASSIGN_OR_RETURN(m.sampled.chosen_rank, m.tensor(device, "chosen ranks", DType::kI32, {runs, per_run}));
  return m;
}

ops::TensorView StepMemory::slice(int64_t offset, const Shape& shape) const {
  return {scratch_.buffer, static_cast<size_t>(offset * max_rows_) * dtype_size(scratch_.dtype), scratch_.dtype, shape};
}

ops::TensorView StepMemory::query(int64_t rows) const { return slice(0, {rows, num_q_heads_, head_dim_}); }
ops::TensorView StepMemory::gate(int64_t rows) const { return slice(num_q_heads_ * head_dim_, {rows, num_q_heads_, head_dim_}); }
ops::Activation StepMemory::attention_out(int64_t rows) const {
  return {ops::ActivationLayout::kPlain, slice(2 * num_q_heads_ * head_dim_, {rows, num_q_heads_ * head_dim_}), {}};
}
ops::GdnInputs StepMemory::gdn_inputs(int64_t rows) const {
  const int64_t heads = round_up(num_v_heads_, 16);
  const int64_t z = channels_ + value_width_, b = z + value_width_;
  return {slice(0, {rows, channels_}), slice(z, {rows, value_width_}), slice(b, {rows, num_v_heads_}), slice(b + heads, {rows, num_v_heads_})};
}
ops::Activation StepMemory::gdn_out(int64_t rows) const { return {ops::ActivationLayout::kPlain, slice(channels_, {rows, value_width_}), {}}; }
ops::Activation StepMemory::mlp(int64_t rows) const { return {ops::ActivationLayout::kPlain, slice(0, {rows, intermediate_}), {}}; }

}  // namespace quern::worker
