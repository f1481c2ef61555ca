#pragma once

// Decode rows from 33 on: the loop of linear_sm90.cuh with the rows as A and the weights as B, so that a thread has two rows and needs but four scales a tile. A product's bits are the same either way, and so
// is the order of every sum: the rest is as there, but for two things. Rows are quantised two at a time by a block where there are more than blocks. A tile row that several blocks share is added up by all of
// them, each a share of its rows and features. One layer a launch: without a loop over phases the compiler keeps addresses and scales out of the way of the sums.

#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

// ---- what becomes of finished sums ----

/// Whether the rows of a tile can be read and written in pieces of four features.
__device__ __forceinline__ bool is_whole(const OutputSegment& segment, int local) {
  return segment.features >= (local + 1) * kTileRows && segment.stride % 4 == 0 && (reinterpret_cast<uintptr_t>(segment.out) & 7) == 0;
}

/// Eight sums of a thread in each of kUnits groups of 16 packed rows of a tile, from group `unit` on, for 64 rows from `first_row` on:
/// v[8 u + 4 h + 2 r + i] is row g + 8 r by packed row 16 (unit + u) + 8 h + 2 q + i.
template <int kUnits>
__device__ __forceinline__ void store_units(const LinearPhase& phase, const float* v, int tile, int unit, int first_row, int rows) {
  const int thread = thread_here(), lane = thread & 31, g = lane >> 2, q = lane & 3;
  const OutputSegment& segment = segment_of(phase, tile);
  const int local = tile - segment.first_tile, row = first_row + ((thread >> 5) & 3) * 16 + g;
  const auto scaled = [&](int u, int h, int r, int i) {
    const float scale = phase.row_scale == nullptr ? 1.0f : __ldg(phase.row_scale + int64_t{tile} * kTileRows + (unit + u) * 16 + h * 8 + q * 2 + i);
    return v[8 * u + 4 * h + 2 * r + i] * scale;
  };
  if (phase.epilogue == Epilogue::kSiluUp) {
    auto* out = static_cast<__nv_bfloat16*>(segment.out);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int feature = local * 64 + (unit + u) * 8 + q * 2;
        if (row + 8 * r >= rows || feature >= segment.features) continue;
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float gate = __bfloat162float(__float2bfloat16_rn(scaled(u, 0, r, i))), up = __bfloat162float(__float2bfloat16_rn(scaled(u, 1, r, i)));
          y[i] = __bfloat162float(__float2bfloat16_rn(silu(gate))) * up;
        }
        *reinterpret_cast<uint32_t*>(out + (row + 8 * r) * segment.stride + feature) = bf16_pair(y[0], y[1]);
      }
    return;
  }
  const int feature = local * kTileRows + unit * 16 + q * 4;
  if (phase.epilogue == Epilogue::kLogits) {
    auto* out = static_cast<float*>(segment.out) + feature;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
      {
        if (row + 8 * r >= rows) continue;
        auto* at = out + (row + 8 * r) * segment.stride + u * 16;
        const float y[4] = {scaled(u, 0, r, 0), scaled(u, 1, r, 0), scaled(u, 0, r, 1), scaled(u, 1, r, 1)};
        if (segment.stride % 4 == 0 && feature + u * 16 + 4 <= segment.features) {
          *reinterpret_cast<float4*>(at) = make_float4(y[0], y[1], y[2], y[3]);
        } else {
          if (feature + u * 16 < segment.features) *reinterpret_cast<float2*>(at) = make_float2(y[0], y[1]);
          if (feature + u * 16 + 2 < segment.features) *reinterpret_cast<float2*>(at + 2) = make_float2(y[2], y[3]);
        }
      }
    return;
  }
  auto* out = static_cast<__nv_bfloat16*>(segment.out) + feature;
  const bool adds = phase.epilogue == Epilogue::kResidual;
  const bool whole = is_whole(segment, local);
  const auto rounded = [&](int u, int r) {  // features 16 u + 4 q to 16 u + 4 q + 3
    return uint2{bf16_pair(scaled(u, 0, r, 0), scaled(u, 1, r, 0)), bf16_pair(scaled(u, 0, r, 1), scaled(u, 1, r, 1))};
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= rows) continue;
    auto* at = out + (row + 8 * r) * segment.stride;
    if (whole) {
      uint2 before[kUnits];
      if (adds)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) before[u] = __ldcg(reinterpret_cast<const uint2*>(at + u * 16));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint2 y = rounded(u, r);
        if (adds) y = {add_pair(before[u].x, y.x), add_pair(before[u].y, y.y)};
        *reinterpret_cast<uint2*>(at + u * 16) = y;
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint2 y = rounded(u, r);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (feature + u * 16 + 2 * i >= segment.features) continue;
          auto* pair = reinterpret_cast<uint32_t*>(at + u * 16 + 2 * i);
          const uint32_t half = i == 0 ? y.x : y.y;
          *pair = adds ? add_pair(__ldcg(pair), half) : half;
        }
      }
    }
  }
}

