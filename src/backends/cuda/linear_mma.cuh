#pragma once

#include "backends/cuda/async.cuh"
#include "backends/cuda/linear_mma_args.h"
#include "backends/cuda/numeric.cuh"

// What the linear layers of cuda.mma and of cuda.mma.e4m3 share: the places of sums in a warp, how slices of K are added and what becomes of a sum. Device code only.

namespace quern::cuda::mma {

/// sum is this warp's of 32 features by 8 kColumns rows: [half of 16 features][8 rows].
template <int kColumns>
using Sums = float[2][kColumns][4];

template <int kColumns>
__device__ void clear(Sums<kColumns>& sums) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[h][c][i] = 0;
}
template <int kColumns>
__device__ void add(Sums<kColumns>& to, const Sums<kColumns>& sums, float factor) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[h][c][i] = fmaf(sums[h][c][i], factor, to[h][c][i]);
}

/// 16 bytes that no kernel writes while this one runs.
__device__ inline uint4 load_constant(const void* at) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at));
  return r;
}

__device__ inline float2 unpack(uint32_t pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}; }
__device__ inline float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/// Features `feature` and the next of a row; both exist or neither does.
__device__ inline void finish(const TiledLinearArgs& args, int row, int feature, float first, float second) {
  if (row >= args.num_rows || feature >= args.weight.out_features) return;
  if (args.weight.scales == Weight::Scales::kChannel) {
    first *= args.weight.scale[feature];
    second *= args.weight.scale[feature + 1];
  } else if (args.weight.scales == Weight::Scales::kTensor) {
    first *= args.weight.scale[0];
    second *= args.weight.scale[0];
  }
  const int64_t at = int64_t{row} * args.weight.out_features + feature;
  if (args.epilogue == Epilogue::kStoreF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = {first, second};
    return;
  }
  auto* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + at);
  first = rounded(first);
  second = rounded(second);
  if (args.epilogue == Epilogue::kAddResidual || args.epilogue == Epilogue::kMultiply) {
    const float2 before = unpack(*out);
    first = args.epilogue == Epilogue::kMultiply ? before.x * first : before.x + first;
    second = args.epilogue == Epilogue::kMultiply ? before.y * second : before.y + second;
  } else if (args.epilogue == Epilogue::kSilu) {
    first = silu(first);
    second = silu(second);
  }
  *out = bf16_pair(first, second);
}

/// Where slice `slice` begins among the scale blocks.
__device__ inline int slice_begin(int k_blocks, int slice) { return k_blocks * slice / kSlices; }

/// Adds the sums that a block's warps have of 32 features of 8 kColumns rows, a slice each, in order.
template <int kColumns>
__device__ void finish_slices(const TiledLinearArgs& args, int tile_row, int first_row, const Sums<kColumns>& sums) {
  __shared__ float shared[kSlices][kColumns * 8][kTileFeatures];
  const int slice = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int column = 0; column < 2; ++column)
        *reinterpret_cast<float2*>(&shared[slice][c * 8 + lane % 4 * 2 + column][half * 16 + lane / 4 * 2]) = {sums[half][c][column], sums[half][c][2 + column]};
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * 8 * kTileFeatures / 2; i += kThreads) {
    const int row = i / (kTileFeatures / 2), feature = i % (kTileFeatures / 2) * 2;
    float2 sum = *reinterpret_cast<const float2*>(&shared[0][row][feature]);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      const float2 more = *reinterpret_cast<const float2*>(&shared[s][row][feature]);
      sum.x += more.x;
      sum.y += more.y;
    }
    finish(args, first_row + row, tile_row * kTileFeatures + feature, sum.x, sum.y);
  }
}

}  // namespace quern::cuda::mma
