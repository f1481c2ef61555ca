#pragma once

// Prompt rows of the linear layers of Hopper (run_prompt). Weights stream through the same ring of tiles as for decode rows (linear_sm90.cuh); a block takes whole
// output tiles, one after the other: no sum is ever split. Here the rows are A and the weights B, so that a thread has two rows and needs but four scales a tile.

#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

// ---- which tiles a block multiplies ----

/// The output tiles of one block for prompt rows, or of a pair of blocks, which take the two halves of 2 kColumns rows. Blocks that run together share weights and rows in the L2 cache:
/// 16 tile rows beside each other.
template <int kColumns, bool kPair>
struct PromptWalk {
  static constexpr int kBand = 16, kBlocks = kPair ? 2 : 1;
  const PromptArgs& args;
  int row_tiles, item;
  int tile = 0, k = 0, first_row = 0;
  int64_t left = 0;

  __device__ explicit PromptWalk(const PromptArgs& a)
      : args(a), row_tiles((a.x_rows + kBlocks * kColumns - 1) / (kBlocks * kColumns)), item(static_cast<int>(blockIdx.x) / kBlocks) {
    const int items = a.linear.tiles * row_tiles, grid = static_cast<int>(gridDim.x) / kBlocks;
    if (item < items) left = int64_t{(items - item + grid - 1) / grid} * a.linear.k_blocks;
    place();
  }
  __device__ void place() {
    const int per_band = kBand * row_tiles, band = item / per_band, height = min(kBand, args.linear.tiles - band * kBand), inside = item % per_band;
    tile = band * kBand + inside % height;
    first_row = (inside / height * kBlocks + static_cast<int>(blockIdx.x) % kBlocks) * kColumns;
  }
  __device__ void next_tile() {
    k = 0;
    item += static_cast<int>(gridDim.x) / kBlocks;
    place();
  }
};

// ---- what becomes of a finished tile ----

__device__ __forceinline__ uint2 bf16_four(float a, float b, float c, float d) { return {bf16_pair(a, b), bf16_pair(c, d)}; }

/// Words [lane of a quad][4] to [4][lane of a quad].
__device__ __forceinline__ void transpose_in_quad(uint32_t (&w)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = got;
  }
}

/// acc of 64 rows from `first_row` on by the 128 packed rows of a tile: acc[8 t + 4 h + 2 r + i] is row g + 8 r by packed row 16 t + 8 h + 2 q + i. kScaled: there is a scale a packed row.
template <bool kScaled>
__device__ __forceinline__ void store_prompt(const LinearLayer& linear, const float (&acc)[64], int tile, int first_row, int rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const OutputSegment& segment = segment_of(linear, tile);
  const int local = tile - segment.first_tile, row = first_row + ((threadIdx.x >> 5) & 3) * 16 + g;
  const auto scaled = [&](int t, int h, int r, int i) {
    const float x = acc[8 * t + 4 * h + 2 * r + i];
    if constexpr (kScaled) return x * __ldg(linear.row_scale + int64_t{tile} * kTileRows + t * 16 + h * 8 + q * 2 + i);
    else return x;
  };
  if (linear.epilogue == Epilogue::kSiluUp) {
    auto* out = static_cast<__nv_bfloat16*>(segment.out) + local * 64;
    const bool whole = segment.features >= (local + 1) * 64 && segment.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(segment.out) & 15) == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t word[2][4];  // of features 8 t + 2 q and the next
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float gate = __bfloat162float(__float2bfloat16_rn(scaled(t, 0, r, i))), up = __bfloat162float(__float2bfloat16_rn(scaled(t, 1, r, i)));
          y[i] = __bfloat162float(__float2bfloat16_rn(silu(gate))) * up;
        }
        word[t / 4][t % 4] = bf16_pair(y[0], y[1]);
      }
      auto* at = out + (row + 8 * r) * segment.stride;
      if (whole) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          transpose_in_quad(word[i]);
          if (row + 8 * r < rows) *reinterpret_cast<uint4*>(at + i * 32 + q * 8) = make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]);
        }
      } else if (row + 8 * r < rows) {
#pragma unroll
        for (int t = 0; t < 8; ++t)
          if (local * 64 + t * 8 + q * 2 < segment.features) *reinterpret_cast<uint32_t*>(at + t * 8 + q * 2) = word[t / 4][t % 4];
      }
    }
    return;
  }
  auto* out = static_cast<__nv_bfloat16*>(segment.out) + local * kTileRows;
  const bool whole = segment.features >= (local + 1) * kTileRows && segment.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(segment.out) & 15) == 0;
  const bool adds = linear.epilogue == Epilogue::kResidual;
  const auto four = [&](int t, int r) { return bf16_four(scaled(t, 0, r, 0), scaled(t, 1, r, 0), scaled(t, 0, r, 1), scaled(t, 1, r, 1)); };  // features 16 t + 4 q and the next three
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool there = row + 8 * r < rows;
    auto* at = out + (row + 8 * r) * segment.stride;
    if (whole) {
      // Of two neighbouring t the lanes of a quad have 64 bytes: an even lane takes its own and its neighbour's of the first, an odd one those of the second.
      const bool odd = (q & 1) != 0;
      at += (odd ? 16 : 0) + (q >> 1) * 8;
      uint4 before[4];
      if (adds && there)
#pragma unroll
        for (int t = 0; t < 8; t += 2) before[t / 2] = __ldcg(reinterpret_cast<const uint4*>(at + t * 16));
#pragma unroll
      for (int t = 0; t < 8; t += 2) {
        const uint2 first = four(t, r), second = four(t + 1, r), given = odd ? first : second, kept = odd ? second : first;
        const uint2 got = {__shfl_xor_sync(0xffffffffu, given.x, 1), __shfl_xor_sync(0xffffffffu, given.y, 1)};
        uint4 y = odd ? make_uint4(got.x, got.y, kept.x, kept.y) : make_uint4(kept.x, kept.y, got.x, got.y);
        if (adds) y = make_uint4(add_pair(before[t / 2].x, y.x), add_pair(before[t / 2].y, y.y), add_pair(before[t / 2].z, y.z), add_pair(before[t / 2].w, y.w));
        if (there) *reinterpret_cast<uint4*>(at + t * 16) = y;
      }
    } else if (there) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const uint2 y = four(t, r);
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // features 16 t + 4 q + 2 i and the next
          const int feature = t * 16 + q * 4 + 2 * i;
          if (local * kTileRows + feature >= segment.features) continue;
          auto* pair = reinterpret_cast<uint32_t*>(at + feature);
          const uint32_t word = i == 0 ? y.x : y.y;
          *pair = adds ? add_pair(__ldcg(pair), word) : word;
        }
      }
    }
  }
}
__device__ __forceinline__ void store_prompt(const LinearLayer& linear, const float (&acc)[64], int tile, int first_row, int rows) {
  if (linear.row_scale == nullptr) store_prompt<false>(linear, acc, tile, first_row, rows);
  else store_prompt<true>(linear, acc, tile, first_row, rows);
}

