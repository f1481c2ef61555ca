#include "worker/step_memory.h"

namespace quern::worker {

StepLayout::StepLayout(const WorkerLimits& limits) {
  const int64_t num_runs = limits.num_slots, per_run = limits.k_max + 1;
  const auto place = [](int64_t& end, Table& table, int64_t capacity, int64_t width) {
    table = {end, capacity, width};
    end += round_up(capacity * width, 32);  // on whole cache lines
  };
  place(num_inputs, runs, num_runs, ops::kRunFields);
  place(num_inputs, run_positions, num_runs, 3);
  place(num_inputs, sample_runs, num_runs, ops::kSampleRunFields);
  place(num_inputs, draft_runs, num_runs, ops::kDraftRunFields);
  place(num_inputs, draft_table, num_runs, ops::kRunFields);
  place(num_inputs, draft_row_runs, num_runs, 1);
  place(num_inputs, logit_rows, num_runs * per_run, 1);
  place(num_inputs, row_runs, limits.max_rows, 1);
  place(num_inputs, given_tokens, limits.max_rows, 1);
  place(num_results, tokens, num_runs, per_run);
  place(num_results, num_tokens, num_runs, 1);
  place(num_results, non_finite, num_runs, 1);
  place(num_results, drafts, num_runs, limits.k_max);
}

ops::TensorView StepMemory::table(const ops::TensorView& base, const StepLayout::Table& table, int64_t entries) {
  CHECK(entries <= table.capacity);
  const Shape shape = table.width == 1 ? Shape{entries} : Shape{entries, table.width};
  return {base.buffer, base.offset_bytes + static_cast<size_t>(table.offset) * sizeof(int32_t), DType::kI32, shape};
}

Result<ops::TensorView> StepMemory::tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape) {
  ASSIGN_OR_RETURN(auto buffer, device.allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), purpose));
  buffers_.push_back(std::move(buffer));
  return ops::TensorView{buffers_.back().get(), 0, dtype, shape};
}

Result<StepMemory> StepMemory::allocate(const ExecutionPlan& plan, const RankPlan& rank, const Sizes& sizes, size_t kernel_workspace_bytes, ops::Device& device) {
  const model::ModelConfig& c = rank.config;
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
  const StepLayout layout(limits);
  const int64_t runs = limits.num_slots, per_run = limits.k_max + 1, width = 1 + ops::kMaxLogprobs;
  ASSIGN_OR_RETURN(m.inputs, m.tensor(device, "step inputs", DType::kI32, {layout.num_inputs}));
  ASSIGN_OR_RETURN(m.results, m.tensor(device, "step results", DType::kI32, {layout.num_results}));
  ASSIGN_OR_RETURN(m.tokens, m.tensor(device, "step tokens", DType::kI32, {rows}));
  ASSIGN_OR_RETURN(m.indices, m.tensor(device, "step indices", DType::kI32, {rows}));
  ASSIGN_OR_RETURN(m.positions, m.tensor(device, "step positions", DType::kI32, {rows, 3}));
  ASSIGN_OR_RETURN(m.x, m.tensor(device, "residual", plan.activation, {rows, c.hidden_size}));
  if (rank.shard.tp_size > 1) {
    ASSIGN_OR_RETURN(m.partial, m.tensor(device, "partial sums", plan.activation, {rows, c.hidden_size}));
  }
  ASSIGN_OR_RETURN(m.scratch_, m.tensor(device, "activations", plan.activation, {rows * sizes.scratch_elements}));
  ASSIGN_OR_RETURN(m.workspace, m.tensor(device, "kernel workspace", DType::kU8, {static_cast<int64_t>(std::max<size_t>(kernel_workspace_bytes, 64))}));
  if (!rank.shard.last_stage()) return m;
  ASSIGN_OR_RETURN(m.hidden, m.tensor(device, "final hidden", plan.activation, {rows, c.hidden_size}));
  if (plan.with_mtp) {
    for (DraftPass& pass : m.draft_passes) {
      ASSIGN_OR_RETURN(pass.tokens, m.tensor(device, "draft tokens", DType::kI32, {rows}));
      ASSIGN_OR_RETURN(pass.indices, m.tensor(device, "draft indices", DType::kI32, {rows}));
      ASSIGN_OR_RETURN(pass.positions, m.tensor(device, "draft positions", DType::kI32, {rows, 3}));
    }
    ASSIGN_OR_RETURN(m.draft_embedding, m.tensor(device, "draft embedding", plan.activation, {rows, c.hidden_size}));
    ASSIGN_OR_RETURN(m.draft_hidden, m.tensor(device, "draft hidden", plan.activation, {runs, c.hidden_size}));
    ASSIGN_OR_RETURN(m.draft_ids, m.tensor(device, "draft ids", DType::kI32, {runs}));
    ASSIGN_OR_RETURN(m.last_rows, m.tensor(device, "last draft rows", DType::kI32, {runs}));
    m.drafts = table(m.results, layout.drafts, runs);
  }
  if (rank.shard.tp_size > 1) {
    ASSIGN_OR_RETURN(m.own_logits, m.tensor(device, "logits", DType::kF32, {plan.max_logit_rows, rank.shard.vocab.size()}));
    const int64_t words = std::max<int64_t>(plan.max_logit_rows * ops::candidate_words(ops::kMaxCandidates), 64);
    ASSIGN_OR_RETURN(m.own_candidates, m.tensor(device, "candidates", DType::kI32, {words}));
    ASSIGN_OR_RETURN(m.candidates, m.tensor(device, "candidates", DType::kI32, {words * rank.shard.tp_size}));
  }
  ASSIGN_OR_RETURN(m.logits, m.tensor(device, "logits", DType::kF32, {plan.max_logit_rows, c.vocab_size}));
  ASSIGN_OR_RETURN(m.exported_rows, m.tensor(device, "exported rows", DType::kI32, {plan.max_logit_rows}));
  ASSIGN_OR_RETURN(m.masks, m.tensor(device, "grammar masks", DType::kI32, {plan.max_logit_rows, ceil_div(c.vocab_size, 32)}));
  m.sampled.tokens = table(m.results, layout.tokens, runs);
  m.sampled.tokens.shape = Shape{runs, per_run};
  m.sampled.num_tokens = table(m.results, layout.num_tokens, runs);
  m.sampled.non_finite = table(m.results, layout.non_finite, runs);
  ASSIGN_OR_RETURN(m.sampled.logprobs, m.tensor(device, "logprobs", DType::kF32, {runs, per_run, width}));
  ASSIGN_OR_RETURN(m.sampled.logprob_ids, m.tensor(device, "logprob ids", DType::kI32, {runs, per_run, width}));
  ASSIGN_OR_RETURN(m.sampled.chosen_rank, m.tensor(device, "chosen ranks", DType::kI32, {runs, per_run}));
  return m;
}

Result<StepStaging> StepStaging::allocate(const StepMemory& step, ops::Device& device) {
  const ops::SampleOutput& out = step.sampled;
  StepStaging staging;
  ASSIGN_OR_RETURN(staging.inputs, device.allocate_host(step.inputs.size_bytes(), "step inputs"));
  ASSIGN_OR_RETURN(staging.results, device.allocate_host(step.results.size_bytes(), "step results"));
  ASSIGN_OR_RETURN(staging.logprobs, device.allocate_host(2 * out.logprobs.size_bytes() + out.chosen_rank.size_bytes(), "log-probabilities"));
  ASSIGN_OR_RETURN(staging.uploads, device.allocate_host(kUploadBytes, "step uploads"));
  return staging;
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