// ---- the multiplying warpgroups ----

/// What of a tile by kColumns rows a warpgroup multiplies: kBlocks times 64 rows by 16 kUnits packed rows of the weight.
template <int kColumns>
struct WideShare {
  static constexpr int kBlocks = kColumns == 256 ? 2 : 1, kUnits = kColumns == 64 ? 4 : 8, kSums = kUnits * 8, kPacked = kUnits * 16;
  static __device__ __forceinline__ int first_row(int group, int block) { return kColumns == 64 ? 0 : block * 128 + group * 64; }
  static __device__ __forceinline__ int first_unit(int group) { return kColumns == 64 ? group * kUnits : 0; }
};
/// Whether the block that has the first part of a tile row adds the others, rather than all that share it: where they are few.
template <int kColumns>
__device__ __forceinline__ bool first_joins(const LinearPhase& phase) {
  return kColumns <= 64 && phase.tiles >= phase.blocks;
}
template <int kColumns>
using WideSums = float[WideShare<kColumns>::kBlocks][WideShare<kColumns>::kSums];

/// Of a consumer; the compiler sees that it is the same for a warp, which operands are addressed with.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 7, 0); }

/// acc = the sums of `count` tiles along K, the next ones of the ring; e4m3 is promoted every 128 with both scales. A sum's bits do not depend on kColumns. Of 64 rows
/// that begin past `rows` the second are left out; what acc says of rows that there are not is not to be used.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void multiply_wide(const Layout<kColumns, kFp8, false>& at, WideSums<kColumns>& acc, int count, int rows, RingPlace& ring) {
  using Share = WideShare<kColumns>;
  const int group = warpgroup(), lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < Share::kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < Share::kSums; ++i) acc[m][i] = 0;
  const auto next_stage = [&] {
    const int stage = ring.stage;
    barrier_wait(at.full(stage), ring.parity);
    ring.advance(at.stages);
    return stage;
  };
  const uint64_t first_a = operand(at.rows(0) + Share::first_row(group, 0) * kTileRowBytes), first_b = operand(at.weight(0) + Share::first_unit(group) * 16 * kTileRowBytes);
  const auto start = [&](float(&sum)[Share::kSums], int stage, int m, bool adds) {
    const uint32_t begin = stage * ((kTileBytes + kColumns * kTileRowBytes) / kOperandUnit);
    const uint64_t a = operand_at(first_a, begin + m * (128 * kTileRowBytes / kOperandUnit)), b = operand_at(first_b, begin);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<Share::kPacked, kFp8>(sum, a + k * 2, b + k * 2, adds || k > 0 ? 1 : 0);
    wgmma_commit();
  };
  if constexpr (kFp8) {
    const auto promote = [&](float(&of)[Share::kSums], int stage, int m, int wait, bool last) {
      const float2 scale = *reinterpret_cast<const float2*>(at.tile_scale(stage));
      const float* x = at.scales(stage) + Share::first_row(group, m) + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
      const float first = x[0], second = x[8];
      const float scales[2][2] = {{__fmul_rn(scale.x, first), __fmul_rn(scale.x, second)}, {__fmul_rn(scale.y, first), __fmul_rn(scale.y, second)}};
      wgmma_wait_for(wait);
      settle(of);
      if (last && lane == 0) barrier_arrive(at.empty(stage));
#pragma unroll
      for (int i = 0; i < Share::kSums; ++i) acc[m][i] = __fmaf_rn(of[i], scales[i / 4 % 2][i / 2 % 2], acc[m][i]);
    };
    int k = 0;
    if constexpr (Share::kBlocks == 1)
      for (; k + 2 <= count; k += 2) {
        float product[2][Share::kSums];
        int stages[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) start(product[n], stages[n] = next_stage(), 0, false);
        promote(product[0], stages[0], 0, 1, true);
        promote(product[1], stages[1], 0, 0, true);
      }
    const bool both = Share::kBlocks == 2 && Share::first_row(group, 1) < rows;
    for (; k < count; ++k) {  // the other warpgroup multiplies while this one promotes
      const int stage = next_stage();
      float product[Share::kSums];
      start(product, stage, 0, false);
      promote(product, stage, 0, 0, !both);
      if constexpr (Share::kBlocks == 2)
        if (both) {
          start(product, stage, 1, false);
          promote(product, stage, 1, 0, true);
        }
    }
  } else {
    int before = 0;
    for (int k = 0; k < count; ++k) {  // a tile is free when the next one's products are under way
      const int stage = next_stage();
#pragma unroll
      for (int m = 0; m < Share::kBlocks; ++m) start(acc[m], stage, m, true);
      wgmma_wait_for(Share::kBlocks);
      if (k > 0 && lane == 0) barrier_arrive(at.empty(before));
      before = stage;
    }
    wgmma_wait_for(0);
#pragma unroll
    for (int m = 0; m < Share::kBlocks; ++m) settle(acc[m]);
    if (lane == 0) barrier_arrive(at.empty(before));
  }
}

