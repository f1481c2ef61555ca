#include <algorithm>

#include "worker/selftest_ops.h"

// The ops around linear layers: outputs depend on a row's activations alone, not on its sequence. attn_in, which also writes the KV cache, is among them.

namespace quern::worker::selftest {
namespace {

/// Where the sequences stand when it does not matter.
constexpr Positions kAnywhere{.cursor = {1150, 0, 579}, .boundary = {1088, 0, 576}};

/// The bound in roundings to the activation dtype. An mlp_in that rounds nothing before its output is 13 of them away from plain in the worst row, where the
/// products of gate and up make a few values count; an output that is 1 % too large is 36.
constexpr int kRoundings = 24;
/// The same for mlp_in's quantised activations, which meet gate and up: 4.0 in the worst of some hundred simulated rows.
constexpr int kMlpQuantizations = 5;

Result<ops::Activation> activations(Trial& trial, ops::ActivationLayout layout, DType activation, int64_t rows, int64_t features, float limit) {
  CHECK_MSG(layout == ops::ActivationLayout::kPlain, "the plan's activations are plain");
  ops::Activation a;
  if (limit > 0) {
    ASSIGN_OR_RETURN(a.data, trial.uniform(activation, {rows, features}, -limit, limit));
  } else {
    ASSIGN_OR_RETURN(a.data, trial.unwritten(activation, {rows, features}));
  }
  return a;
}

}  // namespace

Result<void> run(const ops::AttnIn::Problem& p, const ops::AttnIn::Kernel& kernel, Trial& trial) {
  ops::AttnIn::Weights weights;
  ASSIGN_OR_RETURN(weights.norm, trial.norm(p.activation, p.hidden));
  ASSIGN_OR_RETURN(weights.q, trial.linear(p.q));
  ASSIGN_OR_RETURN(weights.k, trial.linear(p.k));
  ASSIGN_OR_RETURN(weights.v, trial.linear(p.v));
  ASSIGN_OR_RETURN(weights.q_norm, trial.norm(p.activation, p.head_dim));
  ASSIGN_OR_RETURN(weights.k_norm, trial.norm(p.activation, p.head_dim));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weights, buffer, trial.stream()); }));

  // The sequences go on from batch to batch, so that each writes keys of its own.
  Positions positions{.cursor = {1147, 0, 520}, .boundary = {}};
  ops::KvCacheView kv;
  const Shape cache{kNumSlots * kMaxBlocks, p.num_kv_heads, ops::kGrid, p.head_dim};
  ASSIGN_OR_RETURN(kv.k, trial.unwritten(p.kv, cache));
  ASSIGN_OR_RETURN(kv.v, trial.unwritten(p.kv, cache));
  if (p.kv == DType::kE4M3) {
    ASSIGN_OR_RETURN(kv.k_scale, trial.uniform(DType::kF32, {p.num_kv_heads}, 0.01f, 0.1f));
    ASSIGN_OR_RETURN(kv.v_scale, trial.uniform(DType::kF32, {p.num_kv_heads}, 0.01f, 0.1f));
  }
  const double bound = trial.bound(kRoundings, p.activation, {p.q.scheme, p.k.scheme, p.v.scheme});
  const auto project = [&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), positions));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView query, trial.unwritten(p.activation, {n, p.num_q_heads, p.head_dim}));
    ASSIGN_OR_RETURN(const ops::TensorView gate, trial.unwritten(p.activation, {n, p.num_q_heads, p.head_dim}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, x, *packed, query, gate, kv, launch);
    RETURN_IF_ERROR(trial.keep("query of " + label, query, bound));
    RETURN_IF_ERROR(trial.keep("gate of " + label, gate, bound));
    for (const ops::RowRun& run : step.runs) positions.cursor[static_cast<size_t>(run.slot)] += run.num_rows;
    return {};
  };
  RETURN_IF_ERROR(trial.for_each_batch(project));
  // Keys and values that differ are rounded apart by both kernels. On an H200 quantised activations and an e4m3 cache gave 4.3 such errors in the worst row.
  const double kv_bound = p.kv == DType::kE4M3 ? trial.bound(kRoundings, p.activation, {p.q.scheme, p.k.scheme, p.v.scheme}, 3) + 2 * rounding_error(DType::kE4M3) : bound;
  RETURN_IF_ERROR(trial.keep("keys", kv.k, kv_bound));
  return trial.keep("values", kv.v, kv_bound);
}

