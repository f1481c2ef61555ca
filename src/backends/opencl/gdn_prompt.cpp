#include "backends/opencl/gdn_prompt.h"

#include <algorithm>

namespace quern::opencl {

namespace {

// Of gdn_prompt.cl.
constexpr size_t kTileItems = 64, kDim = 128;
constexpr size_t kImageBytes = 64 * kDim * 2, kMatricesBytes = 4 * 64 * 64 * 2, kScalarsBytes = 4 * 64 * 4, kFactorsBytes = 64 * 4;
constexpr size_t kWorkspaceBytes = size_t{64} << 20;

}  // namespace

GdnPromptLauncher::GdnPromptLauncher(const ops::GdnMix::Problem& problem)
    : num_k_heads_(static_cast<int32_t>(problem.num_k_heads)), num_v_heads_(static_cast<int32_t>(problem.num_v_heads)), k_max_(static_cast<int32_t>(problem.k_max)), eps_(problem.eps) {
  const auto k_heads = static_cast<size_t>(num_k_heads_), v_heads = static_cast<size_t>(num_v_heads_);
  tile_bytes_ = k_heads * (3 * kImageBytes + 2 * kFactorsBytes) + v_heads * (kImageBytes + kMatricesBytes + kScalarsBytes);
}

Result<GdnPromptLauncher> GdnPromptLauncher::create(const ops::GdnMix::Problem& problem, Device& device, std::string_view definitions) {
  GdnPromptLauncher launcher(problem);
  ASSIGN_OR_RETURN(launcher.rows_, device.function("gdn_prompt", "gdn_prompt_rows", definitions));
  ASSIGN_OR_RETURN(launcher.chunks_, device.function("gdn_prompt", "gdn_prompt_chunks", definitions));
  ASSIGN_OR_RETURN(launcher.scan_, device.function("gdn_prompt", "gdn_prompt_scan", definitions));
  ASSIGN_OR_RETURN(launcher.norm_, device.function("gdn_prompt", "gdn_prompt_norm", definitions));
  return launcher;
}

int64_t GdnPromptLauncher::tiles_of_a_pass(int64_t max_rows) const {
  const auto affordable = static_cast<int64_t>(kWorkspaceBytes / tile_bytes_);
  return std::clamp<int64_t>(tiles_of(max_rows), 1, std::max<int64_t>(affordable, 1));
}

void GdnPromptLauncher::launch(Stream& stream, const ops::Rows& rows, const ops::GdnInputs& in, const Weights& weights, const ops::GdnStateView& state, const ops::TensorView& out,
                               const ops::TensorView& workspace) const {
  int64_t num_tiles = 0;
  for (const ops::RowRun& run : rows.runs)
    if (takes(run)) num_tiles += tiles_of(run.num_rows);
  const auto pass = static_cast<int64_t>(workspace.size_bytes() / tile_bytes_);
  CHECK(pass > 0);
  for (const ops::TensorView* view : {&in.qkv, &in.z, &out, &workspace}) CHECK_MSG(place_of(*view).offset_bytes % 64 == 0, "block loads and stores begin at multiples of 64 bytes");
  const auto num_runs = static_cast<int32_t>(rows.runs.size());
  const auto v_heads = static_cast<size_t>(num_v_heads_), all_heads = 2 * static_cast<size_t>(num_k_heads_) + v_heads;
  const auto channels = static_cast<int32_t>(all_heads * kDim);
  for (int64_t first = 0; first < num_tiles; first += pass) {
    const int64_t n = std::min(pass, num_tiles - first);
    const auto tiles = static_cast<size_t>(n);
    const auto launch = [&](const Function& kernel, const LaunchShape& shape, const auto&... own) {
      stream.launch(kernel, shape, static_cast<int32_t>(first), static_cast<int32_t>(n), num_runs, num_k_heads_, num_v_heads_, k_max_, rows.run_table, rows.slots.cursor,
                    rows.slots.boundary, place_of(workspace), own...);
    };
    launch(rows_, {{tiles, all_heads, 1}, {kTileItems, 1, 1}}, channels, weights.taps, in.qkv, state.conv_window, state.ring_k, state.ring_u);
    launch(chunks_, {{tiles, v_heads, 1}, {kTileItems, 1, 1}}, weights.decays, weights.dt_bias, weights.k_heads, in.b, in.a, state.ring_g);
    launch(scan_, {{v_heads, rows.runs.size(), 1}, {kDim, 1, 1}}, weights.k_heads, out, state.state, state.ring_k, state.ring_u, state.ring_g);
    launch(norm_, {{tiles, v_heads, 1}, {kTileItems, 1, 1}}, eps_, weights.norm, in.z, out);
  }
}

}  // namespace quern::opencl
