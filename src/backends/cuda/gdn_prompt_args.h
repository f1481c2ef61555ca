#pragma once

#include "backends/cuda/gdn_mix_args.h"

namespace quern::cuda {

/// A launch of the kernels in gdn_prompt.cu. Tiles are the chunks of all prompt runs, one run after the other, ceil(num_rows / 64) of each, of which some may turn out empty.
struct GdnPromptArgs {
  GdnArgs gdn;
  int32_t first_tile, num_tiles;  // which of the tiles
  // Workspace, by tile of the launch. Images are bf16 [64, columns], swizzled as in mma.cuh.
  unsigned char* rows;      // [num_tiles, 2 num_k_heads + num_v_heads] images of 128 columns: q, k and v after the conv, not normalized
  float* factors;           // [num_tiles, 2 num_k_heads, 64]: what normalizes the rows of q and k, q also times d_k^-1/2
  unsigned char* matrices;  // [num_tiles, num_v_heads, 4] images of 64 columns: T and its remainder, P and its remainder
  float* scalars;           // [num_tiles, num_v_heads, 64, 4]: e^G f_k, e^G f_q, e^(G64 - G) f_k, G
};

inline constexpr int kGdnPromptDim = 128;  // d_k and d_v
inline constexpr int kGdnPromptRowImageBytes = static_cast<int>(kGrid) * kGdnPromptDim * 2, kGdnPromptMatrixBytes = static_cast<int>(kGrid * kGrid) * 2;
inline constexpr int kGdnPromptColumns = 64;  // of a head, that a block of the scan has
/// Dynamic shared memory of a stage of the scan: the images of k, q, T and P, half an image of v, scalars.
inline constexpr int kGdnPromptStageBytes = 2 * kGdnPromptRowImageBytes + 4 * kGdnPromptMatrixBytes + kGdnPromptRowImageBytes / 2 + static_cast<int>(kGrid) * 16;

}  // namespace quern::cuda