template <int kColumns>
__device__ __forceinline__ void store_wide(const LinearPhase& phase, const WideSums<kColumns>& acc, int tile, int rows) {
  using Share = WideShare<kColumns>;
  const int group = thread_here() >> 7;
#pragma unroll
  for (int m = 0; m < Share::kBlocks; ++m)
    store_units<Share::kUnits>(phase, acc[m], tile, Share::first_unit(group), Share::first_row(group, m), rows);
}

/// Where a warpgroup's thread leaves four of its sums: [64 rows][unit][half][thread] of part `place`.
template <int kColumns>
__device__ __forceinline__ float4* wide_part(float* parts, int64_t place, int row_block, int unit, int half, int thread) {
  return reinterpret_cast<float4*>(parts + place * (kTileRows * kColumns)) + ((row_block * 8 + unit) * 2 + half) * 128 + thread;
}

/// Leaves a part of a tile row for those that add it up; of rows that there are not, zeros.
template <int kColumns>
__device__ __forceinline__ void leave_wide(float* parts, const WideSums<kColumns>& acc, int place, int rows) {
  using Share = WideShare<kColumns>;
  const int thread = thread_here(), group = thread >> 7;
#pragma unroll
  for (int m = 0; m < Share::kBlocks; ++m) {
    const int row = Share::first_row(group, m), mine = row + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2);
    if (row >= rows) break;
#pragma unroll
    for (int u = 0; u < Share::kUnits; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* v = acc[m] + u * 8 + half * 4;
        const bool first = mine < rows, second = mine + 8 < rows;
        __stcg(wide_part<kColumns>(parts, place, row / 64, Share::first_unit(group) + u, half, thread & 127),
               make_float4(first ? v[0] : 0, first ? v[1] : 0, second ? v[2] : 0, second ? v[3] : 0));
      }
  }
}

