#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/selftest_ops.h"

// attention and gdn_mix: outputs depend on what the sequences left behind.

namespace quern::worker::selftest {
namespace {

/// Bounds in roundings to the activation dtype. Kernels that round nothing before their output are 4.5 and 7 of them away from plain; one key of a thousand
/// that is left out is 100.
constexpr int kAttentionRoundings = 12;
constexpr int kGdnRoundings = 24;

}  // namespace

Result<void> run(const ops::Attention::Problem& p, const ops::Attention::Kernel& kernel, Trial& trial) {
  CHECK_MSG(p.out == ops::ActivationLayout::kPlain, "the plan's activations are plain");
  // Both sequences end inside a block, past one and two splits. What lies behind their ends is not written: NaN.
  constexpr std::array<int32_t, kNumSlots> kEnds{1153, 0, 641};
  const auto ends_after = [&](const std::vector<ops::RowRun>& runs) {
    Positions positions{.cursor = kEnds, .boundary = {}};
    for (const ops::RowRun& run : runs) positions.cursor[static_cast<size_t>(run.slot)] -= run.num_rows;
    return positions;
  };
  ASSIGN_OR_RETURN(const Step tables, trial.step({}, {}));
  ASSIGN_OR_RETURN(const std::vector<float> block_table, trial.read(tables.rows.slots.block_tables));
  std::vector<int32_t> written(static_cast<size_t>(kNumSlots * kMaxBlocks), 0);  // keys of each block
  for (int32_t slot = 0; slot < kNumSlots; ++slot)
    for (int32_t block = 0; block < kMaxBlocks; ++block)
      written[static_cast<size_t>(block_table[static_cast<size_t>(slot * kMaxBlocks + block)])] =
          std::clamp<int32_t>(kEnds[static_cast<size_t>(slot)] - block * static_cast<int32_t>(ops::kGrid), 0, static_cast<int32_t>(ops::kGrid));
  const auto element = [&](int64_t i) {
    const int64_t row = i / p.head_dim, block = row / ops::kGrid / p.num_kv_heads;
    return row % ops::kGrid < written[static_cast<size_t>(block)] ? trial.uniform(-2, 2) : std::numeric_limits<float>::quiet_NaN();
  };
  const Shape cache{kNumSlots * kMaxBlocks, p.num_kv_heads, ops::kGrid, p.head_dim};
  ops::KvCacheView kv;
  ASSIGN_OR_RETURN(kv.k, trial.tensor(p.kv, cache, element));
  ASSIGN_OR_RETURN(kv.v, trial.tensor(p.kv, cache, element));
  if (p.kv == DType::kE4M3) {
    ASSIGN_OR_RETURN(kv.k_scale, trial.uniform(DType::kF32, {p.num_kv_heads}, 0.5f, 1.5f));
    ASSIGN_OR_RETURN(kv.v_scale, trial.uniform(DType::kF32, {p.num_kv_heads}, 0.5f, 1.5f));
  }
  const auto attend = [&](const std::vector<ops::RowRun>& runs, int32_t first_index, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(runs, ends_after(runs)));
    const int64_t n = step.rows.num_rows;
    ASSIGN_OR_RETURN(const ops::TensorView query, trial.uniform(p.activation, {n, p.num_q_heads, p.head_dim}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView gate, trial.uniform(p.activation, {n, p.num_q_heads, p.head_dim}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView out, trial.unwritten(p.activation, {n, p.num_q_heads * p.head_dim}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, query, gate, kv, first_index, {p.out, out, {}}, launch);
    return trial.keep(label, out, trial.bound(kAttentionRoundings, p.activation));
  };
  RETURN_IF_ERROR(trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) { return attend(two_runs(kind, n), 0, label); }));
  return attend(two_runs(ops::RowKind::kDecode, 3), 1, "3 decode rows from index 1 on");
}

namespace {

/// The recurrent state of one layer. Every row that a kernel may read holds values that it could have computed, all else NaN.
Result<ops::GdnStateView> gdn_state(const ops::GdnMix::Problem& p, ops::GdnStateLayout layout, const Positions& positions, Trial& trial) {
  const int64_t ring_rows = ops::kGrid + p.k_max + 1, window_columns = 3 + p.k_max + 1;
  const int64_t channels = 2 * p.num_k_heads * p.d_k + p.num_v_heads * p.d_v;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  // 1 + steps since the boundary below of the row in each place of the rings, 0: none.
  std::vector<int64_t> age(static_cast<size_t>(kNumSlots * ring_rows), 0);
  for (size_t slot = 0; slot < kNumSlots; ++slot)
    for (int64_t index = positions.boundary[slot]; index < positions.cursor[slot]; ++index)
      age[slot * static_cast<size_t>(ring_rows) + static_cast<size_t>(index % ring_rows)] = 1 + index % ops::kGrid;
  const auto filled = [&](int64_t row, float limit) { return age[static_cast<size_t>(row)] > 0 ? trial.uniform(-limit, limit) : kNaN; };
  const auto in_use = [&](int64_t slot) { return positions.cursor[static_cast<size_t>(slot)] > 0; };

  ops::GdnStateView g;
  const Shape shape{kNumSlots, p.num_v_heads, p.d_v, p.d_k};
  std::vector<float> state;
  for (int64_t i = 0; i < shape.num_elements(); ++i) state.push_back(in_use(i / (shape.num_elements() / kNumSlots)) ? trial.uniform(-0.3f, 0.3f) : kNaN);
  ops::to_layout(layout, state, p.d_v * p.d_k);
  ASSIGN_OR_RETURN(g.state, trial.upload(std::as_bytes(std::span(state)), DType::kF32, shape));
  const float unit = std::sqrt(3.0f / static_cast<float>(p.d_k));
  ASSIGN_OR_RETURN(g.ring_k, trial.tensor(p.ring, {kNumSlots, ring_rows, p.num_k_heads, p.d_k},
                                          [&](int64_t i) { return filled(i / (p.num_k_heads * p.d_k), unit); }));
  ASSIGN_OR_RETURN(g.ring_u, trial.tensor(p.ring, {kNumSlots, ring_rows, p.num_v_heads, p.d_v},
                                          [&](int64_t i) { return filled(i / (p.num_v_heads * p.d_v), 1); }));
  ASSIGN_OR_RETURN(g.ring_g, trial.tensor(DType::kF32, {kNumSlots, ring_rows, p.num_v_heads}, [&](int64_t i) {
    const int64_t steps = age[static_cast<size_t>(i / p.num_v_heads)], head = i % p.num_v_heads;
    return steps > 0 ? -0.01f * static_cast<float>(steps * (1 + head % 4)) : kNaN;
  }));
  ASSIGN_OR_RETURN(g.conv_window, trial.tensor(p.activation, {kNumSlots, window_columns, channels},
                                               [&](int64_t i) { return in_use(i / (window_columns * channels)) ? trial.uniform(-2, 2) : kNaN; }));
  ASSIGN_OR_RETURN(g.boundary_columns, trial.unwritten(p.activation, {kNumSlots, 3, channels}));
  return g;
}

}  // namespace

Result<void> run(const ops::GdnMix::Problem& p, const ops::GdnMix::Kernel& kernel, Trial& trial) {
  CHECK_MSG(p.out == ops::ActivationLayout::kPlain, "the plan's activations are plain");
  const int64_t channels = 2 * p.num_k_heads * p.d_k + p.num_v_heads * p.d_v;
  ops::GdnMix::Weights weights;
  ASSIGN_OR_RETURN(weights.conv1d, trial.uniform(p.activation, {channels, 4}, -0.5f, 0.5f));
  ASSIGN_OR_RETURN(weights.a_log, trial.uniform(p.activation, {p.num_v_heads}, -6, -2));
  ASSIGN_OR_RETURN(weights.dt_bias, trial.uniform(p.activation, {p.num_v_heads}, -1, 1));
  ASSIGN_OR_RETURN(weights.norm, trial.uniform(p.activation, {p.d_v}, 0.5f, 1.5f));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) { kernel.pack(weights, buffer, trial.stream()); }));

  // Slot 2 begins with a fold that is due; the sequences go on from step to step and cross boundaries inside a step and at its end.
  Positions positions{.cursor = {1147, 0, 576 + static_cast<int32_t>(std::min<int64_t>(p.k_max, 3))}, .boundary = {1088, 0, 512}};
  ASSIGN_OR_RETURN(const ops::GdnStateView state, gdn_state(p, kernel.state_layout(), positions, trial));
  const double bound = trial.bound(kGdnRoundings, p.activation);
  const auto mix = [&](const std::vector<ops::RowRun>& runs, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(runs, positions));
    const int64_t n = step.rows.num_rows;
    ops::GdnInputs in;
    ASSIGN_OR_RETURN(in.qkv, trial.uniform(p.activation, {n, channels}, -2, 2));
    ASSIGN_OR_RETURN(in.z, trial.uniform(p.activation, {n, p.num_v_heads * p.d_v}, -2, 2));
    ASSIGN_OR_RETURN(in.b, trial.uniform(p.activation, {n, p.num_v_heads}, -2, 2));
    ASSIGN_OR_RETURN(in.a, trial.uniform(p.activation, {n, p.num_v_heads}, -1, 1));
    ASSIGN_OR_RETURN(const ops::TensorView out, trial.unwritten(p.activation, {n, p.num_v_heads * p.d_v}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(step.rows, in, *packed, state, {p.out, out, {}}, launch);
    constexpr auto kGrid = static_cast<int32_t>(ops::kGrid);
    for (const ops::RowRun& run : runs) {  // as `sample` does; all drafts are accepted
      int32_t& cursor = positions.cursor[static_cast<size_t>(run.slot)];
      positions.boundary[static_cast<size_t>(run.slot)] = (run.committed ? cursor + run.num_rows : cursor) / kGrid * kGrid;
      cursor += run.num_rows;
    }
    RETURN_IF_ERROR(trial.keep(label, out, bound));
    ASSIGN_OR_RETURN(std::vector<float> s, trial.read(state.state));
    ops::from_layout(kernel.state_layout(), s, p.d_v * p.d_k);
    trial.keep({"state after " + label, std::move(s), p.d_k, bound});
    return trial.keep("boundary columns after " + label, state.boundary_columns, 0);
  };
  const auto one_run = [](ops::RowKind kind, int32_t n, bool committed) {
    return std::vector<ops::RowRun>{{.slot = 2, .num_rows = n, .kind = kind, .committed = committed}};
  };
  RETURN_IF_ERROR(trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) { return mix(two_runs(kind, n), label); }));
  // A verify across a boundary, and the step that finds its fold due.
  const auto to_boundary = static_cast<int32_t>(ops::kGrid) - 1 - positions.cursor[2] % static_cast<int32_t>(ops::kGrid);
  if (to_boundary > 0) RETURN_IF_ERROR(mix(one_run(ops::RowKind::kDecode, to_boundary, true), "decode rows up to a boundary"));
  RETURN_IF_ERROR(mix(one_run(ops::RowKind::kDecode, static_cast<int32_t>(p.k_max) + 1, false), "a verify across a boundary"));
  RETURN_IF_ERROR(mix(one_run(ops::RowKind::kDecode, 1, true), "a row after that verify"));
  // Whole chunks of a prompt: from inside a chunk to the end of the next; from a boundary over two more and into a third; what that leaves for decode rows.
  constexpr auto kChunk = static_cast<int32_t>(ops::kGrid);
  RETURN_IF_ERROR(mix(one_run(ops::RowKind::kPrompt, 2 * kChunk - positions.cursor[2] % kChunk, true), "prompt rows up to a boundary"));
  RETURN_IF_ERROR(mix(one_run(ops::RowKind::kPrompt, 2 * kChunk + 9, true), "prompt rows of two chunks and a part"));
  return mix(one_run(ops::RowKind::kDecode, 1, true), "a row after that prompt");
}

}  // namespace quern::worker::selftest
