#pragma once

#include "backends/cuda/gdn_mix_args.h"

namespace quern::cuda {

/// A launch of the kernels in gdn_prompt.cu. Tiles are the chunks of all prompt runs, one run after the other, ceil(num_rows / 64) of each, of which some may turn out empty.
struct GdnPromptArgs {
  GdnArgs gdn;
  int32_t first_tile, num_tiles;  // which of the tiles
  // Workspace, by tile of the launch. Images are bf16 [64, 64], swizzled as in mma.cuh.
  unsigned char* rows;      // [num_tiles, 2 num_k_heads + num_v_heads, 2] images: the halves of q, k and v after the conv, not normalized
  float* factors;           // [num_tiles, 2 num_k_heads, 64]: what normalizes the rows of q and k, q also times d_k^-1/2
  unsigned char* matrices;  // [num_tiles, num_v_heads, 4] images: T and its remainder, P and its remainder
  float* scalars;           // [num_tiles, num_v_heads, 64, 4]: e^G f_k, e^G f_q, e^(G64 - G) f_k, G
};

inline constexpr int kGdnPromptDim = 128;  // d_k and d_v
inline constexpr int kGdnPromptColumns = 64;  // of a head, that a block of the scan has
inline constexpr int kGdnPromptImageBytes = static_cast<int>(kGrid) * kGdnPromptColumns * 2, kGdnPromptRowBytes = 2 * kGdnPromptImageBytes;
inline constexpr int kGdnPromptScalarBytes = static_cast<int>(kGrid) * 16;
/// Dynamic shared memory of a stage of the scan: the images of k, q, T and P, half of v, scalars.
inline constexpr int kGdnPromptStageBytes = 2 * kGdnPromptRowBytes + 5 * kGdnPromptImageBytes + kGdnPromptScalarBytes;

// On sm_90, gdn_prepare_sm90.cu and gdn_prompt_sm90.cu: rows are [num_tiles, 2 num_k_heads, 2] images, those of q and k; matrices [num_tiles, num_v_heads, 2]: T, P; no factors.
inline constexpr int kGdnMatrices90 = 2, kGdnPrepareHeads90 = 3;
inline constexpr int kGdnPrepareSharedBytes90 = 81856, kGdnScanSharedBytes90 = 192624;

}  // namespace quern::cuda