/// Adds to the first part of a tile row what the blocks behind this one leave of it, in the order of K, each word as soon as it is there, and marks the places as empty again. Parts that continue
/// a tile row are the first that their blocks compute, so they are seldom waited for.
template <int kColumns>
__device__ __forceinline__ void join_first(const LinearPhase& phase, float* parts, WideSums<kColumns>& acc, int tile, int grid) {
  using Share = WideShare<kColumns>;
  static_assert(Share::kBlocks == 1);
  constexpr int kTogether = 2, kPieces = Share::kSums / 4;
  const int thread = thread_here(), group = thread >> 7;
  const int last = block_of(phase, static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(phase.k_blocks) - 1, grid);
  const float nothing = __uint_as_float(kNothing);
#pragma unroll 1
  for (int block = static_cast<int>(blockIdx.x) + 1; block <= last; block += kTogether) {
    const auto place = [&](int b, int i) { return wide_part<kColumns>(parts, 2 * (block + b), 0, Share::first_unit(group) + i / 2, i % 2, thread & 127); };
    float4 part[kTogether][kPieces];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int b = 0; b < kTogether; ++b)
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (block + b <= last) {
            part[b][i] = load_relaxed(place(b, i));
            there = there && is_there(part[b][i]);
          }
    } while (!there);
#pragma unroll
    for (int b = 0; b < kTogether; ++b)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (block + b <= last) {
          const float values[4] = {part[b][i].x, part[b][i].y, part[b][i].z, part[b][i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[0][i * 4 + j] = __fadd_rn(acc[0][i * 4 + j], values[j]);
          __stcg(place(b, i), make_float4(nothing, nothing, nothing, nothing));
        }
  }
}

/// Adds up what all blocks leave of a tile row, this block its share of rows and features, in the order of K, each word as soon as it is there, and marks the places as empty again. All
/// consumers, once the block's own parts are left; `first` to `last` are the blocks that share the tile row.
template <int kColumns>
__device__ __forceinline__ void join_wide(const LinearPhase& phase, float* parts, int tile, int first, int last, int rows) {
  constexpr int kTogether = 2;  // units; with up to four parts of each under way
  const int thread = thread_here();
  const int count = last - first + 1, units = (rows + 63) / 64 * (8 / kTogether), which = static_cast<int>(blockIdx.x) - first;
  const int end = units * (which + 1) / count;
  const float nothing = __uint_as_float(kNothing);
#pragma unroll 1
  for (int item = units * which / count + (thread >> 7); item < end; item += 2) {
    const int row_block = item / (8 / kTogether), unit = item % (8 / kTogether) * kTogether;
    float sum[kTogether * 8];
#pragma unroll 1
    for (int part = 0; part < count; part += 4) {
      const auto place = [&](int n, int i) {
        return wide_part<kColumns>(parts, 2 * (first + part + n) + (part + n > 0 ? 0 : 1), row_block, unit + i / 2, i % 2, thread & 127);
      };
      float4 loaded[4][kTogether * 2];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (part + n < count)
#pragma unroll
            for (int i = 0; i < kTogether * 2; ++i) {
              loaded[n][i] = load_relaxed(place(n, i));
              there = there && is_there(loaded[n][i]);
            }
      } while (!there);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (part + n < count)
#pragma unroll
          for (int i = 0; i < kTogether * 2; ++i) {
            const float4& v = loaded[n][i];
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i * 4 + j] = n == 0 && part == 0 ? values[j] : __fadd_rn(sum[i * 4 + j], values[j]);
            __stcg(place(n, i), make_float4(nothing, nothing, nothing, nothing));
          }
    }
    store_units<kTogether>(phase, sum, tile, unit, row_block * 64, rows);
  }
}

