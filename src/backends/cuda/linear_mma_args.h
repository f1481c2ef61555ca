#pragma once

#include <cstdint>

#include "backends/cuda/linear_args.h"

// What the host and the device code of the linear layers of cuda.mma (linear_mma.cu) and cuda.mma.e4m3 (linear_e4m3_sm89.cu) agree on.
//
// A weight is kept in tiles of 32 features by 32 of K, those of the same features along K. A lane of a warp finds in its 16-byte pieces what it multiplies: of features 2 g and 2 g + 1 of each
// half of 16, g = lane / 4, the eight columns from 8 (lane % 4) on. An e4m3 tile is [half][lane] pieces, each with 8 codes of both features, whose columns 1 and 2 of every four have changed
// places; a bf16 tile is [feature][half][lane] pieces. Missing features are zeros. Where e4m3 is multiplied as it is, two tiles share their 64 columns: a lane has eight of its 16 in a row in
// either tile, 8 (2 (lane % 4) + tile % 2) on, in a piece four of the first feature, four of the second, the next four of the first, of the second.

namespace quern::cuda::mma {

inline constexpr int kTileFeatures = 32, kTileColumns = 32;
inline constexpr int kSlices = 8;         // of K: sums of their own, one a warp, added in order
inline constexpr int kBlockColumns = 128; // of K: a scale block, of which slices have whole ones
inline constexpr int kThreads = 256;

/// Bytes of a tile.
constexpr int tile_bytes(bool e4m3) { return kTileFeatures * kTileColumns * (e4m3 ? 1 : 2); }

/// What weights are multiplied as, which decides the order within a tile.
enum class Tiles : uint8_t { kWidened, kE4M3, kBF16 };

struct TiledWeight {
  int32_t out_features, in_features;
  Weight::Scales scales;
  const void* tiles;   // [ceil(out / 32)][in / 32] tiles
  const float* scale;  // kBlock: [ceil(out / 32)][in / 128], else as in ops::LinearSource
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
  Tiles order;
  void* tiles;
};

/// Block scales of every 32 features.
struct TileScalesArgs {
  const float* source;           // as in ops::LinearSource, [., k_blocks]
  int32_t row_offset;            // of the slice inside its first scale block, a multiple of 32
  int32_t tile_rows, k_blocks;
  float* scale;                  // [tile_rows][k_blocks]
};

}  // namespace quern::cuda::mma
