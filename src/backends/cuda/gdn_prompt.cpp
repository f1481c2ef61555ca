#include "backends/cuda/gdn_prompt.h"

#include "backends/cuda/device_code.h"

namespace quern::cuda {

namespace {

constexpr unsigned kThreads = 128;                              // of gdn_prompt.cu
constexpr size_t kWorkspaceBytes = size_t{64} << 20;            // of a pass, at most
constexpr unsigned kParts = kGdnPromptDim / kGdnPromptColumns;  // blocks of a head in the scan

}  // namespace

GdnPromptLauncher::GdnPromptLauncher(const ops::GdnMix::Problem& problem, bool hopper)
    : hopper_(hopper), num_k_heads_(problem.num_k_heads), num_v_heads_(problem.num_v_heads), largest_group_(1) {
  for (int32_t head = 0; head < problem.num_k_heads; ++head)
    largest_group_ = std::max(largest_group_, static_cast<unsigned>(std::count(problem.k_head.begin(), problem.k_head.end(), head)));
  const auto k_heads = static_cast<size_t>(num_k_heads_), v_heads = static_cast<size_t>(num_v_heads_);
  row_bytes_ = (2 * k_heads + (hopper ? 0 : v_heads)) * kGdnPromptRowBytes;
  factor_bytes_ = hopper ? 0 : 2 * k_heads * kGrid * sizeof(float);
  matrix_bytes_ = v_heads * (hopper ? kGdnMatrices90 : 4) * kGdnPromptImageBytes;
  scalar_bytes_ = v_heads * kGrid * 4 * sizeof(float);
  tile_bytes_ = row_bytes_ + factor_bytes_ + matrix_bytes_ + scalar_bytes_;
}

Result<GdnPromptLauncher> GdnPromptLauncher::create(const ops::GdnMix::Problem& problem, Device& device) {
  GdnPromptLauncher launcher(problem, runs_code_for("90a", device.traits().architecture));
  if (launcher.hopper_) {
    ASSIGN_OR_RETURN(launcher.prepare_90_, device.function<GdnPromptArgs>("gdn_prepare_sm90", "gdn_prompt_prepare_sm90", kGdnPrepareSharedBytes90));
    ASSIGN_OR_RETURN(launcher.scan_90_, device.function<GdnPromptArgs>("gdn_prompt_sm90", "gdn_prompt_scan_sm90", kGdnScanSharedBytes90));
    return launcher;
  }
  const int stages = device.max_shared_bytes() >= 2 * kGdnPromptStageBytes ? 2 : 1;  // one on sm_86, sm_89 and sm_120
  const auto shared_bytes = stages * kGdnPromptStageBytes;
  launcher.scan_shared_bytes_ = static_cast<unsigned>(shared_bytes);
  ASSIGN_OR_RETURN(launcher.rows_, device.function<GdnPromptArgs>("gdn_prompt", "gdn_prompt_rows"));
  ASSIGN_OR_RETURN(launcher.chunks_, device.function<GdnPromptArgs>("gdn_prompt", "gdn_prompt_chunks"));
  ASSIGN_OR_RETURN(launcher.scan_, device.function<GdnPromptArgs>("gdn_prompt", stages == 2 ? "gdn_prompt_scan_2" : "gdn_prompt_scan_1", shared_bytes));
  ASSIGN_OR_RETURN(launcher.norm_, device.function<GdnPromptArgs>("gdn_prompt", "gdn_prompt_norm"));
  return launcher;
}

int64_t GdnPromptLauncher::tiles_of_a_pass(int64_t max_rows) const {
  const auto affordable = static_cast<int64_t>(kWorkspaceBytes / tile_bytes_);
  return std::clamp<int64_t>(max_rows / kGrid + 2, 1, std::max<int64_t>(affordable, 1));
}

void GdnPromptLauncher::launch(Stream& stream, const ops::Rows& rows, GdnArgs args, const GdnLauncher& plain, const ops::TensorView& workspace) const {
  args.kinds = kGdnPrompt;
  plain.launch_to_grid(stream, args);
  int32_t num_tiles = 0;
  for (const ops::RowRun& run : rows.runs)
    if (run.kind == ops::RowKind::kPrompt && run.slot >= 0) num_tiles += static_cast<int32_t>((run.num_rows + kGrid - 1) / kGrid);
  const auto pass = static_cast<int32_t>(workspace.size_bytes() / tile_bytes_);
  CHECK(pass > 0);
  const auto room = static_cast<size_t>(std::min(pass, std::max(num_tiles, 1)));
  GdnPromptArgs p{};
  p.gdn = args;
  p.rows = workspace.data<unsigned char>();
  p.matrices = p.rows + room * row_bytes_;
  p.scalars = reinterpret_cast<float*>(p.matrices + room * matrix_bytes_);
  p.factors = reinterpret_cast<float*>(p.matrices + room * (matrix_bytes_ + scalar_bytes_));
  const auto k_heads = static_cast<unsigned>(num_k_heads_), v_heads = static_cast<unsigned>(num_v_heads_), runs = static_cast<unsigned>(args.end_run - args.first_run);
  for (p.first_tile = 0; p.first_tile < num_tiles; p.first_tile += p.num_tiles) {
    p.num_tiles = std::min(pass, num_tiles - p.first_tile);
    const auto tiles = static_cast<unsigned>(p.num_tiles);
    if (hopper_) {
      stream.launch(prepare_90_, {.grid = {tiles, k_heads, plain::blocks_for(largest_group_, kGdnPrepareHeads90)}, .block = {256}, .shared_bytes = kGdnPrepareSharedBytes90}, p);
      stream.launch(scan_90_, {.grid = {kParts * v_heads, runs}, .block = {384}, .shared_bytes = kGdnScanSharedBytes90, .cluster = {kParts}}, p);
      continue;
    }
    stream.launch(rows_, {.grid = {tiles, 2 * k_heads + v_heads}, .block = {kThreads}}, p);
    stream.launch(chunks_, {.grid = {tiles, v_heads}, .block = {kThreads}}, p);
    stream.launch(scan_, {.grid = {kParts * v_heads, runs}, .block = {kThreads}, .shared_bytes = scan_shared_bytes_}, p);
    stream.launch(norm_, {.grid = {tiles, v_heads}, .block = {kThreads}}, p);
  }
  plain.keep_window(stream, args);
}

}  // namespace quern::cuda
