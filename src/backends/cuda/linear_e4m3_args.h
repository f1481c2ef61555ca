#pragma once

#include "backends/cuda/linear_mma_args.h"

// What the host and the device code of the linear layers of cuda.mma.e4m3 (linear_e4m3_sm89.cu) agree on.

namespace quern::cuda::mma {

/// Rows quantised in groups of 128 columns, as launches of more than eight rows multiply them.
struct QuantisedRows {
  uint8_t* codes;  // e4m3 [in / 64][padded][64]: 16 columns of a row are what a lane multiplies with two tiles
  float* scale;    // [in / 128][padded]
  int32_t padded;  // rows, a multiple of 128; what the rows hold that nobody asked for means nothing
};

struct E4M3LinearArgs {
  TiledLinearArgs linear;
  QuantisedRows rows;  // of up to eight rows: not read
};

struct QuantiseRowsArgs {
  const void* x;          // bf16 [., in_features]
  const int32_t* x_rows;  // as in LinearArgs
  int32_t num_rows, in_features;
  QuantisedRows rows;
};

inline constexpr int kBlockFeatures = 128, kBlockRows = 128;
inline constexpr int kStages = 3;  // of 128 columns, on their way
inline constexpr int kBlockSharedBytes = kStages * ((kBlockFeatures + kBlockRows) * kBlockColumns + kBlockRows * static_cast<int>(sizeof(float)));
static_assert(kBlockSharedBytes <= 99 << 10);  // what a block of sm_89 and sm_120 may have

}  // namespace quern::cuda::mma