Result<void> run(const ops::GdnIn::Problem& p, const ops::GdnIn::Kernel& kernel, Trial& trial) {
  ops::GdnIn::Weights weights;
  ASSIGN_OR_RETURN(weights.norm, trial.norm(p.activation, p.hidden));
  ASSIGN_OR_RETURN(weights.qkv, trial.linear(p.qkv));
  ASSIGN_OR_RETURN(weights.z, trial.linear(p.z));
  ASSIGN_OR_RETURN(weights.b, trial.linear(p.b));
  ASSIGN_OR_RETURN(weights.a, trial.linear(p.a));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weights, buffer, trial.stream()); }));
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), kAnywhere));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
    ops::GdnInputs out;
    ASSIGN_OR_RETURN(out.qkv, trial.unwritten(p.activation, {n, p.qkv.out_features}));
    ASSIGN_OR_RETURN(out.z, trial.unwritten(p.activation, {n, p.z.out_features}));
    ASSIGN_OR_RETURN(out.b, trial.unwritten(p.activation, {n, p.b.out_features}));
    ASSIGN_OR_RETURN(out.a, trial.unwritten(p.activation, {n, p.a.out_features}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, x, *packed, out, launch);
    RETURN_IF_ERROR(trial.keep("qkv of " + label, out.qkv, trial.bound(kRoundings, p.activation, {p.qkv.scheme})));
    RETURN_IF_ERROR(trial.keep("z of " + label, out.z, trial.bound(kRoundings, p.activation, {p.z.scheme})));
    RETURN_IF_ERROR(trial.keep("b of " + label, out.b, trial.bound(kRoundings, p.activation, {p.b.scheme})));
    return trial.keep("a of " + label, out.a, trial.bound(kRoundings, p.activation, {p.a.scheme}));
  });
}

Result<void> run(const ops::LinearResidual::Problem& p, const ops::LinearResidual::Kernel& kernel, Trial& trial) {
  ASSIGN_OR_RETURN(const ops::LinearSource weight, trial.linear(p.linear));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weight, buffer, trial.stream()); }));
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), kAnywhere));
    ASSIGN_OR_RETURN(const ops::Activation in, activations(trial, p.in, p.activation, n, p.linear.in_features, 2));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.linear.out_features}, -1, 1));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, in, *packed, x, launch);
    return trial.keep(label, x, trial.bound(kRoundings, p.activation, {p.linear.scheme}));
  });
}

Result<void> run(const ops::MlpIn::Problem& p, const ops::MlpIn::Kernel& kernel, Trial& trial) {
  ops::MlpIn::Weights weights;
  ASSIGN_OR_RETURN(weights.norm, trial.norm(p.activation, p.hidden));
  ASSIGN_OR_RETURN(weights.gate, trial.linear(p.gate));
  ASSIGN_OR_RETURN(weights.up, trial.linear(p.up));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weights, buffer, trial.stream()); }));
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), kAnywhere));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::Activation out, activations(trial, p.out, p.activation, n, p.intermediate, 0));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, x, *packed, out, launch);
    return trial.keep(label, out.data, trial.bound(kRoundings, p.activation, {p.gate.scheme, p.up.scheme}, kMlpQuantizations));
  });
}

Result<void> run(const ops::MtpIn::Problem& p, const ops::MtpIn::Kernel& kernel, Trial& trial) {
  ops::MtpIn::Weights weights;
  ASSIGN_OR_RETURN(weights.norm_embedding, trial.norm(p.activation, p.hidden));
  ASSIGN_OR_RETURN(weights.norm_hidden, trial.norm(p.activation, p.hidden));
  ASSIGN_OR_RETURN(weights.fc, trial.linear(p.fc));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weights, buffer, trial.stream()); }));
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), kAnywhere));
    ASSIGN_OR_RETURN(const ops::TensorView embedding, trial.uniform(p.activation, {n, p.hidden}, -0.1f, 0.1f));
    ASSIGN_OR_RETURN(const ops::TensorView hidden, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.unwritten(p.activation, {n, p.hidden}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, embedding, hidden, *packed, x, launch);
    return trial.keep(label, x, trial.bound(kRoundings, p.activation, {p.fc.scheme}));
  });
}

Result<void> run(const ops::Head::Problem& p, const ops::Head::Kernel& kernel, Trial& trial) {
  ASSIGN_OR_RETURN(const ops::TensorView norm, trial.norm(DType::kF32, p.hidden));
  ASSIGN_OR_RETURN(const ops::LinearSource lm_head, trial.linear(p.lm_head));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(lm_head, buffer, trial.stream()); }));
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    std::vector<int32_t> logit_rows{n - 1};
    if (n > 1) logit_rows = {0, n / 2, n - 1};
    ASSIGN_OR_RETURN(const ops::TensorView named, trial.ints({static_cast<int64_t>(logit_rows.size())}, logit_rows));
    ASSIGN_OR_RETURN(const Step step, trial.step(two_runs(kind, n), kAnywhere));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView hidden, trial.unwritten(p.activation, {n, p.hidden}));
    ASSIGN_OR_RETURN(const ops::TensorView logits, trial.unwritten(DType::kF32, {static_cast<int64_t>(logit_rows.size()), p.vocab_size}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, x, norm, named, *packed, hidden, logits, launch);
    RETURN_IF_ERROR(trial.keep("hidden of " + label, hidden, trial.bound(kRoundings, p.activation)));
    return trial.keep("logits of " + label, logits, trial.bound(kRoundings, p.activation, {p.lm_head.scheme}));
  });
}

}  // namespace quern::worker::selftest
