#pragma once

#include <cstdint>

#include "backends/cuda/linear_args.h"

// What the host and the device code of the linear layers of cuda.mma (linear_mma.cu) agree on.
//
// A weight is kept in tiles of 32 features by 32 of K, those of the same features along K. A lane of a warp finds in its 16-byte pieces what it multiplies: of features 2 g and 2 g + 1 of each
// half of 16, g = lane / 4, the eight columns from 8 (lane % 4) on. An e4m3 tile is [half][lane] pieces, each with 8 codes of both features, whose columns 1 and 2 of every four have changed
// places; a bf16 tile is [feature][half][lane] pieces. Missing features are zeros.

namespace quern::cuda::mma {

inline constexpr int kTileFeatures = 32, kTileColumns = 32;
inline constexpr int kSlices = 8;         // of K: sums of their own, one a warp, added in order
inline constexpr int kBlockColumns = 128; // of K: a scale block, of which slices have whole ones
inline constexpr int kThreads = 256;

/// Bytes of a tile.
constexpr int tile_bytes(bool e4m3) { return kTileFeatures * kTileColumns * (e4m3 ? 1 : 2); }

struct TiledWeight {
  int32_t out_features, in_features;
  Weight::Scales scales;
  const void* tiles;   // [ceil(out / 32)][in / 32] tiles
  const float* scale;  // as in ops::LinearSource, its slice beginning with a scale block
};

/// y = W x, then the epilogue; activations are bf16.
struct TiledLinearArgs {
  TiledWeight weight;
  Epilogue epilogue;
  int32_t num_rows;
  const void* x;          // bf16 [., in_features]
  const int32_t* x_rows;  // as in LinearArgs
  void* out;              // [num_rows, out_features]
};

struct TileWeightArgs {
  const void* source;  // [out, in], e4m3 or bf16
  int32_t out_features, in_features;
  int32_t is_e4m3;
  void* tiles;
};

}  // namespace quern::cuda::mma
