// What surrounds the linear layers of Hopper: norm and quantisation of many rows, packing.

#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/quantise_sm90.cuh"
#include "backends/cuda/rows_sm90.h"

namespace quern::cuda::sm90 {

/// A block a row: norm (where there are factors), then e4m3 with a scale per 128 or bf16, in the order of the linear kernels.
extern "C" __global__ void __launch_bounds__(256) quantise_rows(const __grid_constant__ QuantiseArgs args) {
  __shared__ float sums[kMaxNormWidth / 128];
  launch_dependents();
  wait_for_predecessors();
  if (args.norm != nullptr) norm_row<256>(args, blockIdx.x, static_cast<int>(threadIdx.x), sums, [] { __syncthreads(); });
  else quantise_row<256>(args, blockIdx.x, 0, args.k_blocks);
}

/// The blocks of `first`, then those of `second`: rows with factors.
extern "C" __global__ void __launch_bounds__(256) norm_pair_of_rows(const __grid_constant__ QuantisePairArgs args) {
  __shared__ float sums[kMaxNormWidth / 128];
  launch_dependents();
  wait_for_predecessors();
  const int block = static_cast<int>(blockIdx.x), in_first = args.first.rows;
  const QuantiseArgs& rows = block < in_first ? args.first : args.second;
  norm_row<256>(rows, block < in_first ? block : block - in_first, static_cast<int>(threadIdx.x), sums, [] { __syncthreads(); });
}

/// Tiles from a weight as stored, a thread a 16-byte piece. Rows that the weight does not have become zero.
extern "C" __global__ void __launch_bounds__(256) pack_tiles(const __grid_constant__ PackArgs args) {
  const int64_t pieces = int64_t{args.tiles} * args.k_blocks * (kTileBytes / 16);
  for (int64_t piece = blockIdx.x * int64_t{256} + threadIdx.x; piece < pieces; piece += int64_t{256} * gridDim.x) {
    const int place = static_cast<int>(piece % (kTileBytes / 16)), p = place / 8, c = place % 8 ^ (p & 7);
    const int64_t tile_at = piece / (kTileBytes / 16), tile = tile_at / args.k_blocks, k = tile_at % args.k_blocks;
    const int in_group = p % 16;
    int64_t row;
    const void* from = args.source;
    if (args.second != nullptr) {
      row = tile * 64 + p / 16 * 8 + in_group % 8;
      if (in_group >= 8) from = args.second;
    } else {
      row = tile * kTileRows + p / 16 * 16 + in_group % 8 * 2 + in_group / 8;
    }
    const int64_t byte = k * kTileRowBytes + c * 16;
    uint4 value{};
    if (row < args.rows && byte < args.row_bytes) value = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(from) + row * args.row_bytes + byte));
    reinterpret_cast<uint4*>(args.packed)[piece] = value;
  }
}

extern "C" __global__ void __launch_bounds__(256) pack_scales(const __grid_constant__ PackScalesArgs args) {
  const int thread = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  const bool merged = args.second != nullptr;
  const int features = merged ? 64 : kTileRows;  // of one weight in a tile
  if (thread < args.tiles * args.k_blocks) {
    const int tile = thread / args.k_blocks, k = thread % args.k_blocks;
    for (int i = 0; i < 2; ++i) {
      const float* from = merged && i == 1 ? args.second : args.source;
      args.scale[thread * kTileScales + i] = args.per_row == 0 ? from[int64_t{tile * features / 128} * args.k_blocks + k] : 1.0f;
    }
  }
  if (args.per_row != 0 && thread < args.tiles * kTileRows) {
    const int tile = thread / kTileRows, p = thread % kTileRows, in_group = p % 16;
    const int row = merged ? tile * 64 + p / 16 * 8 + in_group % 8 : tile * kTileRows + p / 16 * 16 + in_group % 8 * 2 + in_group / 8;
    const float* from = merged && in_group >= 8 ? args.second : args.source;
    args.row_scale[thread] = row < args.rows ? from[args.per_row == 1 ? row : 0] : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(256) pack_norm(const __grid_constant__ PackNormArgs args) {
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (i >= args.count) return;
  args.factors[i] = 1.0f + (args.is_bf16 != 0 ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.weight)[i]) : static_cast<const float*>(args.weight)[i]);
}

}  // namespace quern::cuda::sm90
