#pragma once

#include "backends/cuda/gdn_mix.h"
#include "backends/cuda/gdn_prompt_args.h"

namespace quern::cuda {

/// Prompt rows of a GDN layer on the matrix units, chunk by chunk: gdn_prompt.cu, on Hopper gdn_prepare_sm90.cu and gdn_prompt_sm90.cu.
class GdnPromptLauncher {
 public:
  static Result<GdnPromptLauncher> create(const ops::GdnMix::Problem& problem, Device& device);

  /// Whether these are the kernels for Hopper, whose bits are others.
  [[nodiscard]] bool hopper() const { return hopper_; }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const { return static_cast<size_t>(tiles_of_a_pass(max_rows)) * tile_bytes_; }
  /// Computes and keeps the prompt runs of `rows`; `args` are plain.arguments() of them.
  void launch(Stream& stream, const ops::Rows& rows, GdnArgs args, const GdnLauncher& plain, const ops::TensorView& workspace) const;

 private:
  GdnPromptLauncher(const ops::GdnMix::Problem& problem, bool hopper);
  /// Chunks that the workspace has room for; longer prompts, and many short ones, take several passes.
  [[nodiscard]] int64_t tiles_of_a_pass(int64_t max_rows) const;

  bool hopper_;
  int64_t num_k_heads_, num_v_heads_;
  unsigned largest_group_;                                                              // value heads that share a k head
  size_t row_bytes_, factor_bytes_, matrix_bytes_, scalar_bytes_, tile_bytes_;  // of a tile
  unsigned scan_shared_bytes_ = 0;
  Function<GdnPromptArgs> rows_, chunks_, scan_, norm_;  // of gdn_prompt.cu
  Function<GdnPromptArgs> prepare_90_, scan_90_;
};

}  // namespace quern::cuda