/// The tile rows that this block shares, once its own parts of them are left: at most its first and its last.
template <int kColumns>
__device__ __forceinline__ void join_shared(const LinearPhase& phase, float* parts, int rows) {
  const DecodeWalk walk(phase);
  if (walk.left == 0) return;
  const auto k_blocks = static_cast<uint32_t>(phase.k_blocks);
  const uint32_t begin = static_cast<uint32_t>(walk.tile) * k_blocks + walk.k, end = begin + walk.left;
  const int last_tile = static_cast<int>((end - 1) / k_blocks);
  const bool first_is_shared = walk.k > 0 || walk.left < phase.k_blocks, last_is_shared = last_tile != walk.tile && end % k_blocks != 0;
#pragma unroll 1
  for (int i = first_is_shared ? 0 : 1; i < (last_is_shared ? 2 : 1); ++i) {
    const int tile = i == 0 ? walk.tile : last_tile;
    const int first = block_of(phase, static_cast<uint32_t>(tile) * k_blocks, walk.grid), last = block_of(phase, static_cast<uint32_t>(tile) * k_blocks + k_blocks - 1, walk.grid);
    join_wide<kColumns>(phase, parts, tile, first, last, rows);
  }
}

template <int kColumns, bool kFp8>
__device__ __forceinline__ void multiply_rows(const ChainArgs& args, const Layout<kColumns, kFp8, false>& at) {
  const LinearPhase& phase = args.phases[0];
  DecodeWalk walk(phase);
  wait_for_predecessors();
  if (phase.in != nullptr) {
    quantise_share<kColumns, kFp8>(args, phase, at.sums());
    fence_async_proxy_all();  // bulk copies read what was written here
    consumer_barrier();
    if (threadIdx.x == 0) arrive(args.arrivals + kMaxPhases);
  }
  RingPlace ring;
  const bool one_joins = first_joins<kColumns>(phase);
  while (walk.left > 0) {
    const int begin = walk.k, count = min(phase.k_blocks - begin, walk.left);
    WideSums<kColumns> acc;
    multiply_wide<kColumns, kFp8>(at, acc, count, args.rows, ring);
    if (count == phase.k_blocks) {
      store_wide<kColumns>(phase, acc, walk.tile, args.rows);
    } else if (begin > 0 || !one_joins) {
      leave_wide<kColumns>(args.parts, acc, 2 * static_cast<int>(blockIdx.x) + (begin > 0 ? 0 : 1), args.rows);
    } else if constexpr (WideShare<kColumns>::kBlocks == 1) {
      join_first<kColumns>(phase, args.parts, acc, walk.tile, walk.grid);
      store_wide<kColumns>(phase, acc, walk.tile, args.rows);
    }
    walk.left -= count;
    walk.next_tile();
  }
  const auto join = [&] {
    if (!one_joins) join_shared<kColumns>(phase, args.parts, args.rows);
  };
  if constexpr (kHasHelpers<kColumns>) {
    join();
    if (phase.side.weight != nullptr) named_barrier<6, kConsumers + kHelpers>();
  } else {
    side_rows_of_consumers<kFp8>(args, phase, 0, join);
  }
  consumer_barrier();
  if (threadIdx.x == 0 && atomicAdd(args.arrivals + 2 * kMaxPhases, 1) == static_cast<int>(gridDim.x) - 1)  // the last block leaves the counters as it found them
    for (int i = 0; i <= 2 * kMaxPhases; ++i) args.arrivals[i] = 0;
}

template <int kColumns, bool kFp8>
__device__ __forceinline__ void run_wide(const ChainArgs& args) {
  extern __shared__ char raw[];
  const Layout<kColumns, kFp8, false> at(raw, args.stages, 0, 0, 0);
  if (threadIdx.x == kConsumers) at.init_barriers();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    fewer_registers<kHasHelpers<kColumns> ? 88 : 24>();
    if (threadIdx.x == kConsumers) copy_chain(args, at);
    if constexpr (kHasHelpers<kColumns>)
      if (threadIdx.x >= kConsumers + 32) help_chain<kFp8>(args);
  } else {
    more_registers<kHasHelpers<kColumns> ? 208 : 240>();
    multiply_rows(args, at);
  }
}

#define QUERN_WIDE(name, columns, fp8)                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ ChainArgs args) { \
    run_wide<columns, fp8>(args);                                                                           \
  }

}  // namespace quern::cuda::sm90
