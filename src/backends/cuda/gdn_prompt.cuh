#pragma once

#include "backends/cuda/gdn_prompt_args.h"
#include "backends/cuda/gdn_runs.cuh"
#include "backends/cuda/gdn_state.cuh"
#include "backends/cuda/mma.cuh"

// What the kernels for prompt rows of GDN layers share: chunks, images, numbers in two parts. Device code only.

namespace quern::cuda {

constexpr int kDim = kGdnPromptDim, kChunk = static_cast<int>(kGrid);

/// Byte offset of the 16-byte piece `piece` of row `row`: image after image of 64 columns.
__device__ inline uint32_t image_at(int row, int piece) { return static_cast<uint32_t>(piece / 8 * kGdnPromptImageBytes) + swizzled<8>(row, piece % 8); }

/// A chunk of a prompt run.
struct Tile {
  int slot, cursor;
  int first_row;  // step's row of the run's first, which stands at `cursor`
  int base;       // index of the chunk's first row, on the grid
  int rows;       // 0: nothing to do
};
__device__ inline int tiles_of(const RunRecord& record) {
  const bool prompt = record.slot >= 0 && (record.flags & kIsDecode) == 0;
  return prompt ? (record.num_rows + kChunk - 1) / kChunk : 0;
}
__device__ inline Tile tile_of(const GdnArgs& g, const RunRecord& record, int chunk) {
  const int cursor = g.step.cursor[record.slot], end = cursor + record.num_rows;
  const int base = (cursor + kChunk - 1) / kChunk * kChunk + chunk * kChunk;
  const int rows = (record.flags & kIsCommitted) != 0 ? max(0, min(kChunk, end - base)) : 0;
  return {record.slot, cursor, record.first_row, base, rows};
}
__device__ inline Tile tile_of(const GdnArgs& g, int number) {
  for (int run = g.first_run; run < g.end_run; ++run) {
    const RunRecord record = g.step.runs[run];
    const int tiles = tiles_of(record);
    if (number < tiles) return tile_of(g, record, number);
    number -= tiles;
  }
  return {0, 0, 0, 0, 0};
}

/// Of a word of two bf16 the first and the second; two floats rounded to such a word, and what that leaves of them.
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline void split(float low, float high, uint32_t& rounded, uint32_t& remainder) {
  rounded = bf16_pair(low, high);
  remainder = bf16_pair(low - low_of(rounded), high - high_of(rounded));
}

/// What the scan needs of a chunk for half of a value head's columns.
struct Stage {
  unsigned char keys[kGdnPromptRowBytes], queries[kGdnPromptRowBytes];
  unsigned char t[kGdnPromptImageBytes], t_rest[kGdnPromptImageBytes], p[kGdnPromptImageBytes], p_rest[kGdnPromptImageBytes];
  unsigned char values[kGdnPromptImageBytes];
  float4 scalars[kChunk];
};
static_assert(sizeof(Stage) == kGdnPromptStageBytes);
/// Where a chunk's stands in the workspace.
struct StageSource {
  const unsigned char *keys, *queries, *matrices, *values, *scalars;
};
__device__ inline StageSource stage_source(const GdnPromptArgs& args, int tile, int head, int k_head, int part) {
  const GdnArgs& g = args.gdn;
  const unsigned char* rows = args.rows + int64_t{tile} * (2 * g.num_k_heads + g.num_v_heads) * kGdnPromptRowBytes;
  const int64_t place = int64_t{tile} * g.num_v_heads + head;
  return {rows + int64_t{g.num_k_heads + k_head} * kGdnPromptRowBytes, rows + int64_t{k_head} * kGdnPromptRowBytes, args.matrices + place * 4 * kGdnPromptImageBytes,
          rows + int64_t{2 * g.num_k_heads + head} * kGdnPromptRowBytes + part * kGdnPromptImageBytes,
          reinterpret_cast<const unsigned char*>(args.scalars) + place * kGdnPromptScalarBytes};
}

// A warp has 16 columns of a head from `column` on, and of each 8 rows of a chunk: columns lane / 4 and lane / 4 + 8, rows 8 n + 2 (lane % 4) and the next.

/// Rows 8 n .. of the output before its norm; 8 x 8 elements are transposed at a time.
__device__ inline void store_transposed(const GdnArgs& g, const Tile& t, int head, int column, int n, const float* o) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = 8 * n + lane / 4;
  const int64_t at = (int64_t{t.first_row} + t.base + row - t.cursor) * g.num_v_heads + head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t pair = transposed(bf16_pair(o[2 * half], o[2 * half + 1]));
    if (row < t.rows) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(g.out) + at * kDim + column + half * 8 + lane % 4 * 2) = pair;
  }
}
__device__ inline int64_t ring_place(const GdnArgs& g, const Tile& t, int j) { return ring_row(g, t.slot, t.base + j); }
/// Rows 8 n .. of u to the ring.
__device__ inline void keep_updates(const GdnArgs& g, const Tile& t, int head, int column, int n, const float* u) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int j = n * 8 + lane % 4 * 2 + e % 2;
    if (j < t.rows) store(g.ring_u, g.ring, (ring_place(g, t, j) * g.num_v_heads + head) * kDim + column + lane / 4 + e / 2 * 8, u[e]);
  }
}
/// G of the chunk's rows and, for one of the value heads that share a k head, k to the ring; all threads of a block.
template <int kThreads>
__device__ void keep_keys(const GdnPromptArgs& args, const Tile& t, int tile, int head, const unsigned char* keys, const float4* scalars) {
  const GdnArgs& g = args.gdn;
  const int thread = static_cast<int>(threadIdx.x), k_head = g.k_head[head];
  if (thread < t.rows) g.ring_g[ring_place(g, t, thread) * g.num_v_heads + head] = scalars[thread].w;
  if (!first_of_key(g, head)) return;
  const float* factors = args.factors + (int64_t{tile} * 2 * g.num_k_heads + g.num_k_heads + k_head) * kChunk;
  for (int item = thread; item < t.rows * kDim; item += kThreads) {
    const int j = item / kDim, i = item % kDim;
    const float y = __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(keys + image_at(j, i / 8) + i % 8 * 2));
    store(g.ring_k, g.ring, (ring_place(g, t, j) * g.num_k_heads + k_head) * kDim + i, y * factors[j]);
  }
}

/// The run of a scan's block and its chunks among those of the launch.
struct Chunks {
  RunRecord record;
  int first, begin, end;  // the run's first tile, possibly before the launch's; what is to be done
  __device__ Chunks(const GdnPromptArgs& args, int run) : record(args.gdn.step.runs[run]), first(-args.first_tile) {
    for (int before = args.gdn.first_run; before < run; ++before) first += tiles_of(args.gdn.step.runs[before]);
    begin = max(0, first);
    end = min(args.num_tiles, first + tiles_of(record));
    while (end > begin && at(args.gdn, end - 1).rows == 0) --end;
  }
  [[nodiscard]] __device__ Tile at(const GdnArgs& g, int tile) const { return tile_of(g, record, tile - first); }
};

}  // namespace quern::cuda
