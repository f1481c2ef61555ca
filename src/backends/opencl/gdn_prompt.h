#pragma once

#include "backends/opencl/stream.h"
#include "ops/gdn_mix.h"

namespace quern::opencl {

/// Committed prompt runs of a GDN layer on the matrix units, chunk by chunk (gdn_prompt.cl), for heads of 128 x 128 and bf16 activations. Columns of the window are kept by a launch that comes later.
class GdnPromptLauncher {
 public:
  static Result<GdnPromptLauncher> create(const ops::GdnMix::Problem& problem, Device& device, std::string_view definitions);

  /// Whether a run is one of them: is_chunked() of gdn.clh.
  static bool takes(const ops::RowRun& run) { return run.kind == ops::RowKind::kPrompt && run.committed && run.num_rows > 0 && run.slot >= 0; }

  /// Packed weights, all f32.
  struct Weights {
    Place taps, decays, dt_bias, norm, k_heads;
  };
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const { return static_cast<size_t>(tiles_of_a_pass(max_rows)) * tile_bytes_; }
  void launch(Stream& stream, const ops::Rows& rows, const ops::GdnInputs& in, const Weights& weights, const ops::GdnStateView& state, const ops::TensorView& out,
              const ops::TensorView& workspace) const;

 private:
  explicit GdnPromptLauncher(const ops::GdnMix::Problem& problem);
  /// Chunks of a run of that many rows, however many rows before it are in the ring: tiles_of() of gdn_prompt.cl.
  [[nodiscard]] int64_t tiles_of(int64_t num_rows) const { return (num_rows + 2 * ops::kGrid + k_max_ - 1) / ops::kGrid; }
  /// Chunks that the workspace has room for; longer prompts, and many short ones, take several passes.
  [[nodiscard]] int64_t tiles_of_a_pass(int64_t max_rows) const;

  int32_t num_k_heads_, num_v_heads_, k_max_;
  float eps_;
  size_t tile_bytes_;
  Function rows_, chunks_, scan_, norm_;
};

}  // namespace quern::opencl