// ---- products ----

/// A warp has read a stage. In a pair both blocks fill each other's.
template <bool kPair>
__device__ __forceinline__ void release(uint32_t empty, int lane) {
  if constexpr (kPair) {
    if (lane < 2) barrier_arrive_at(empty, lane);
  } else {
    if (lane == 0) barrier_arrive(empty);
  }
}

/// Adds the products of kCount tiles of e4m3 to acc.
template <int kCount, bool kPair>
__device__ __forceinline__ void multiply_prompt_e4m3(const Layout<128, true, false>& at, float (&acc)[64], RingPlace& ring) {
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
  float product[kCount][64];
  int stages[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    stages[n] = ring.stage;
    barrier_wait(at.full(ring.stage), ring.parity);
    const uint64_t a = operand(at.rows(ring.stage) + group * 64 * kTileRowBytes), b = operand(at.weight(ring.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<128, true>(product[n], a + k * 2, b + k * 2, k);
    wgmma_commit();
    ring.advance(at.stages);
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(at.tile_scale(stages[n]));
    const float* x = at.scales(stages[n]) + (threadIdx.x >> 5) * 16 + (lane >> 2);
    const float first = x[0], second = x[8];
    const float scales[2][2] = {{__fmul_rn(scale.x, first), __fmul_rn(scale.x, second)}, {__fmul_rn(scale.y, first), __fmul_rn(scale.y, second)}};
    wgmma_wait_for(kCount - 1 - n);
    settle(product[n]);
    release<kPair>(at.empty(stages[n]), lane);
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = __fmaf_rn(product[n][i], scales[i / 4 % 2][i / 2 % 2], acc[i]);
  }
}

template <bool kFp8, bool kPair>
__device__ __forceinline__ void multiply_prompt(const Layout<128, kFp8, false>& at, float (&acc)[64], int count, RingPlace& ring) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0;
  if constexpr (kFp8) {
    int k = 0;
    for (; k + 2 <= count; k += 2) multiply_prompt_e4m3<2, kPair>(at, acc, ring);
    for (; k < count; ++k) multiply_prompt_e4m3<1, kPair>(at, acc, ring);
  } else {
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    int before = 0;
    for (int k = 0; k < count; ++k) {
      barrier_wait(at.full(ring.stage), ring.parity);
      const uint64_t a = operand(at.rows(ring.stage) + group * 64 * kTileRowBytes), b = operand(at.weight(ring.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<128, false>(acc, a + i * 2, b + i * 2, 1);
      wgmma_commit();
      wgmma_wait_for(1);
      if (k > 0) release<kPair>(at.empty(before), lane);
      before = ring.stage;
      ring.advance(at.stages);
    }
    wgmma_wait_for(0);
    settle(acc);
    release<kPair>(at.empty(before), lane);
  }
}

/// Adds the products of a tile of e4m3 to acc, for 128 rows a warpgroup: 64 at a time, while the other warpgroup multiplies.
template <bool kPair>
__device__ __forceinline__ void multiply_prompt_tall(const Layout<256, true, false>& at, float (&acc)[2][64], RingPlace& ring) {
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, stage = ring.stage;
  barrier_wait(at.full(stage), ring.parity);
  ring.advance(at.stages);
  const float2 scale = *reinterpret_cast<const float2*>(at.tile_scale(stage));
  const uint64_t b = operand(at.weight(stage));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float product[64];
    const int row = group * 128 + m * 64;
    const uint64_t a = operand(at.rows(stage) + row * kTileRowBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<128, true>(product, a + k * 2, b + k * 2, k);
    wgmma_commit();
    const float* x = at.scales(stage) + row + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
    const float first = x[0], second = x[8];
    const float scales[2][2] = {{__fmul_rn(scale.x, first), __fmul_rn(scale.x, second)}, {__fmul_rn(scale.y, first), __fmul_rn(scale.y, second)}};
    wgmma_wait_for(0);
    settle(product);
    if (m == 1) release<kPair>(at.empty(stage), lane);
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[m][i] = __fmaf_rn(product[i], scales[i / 4 % 2][i / 2 % 2], acc[m][i]);
  }
}

/// kPair: the blocks of a cluster of two take different rows and the same weights, of which each brings half to both. kTall: 256 rows a block instead of 128, e4m3 only.
/// A row's sums have the same order either way.
template <bool kFp8, bool kPair, bool kTall>
__device__ __forceinline__ void run_prompt(const PromptArgs& args) {
  static_assert(kFp8 || !kTall);
  constexpr int kRows = kTall ? 256 : 128;
  extern __shared__ char raw[];
  const Layout<kRows, kFp8, false> at(raw, args.stages, 0, 0);
  if (threadIdx.x == kConsumers) at.init_barriers(kPair ? 2 : 1);
  __syncthreads();
  if constexpr (kPair) meet_cluster();
  const LinearLayer& linear = args.linear;
  if (threadIdx.x >= kConsumers) {
    fewer_registers<24>();
    if (threadIdx.x != kConsumers) return;
    RingPlace ring{0, 1};
    for (PromptWalk<kRows, kPair> walk(args); walk.left > 0; next(walk, linear.k_blocks)) {
      const int rows = max(0, min(kRows, args.x_rows - walk.first_row));  // the second block of the last pair may have none
      const int64_t row = int64_t{walk.k} * args.x_rows + walk.first_row;
      barrier_wait(at.empty(ring.stage), ring.parity);
      barrier_expect(at.full(ring.stage), kTileBytes + (kFp8 ? 16 : 0) + rows * (kTileRowBytes + (kFp8 ? 4 : 0)));
      const char* tile = tile_address(linear, walk.tile, walk.k);
      if constexpr (kPair) {
        const uint32_t half = cluster_rank() * (kTileBytes / 2);
        bulk_copy_to_pair(at.weight(ring.stage) + half, tile + half, kTileBytes / 2, at.full(ring.stage));
      } else {
        bulk_copy(at.weight(ring.stage), tile, kTileBytes, at.full(ring.stage));
      }
      if constexpr (kFp8) bulk_copy(at.tile_scale_address(ring.stage), tile_scales(linear, walk.tile, walk.k), 16, at.full(ring.stage));
      if (rows > 0) {
        bulk_copy(at.rows(ring.stage), static_cast<const char*>(args.x) + row * kTileRowBytes, rows * kTileRowBytes, at.full(ring.stage));
        if constexpr (kFp8) bulk_copy(shared_address(at.scales(ring.stage)), args.x_scale + row, rows * 4, at.full(ring.stage));
      }
      ring.advance(at.stages);
    }
  } else {
    more_registers<240>();
    const int group = threadIdx.x >> 7;
    RingPlace ring;
    for (PromptWalk<kRows, kPair> walk(args); walk.left > 0; walk.left -= linear.k_blocks, walk.next_tile()) {
      if constexpr (kTall) {
        float acc[2][64];
#pragma unroll
        for (int i = 0; i < 128; ++i) acc[i / 64][i % 64] = 0;
        for (int k = 0; k < linear.k_blocks; ++k) multiply_prompt_tall<kPair>(at, acc, ring);
#pragma unroll
        for (int m = 0; m < 2; ++m) store_prompt(linear, acc[m], walk.tile, walk.first_row + group * 128 + m * 64, args.rows);
      } else {
        float acc[64];
        multiply_prompt<kFp8, kPair>(at, acc, linear.k_blocks, ring);
        store_prompt(linear, acc, walk.tile, walk.first_row + group * 64, args.rows);
      }
    }
  }
  if constexpr (kPair) meet_cluster();  // a block's memory stays until the other has arrived at its barriers for the last time
}

#define QUERN_PROMPT(name, fp8, pair, tall)                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ PromptArgs args) { \
    run_prompt<fp8, pair, tall>(args);                                                                          \
  }

}  // namespace quern::cuda::sm90
