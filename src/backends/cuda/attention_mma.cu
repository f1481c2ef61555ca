#include <cooperative_groups.h>

#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"

// Attention with matrix instructions, bf16 queries, heads of 256 elements, KV in bf16 or e4m3 (widened to bf16). Keys are taken a block of
// 64 at a time; the parts of 512 keys from the sequence's start are merged in order, whoever computes them; so are the blocks of a decode
// row's part. A row of a matrix instruction's result depends on its own row alone, so a row's bits depend on its index only.

namespace quern::cuda {

namespace {

constexpr int kTilesPerPart = 8;
constexpr int kPartsOfACluster = 6;  // that it takes one after the other; of longer runs a block takes whole parts
constexpr int kThreads = 256, kWarps = kThreads / 32;

/// A tile of keys or values: rows of kPieces pieces.
struct RowPlace {
  __device__ uint32_t operator()(int row, int piece) const { return swizzled<kPieces>(row, piece); }
};
__device__ void load_rows(unsigned char* tile, const void* cache, DType dtype, int64_t first_element, int begin, int end) {
  load_tile<kThreads>(tile, RowPlace(), static_cast<int>(threadIdx.x), cache, dtype, first_element, begin, end);
}

/// Where one row and head of a group of queries comes from and goes to; row < 0: none.
struct Lane {
  int row, head, index;
};

/// exp(x - max), where max may be that of no key at all.
__device__ float weight(float x, float max) { return x == -INFINITY ? 0.0f : expf(x - max); }

/// What a block of keys, or a part, adds to what came before it: the operations and their order are the same wherever it is computed.
__device__ float merged(float before, float before_weight, float now, float now_weight) { return fmaf(now, now_weight, __fmul_rn(before, before_weight)); }

template <int kTiles>
struct DecodeShared {
  static constexpr int kLanes = kTiles * 16;
  unsigned char k[kTileBytes], v[kTileBytes];
  unsigned char q[kLanes * kDim * 2];
  unsigned char p[kLanes * kKeys * 2];
  float scores[kLanes][kKeys + 4];
  float tile_values[kLanes][kDim + 4];         // of the block's tile, for the other blocks of a cluster
  float tile_max[kLanes], tile_sum[kLanes];    // of the tile
  float max[kLanes], sum[kLanes];              // of the part
  float total_max[kLanes], total_sum[kLanes];  // of the parts so far
  float before[kLanes], now[kLanes];           // what a merge multiplies with
  int32_t rows[kLanes], heads[kLanes], indices[kLanes];
  int32_t own_heads[16];
  int32_t num_own_heads;
};

#if __CUDA_ARCH__ >= 900
__device__ void meet_cluster() { cooperative_groups::this_cluster().sync(); }
template <class T>
__device__ const T* at_rank(const T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}
#else  // no clusters: launches have one block in each, and these are not called
__device__ void meet_cluster() { __trap(); }
template <class T>
__device__ const T* at_rank(const T* own, int) {
  return own;
}
#endif

/// blockIdx: (block of the run, kv head, run). A tile of 64 keys has a maximum of its own; tiles are merged to parts in order and parts to
/// rows in order. While a run has few parts, a cluster of blocks takes one: a block computes a tile, and merges a share of the elements of
/// all eight. Else a block takes whole parts.
template <int kTiles>
__device__ void decode(const AttentionArgs& args) {
  using Memory = DecodeShared<kTiles>;
  extern __shared__ __align__(128) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  constexpr int kLanes = Memory::kLanes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int kv_head = static_cast<int>(blockIdx.y), num_blocks = args.num_splits * args.cluster, own_block = static_cast<int>(blockIdx.x);
  const RunRecord run = args.step.runs[blockIdx.z];
  const bool used = run.slot >= 0 && run.num_rows > 0 && (run.flags & kIsDecode) != 0;
  if (used && warp == 0) {
    int count = 0;
    for (int first = 0; first < args.num_q_heads; first += 32) {
      const bool own = first + lane < args.num_q_heads && args.kv_head[first + lane] == kv_head;
      const unsigned all = __ballot_sync(kAllLanes, own);
      if (own) s.own_heads[count + __popc(all & ((1u << lane) - 1))] = first + lane;
      count += __popc(all);
    }
    if (lane == 0) s.num_own_heads = count;
  }
  __syncthreads();
  release_successor();
  await_predecessor();
  if (!used) return;
  const int num_heads = s.num_own_heads;
  if (num_heads == 0) return;
  int num_rows = run.num_rows;  // padding stands at the end
  while (num_rows > 0 && args.step.indices[run.first_row + num_rows - 1] < 0) --num_rows;
  if (own_block == 0)
    for (int i = thread; i < (run.num_rows - num_rows) * num_heads * kDim; i += kThreads) {
      const int row = run.first_row + num_rows + i / (num_heads * kDim), head = s.own_heads[i / kDim % num_heads];
      store(args.out, args.activation, (int64_t{row} * args.num_q_heads + head) * kDim + i % kDim, 0.0f);
    }
  if (num_rows == 0) return;
  const int32_t* block_table = args.step.block_tables + int64_t{run.slot} * args.step.block_tables_stride;
  const int run_last = args.step.indices[run.first_row + num_rows - 1], first_part = args.first_index / static_cast<int>(kKvSplit);
  const int num_parts = run_last / static_cast<int>(kKvSplit) - first_part + 1;
  const bool shared_parts = num_blocks > 1 && num_parts <= args.max_parts;
  if (!shared_parts && own_block > 0) return;
  const bool in_cluster = shared_parts && args.cluster == kTilesPerPart && num_parts <= kPartsOfACluster * args.num_splits;
  const int rank = in_cluster ? own_block % kTilesPerPart : 0;
  const int stride = in_cluster ? args.num_splits : shared_parts ? num_blocks : 1;
  const int begin_part = first_part + (in_cluster ? own_block / kTilesPerPart : own_block);
  const bool fp8 = args.kv.dtype == DType::kE4M3;
  const float k_scale = fp8 && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f;
  const float v_scale = fp8 && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  const float scale = k_scale / sqrtf(static_cast<float>(kDim));
  const int rows_per_group = kLanes / num_heads;

  for (int group = 0; group < num_rows; group += rows_per_group) {
    const int group_rows = min(rows_per_group, num_rows - group);
    const int last = args.step.indices[run.first_row + group + group_rows - 1];
    const int last_block = last / kKeys, last_part = last_block / kTilesPerPart;
    /// The first block of keys of a part that this block computes; -1: none.
    const auto tile_in = [&](int part) {
      return part <= last_part && part * kTilesPerPart + rank <= last_block ? part * kTilesPerPart + rank : -1;
    };
    const auto fetch = [&](unsigned char* tile, const void* cache, int block) {
      if (block >= 0) {
        const int64_t at = (int64_t{block_table[block]} * args.num_kv_heads + kv_head) * kKeys * kDim;
        load_rows(tile, cache, args.kv.dtype, at, max(0, args.first_index - block * kKeys), min(kKeys, last + 1 - block * kKeys));
      }
      commit_copies();
    };
    // A block of several parts asks for tiles that it will fetch later in L2; of one part that takes more than it gives (H200: 16 sequences at 1024 33.8 -> 43.7 us, 256 387 -> 353).
    const bool asks = !in_cluster && thread == 0 && begin_part + stride <= last_part;
    const auto ask = [&](int block) {
      const int64_t bytes = int64_t{kKeys} * kDim * (fp8 ? 1 : 2), at = (int64_t{block_table[block]} * args.num_kv_heads + kv_head) * bytes;
      prefetch_bytes(static_cast<const char*>(args.kv.k) + at, bytes);
      prefetch_bytes(static_cast<const char*>(args.kv.v) + at, bytes);
    };
    __syncthreads();
    if (begin_part <= last_part) {
      if (asks) ask(begin_part * kTilesPerPart + 1);
      fetch(s.k, args.kv.k, tile_in(begin_part));
      fetch(s.v, args.kv.v, tile_in(begin_part));
    }
    for (int i = thread; i < kLanes; i += kThreads) {
      const bool has_row = i < group_rows * num_heads;
      const int row = run.first_row + group + i / num_heads;
      s.rows[i] = has_row ? row : -1;
      s.heads[i] = has_row ? s.own_heads[i % num_heads] : 0;
      s.indices[i] = has_row ? args.step.indices[row] : -1;
      s.max[i] = s.total_max[i] = -INFINITY;
      s.sum[i] = s.total_sum[i] = 0;
    }
    for (int item = thread; item < kLanes * kPieces; item += kThreads) {
      const int i = item / kPieces, piece = item % kPieces;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (i < group_rows * num_heads) {
        const int64_t row = run.first_row + group + i / num_heads;
        bits = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(args.query) +
                                               (row * args.num_q_heads + s.own_heads[i % num_heads]) * kDim + piece * 8);
      }
      *reinterpret_cast<uint4*>(s.q + swizzled<kPieces>(i, piece)) = bits;
    }
    float total[kTiles][4][4] = {}, values[kTiles][4][4] = {};

    for (int part = begin_part; part <= last_part; part += stride) {
      const int part_begin = part * kTilesPerPart, part_end = min(part_begin + kTilesPerPart, last_block + 1);
      const int own_end = in_cluster ? min(part_begin + rank + 1, part_end) : part_end;
      for (int block = part_begin + rank; block < own_end; ++block) {
        const int next = block + 1 < own_end ? block + 1 : tile_in(part + stride);
        await_copies<1>();  // the keys
        __syncthreads();
        // Scores: a warp has 8 keys.
        float score[kTiles][4] = {};
        const uint32_t keys = shared_address(s.k), queries = shared_address(s.q);
#pragma unroll
        for (int step = 0; step < kDim / 32; ++step) {
          uint32_t b[4];
          load_matrices(b, keys + swizzled<kPieces>(warp * 8 + lane % 8, step * 4 + lane / 8));
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint32_t a[4];
              load_matrices(a, queries + swizzled<kPieces>(tile * 16 + lane % 16, step * 4 + half * 2 + lane / 16));
              multiply_add(score[tile], a, b[2 * half], b[2 * half + 1]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i) s.scores[tile * 16 + lane / 4 + i / 2 * 8][warp * 8 + lane % 4 * 2 + i % 2] = score[tile][i];
        __syncthreads();
        fetch(s.k, args.kv.k, next);
        if (asks) {
          const int beyond = block + 2 < own_end ? block + 2 : (part + stride) * kTilesPerPart + block + 2 - own_end;
          if (beyond <= last_block) ask(beyond);
        }
        // Softmax of the tile: a warp has rows of its own.
        for (int i = warp; i < kLanes; i += kWarps) {
          const int key = block * kKeys + 2 * lane, index = s.indices[i];
          const float2 raw = *reinterpret_cast<const float2*>(&s.scores[i][2 * lane]);
          const float low = key <= index && key >= args.first_index ? __fmul_rn(raw.x, scale) : -INFINITY;
          const float high = key + 1 <= index && key + 1 >= args.first_index ? __fmul_rn(raw.y, scale) : -INFINITY;
          const float tile_max = warp_max(fmaxf(low, high));
          const float p_low = weight(low, tile_max), p_high = weight(high, tile_max);
          const float tile_sum = warp_sum(p_low + p_high);
          *reinterpret_cast<uint32_t*>(s.p + swizzled<kKeys / 8>(i, lane / 4) + lane % 4 * 4) = two_bf16(p_low, p_high);
          if (lane == 0) {
            s.tile_max[i] = tile_max;
            s.tile_sum[i] = tile_sum;
            const float max = fmaxf(s.max[i], tile_max), before = weight(s.max[i], max), now = weight(tile_max, max);
            s.before[i] = before;
            s.now[i] = now;
            s.sum[i] = merged(s.sum[i], before, tile_sum, now);
            s.max[i] = max;
          }
        }
        await_copies<1>();  // the values
        __syncthreads();
        // Values: a warp has 32 of the 256 elements.
        const uint32_t weights = shared_address(s.p), cached = shared_address(s.v);
        float added[kTiles][4][4] = {};
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          uint32_t a[kTiles][4];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) load_matrices(a[tile], weights + swizzled<kKeys / 8>(tile * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
          for (int n = 0; n < 4; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, cached + swizzled<kPieces>(step * 16 + lane % 16, warp * 4 + n + lane / 16));
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              multiply_add(added[tile][n], a[tile], b[0], b[1]);
              multiply_add(added[tile][n + 1], a[tile], b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = tile * 16 + lane / 4 + half * 8;
            const float before = s.before[i], now = s.now[i];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              const float2 two = make_float2(added[tile][n][2 * half], added[tile][n][2 * half + 1]);
              if (in_cluster) {
                *reinterpret_cast<float2*>(&s.tile_values[i][warp * 32 + n * 8 + lane % 4 * 2]) = two;
              } else {
                values[tile][n][2 * half] = merged(values[tile][n][2 * half], before, two.x, now);
                values[tile][n][2 * half + 1] = merged(values[tile][n][2 * half + 1], before, two.y, now);
              }
            }
          }
        __syncthreads();
        fetch(s.v, args.kv.v, next);
      }
      // The part is complete.
      const auto part_of = [&](int i) {
        return args.parts +
               ((int64_t{s.rows[i] - args.first_decode_row} * args.num_q_heads + s.heads[i]) * args.max_parts + part - first_part) *
                   (kDim + 2);
      };
      if (in_cluster) {
        meet_cluster();
        constexpr int kPairs = kDim / kTilesPerPart / 2;  // of elements, which this block merges
        for (int item = thread; item < kLanes * kPairs; item += kThreads) {
          const int i = item / kPairs, e = (rank * kPairs + item % kPairs) * 2;
          if (s.rows[i] < 0) continue;
          float tile_max[kTilesPerPart], tile_sum[kTilesPerPart];
          float2 tile_values[kTilesPerPart];
#pragma unroll
          for (int t = 0; t < kTilesPerPart; ++t)
            if (part_begin + t < part_end) {
              tile_max[t] = *at_rank(&s.tile_max[i], t);
              tile_sum[t] = *at_rank(&s.tile_sum[i], t);
              tile_values[t] = *at_rank(reinterpret_cast<const float2*>(&s.tile_values[i][e]), t);
            }
          float max = -INFINITY, sum = 0;
          float2 both = make_float2(0, 0);
#pragma unroll
          for (int t = 0; t < kTilesPerPart; ++t)
            if (part_begin + t < part_end) {
              const float new_max = fmaxf(max, tile_max[t]), before = weight(max, new_max), now = weight(tile_max[t], new_max);
              sum = merged(sum, before, tile_sum[t], now);
              both.x = merged(both.x, before, tile_values[t].x, now);
              both.y = merged(both.y, before, tile_values[t].y, now);
              max = new_max;
            }
          float* to = part_of(i);
          *reinterpret_cast<float2*>(to + e) = both;
          if (e == 0) *reinterpret_cast<float2*>(to + kDim) = make_float2(max, sum);
        }
        meet_cluster();  // the tiles have been read
        continue;
      }
      if (shared_parts) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = tile * 16 + lane / 4 + half * 8;
            if (s.rows[i] < 0) continue;
            float* to = part_of(i);
#pragma unroll
            for (int n = 0; n < 4; ++n)
              *reinterpret_cast<float2*>(to + warp * 32 + n * 8 + lane % 4 * 2) = make_float2(values[tile][n][2 * half], values[tile][n][2 * half + 1]);
            if (warp == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(to + kDim) = make_float2(s.max[i], s.sum[i]);
          }
      } else {
        for (int i = thread; i < kLanes; i += kThreads) {
          const float max = fmaxf(s.total_max[i], s.max[i]);
          s.before[i] = weight(s.total_max[i], max);
          s.now[i] = weight(s.max[i], max);
          s.total_sum[i] = merged(s.total_sum[i], s.before[i], s.sum[i], s.now[i]);
          s.total_max[i] = max;
        }
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = tile * 16 + lane / 4 + e / 2 * 8;
              total[tile][n][e] = merged(total[tile][n][e], s.before[i], values[tile][n][e], s.now[i]);
            }
      }
      __syncthreads();
      for (int i = thread; i < kLanes; i += kThreads) {
        s.max[i] = -INFINITY;
        s.sum[i] = 0;
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) values[tile][n][e] = 0;
    }
    await_copies<0>();
    if (shared_parts) continue;
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = tile * 16 + lane / 4 + e / 2 * 8;
        if (s.rows[i] < 0) continue;
        const float factor = s.total_sum[i] > 0 ? v_scale / s.total_sum[i] : s.total_sum[i];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int64_t at = (int64_t{s.rows[i]} * args.num_q_heads + s.heads[i]) * kDim + warp * 32 + n * 8 + lane % 4 * 2 + e % 2;
          const float gate = load(args.gate, args.activation, at);
          store(args.out, args.activation, at, round_to(args.activation, total[tile][n][e] * factor) * round_to(args.activation, sigmoid(gate)));
        }
      }
  }
}

constexpr int kPromptRows = 16 * kWarps;
struct PromptShared {
  unsigned char k[2][kTileBytes], v[2][kTileBytes];
  unsigned char q[kPromptRows * kDim * 2];
};

/// blockIdx: (tile of 128 rows of a prompt run, query head). A warp has 16 rows, all keys and all 256 elements of them.
__device__ void prompt(const AttentionArgs& args) {
  extern __shared__ __align__(128) unsigned char memory[];
  PromptShared& s = *reinterpret_cast<PromptShared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, head = static_cast<int>(blockIdx.y);
  int tile = static_cast<int>(blockIdx.x), tiles = 0, number = 0;
  RunRecord run{};
  for (; number < args.step.num_runs; ++number) {
    run = args.step.runs[number];
    if (run.slot < 0 || (run.flags & kIsDecode) != 0) continue;
    tiles = (run.num_rows + kPromptRows - 1) / kPromptRows;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (number == args.step.num_runs) return;
  tile = tiles - 1 - tile;  // those with the most keys first
  const int first_row = run.first_row + tile * kPromptRows, num_rows = min(kPromptRows, run.num_rows - tile * kPromptRows);
  const int kv_head = args.kv_head[head];
  const int32_t* block_table = args.step.block_tables + int64_t{run.slot} * args.step.block_tables_stride;
  for (int item = thread; item < kPromptRows * kPieces; item += kThreads) {
    const int i = item / kPieces, piece = item % kPieces;
    unsigned char* to = s.q + swizzled<kPieces>(i, piece);
    if (i < num_rows)
      copy_async(to, static_cast<const __nv_bfloat16*>(args.query) + (int64_t{first_row + i} * args.num_q_heads + head) * kDim + piece * 8);
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  const bool fp8 = args.kv.dtype == DType::kE4M3;
  const float k_scale = fp8 && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f;
  const float v_scale = fp8 && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  const float scale = k_scale / sqrtf(static_cast<float>(kDim));
  // The lane's two rows.
  int index[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = warp * 16 + lane / 4 + half * 8;
    index[half] = i < num_rows ? args.step.indices[first_row + i] : -1;
  }
  int valid_rows = num_rows;  // padding stands at the end
  while (valid_rows > 0 && args.step.indices[first_row + valid_rows - 1] < 0) --valid_rows;
  const int last = valid_rows > 0 ? args.step.indices[first_row + valid_rows - 1] : -1;
  const int first_block = args.first_index / kKeys, last_block = last < 0 ? first_block - 1 : last / kKeys;
  float values[kDim / 8][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const auto fetch = [&](int block, int buffer) {
    const int64_t at = (int64_t{block_table[block]} * args.num_kv_heads + kv_head) * kKeys * kDim;
    const int begin = max(0, args.first_index - block * kKeys), end = min(kKeys, last + 1 - block * kKeys);
    load_rows(s.k[buffer], args.kv.k, args.kv.dtype, at, begin, end);
    load_rows(s.v[buffer], args.kv.v, args.kv.dtype, at, begin, end);
    commit_copies();
  };
  if (first_block <= last_block) fetch(first_block, 0);
  int buffer = 0;
  for (int block = first_block; block <= last_block; ++block, buffer ^= 1) {
    __syncthreads();
    if (block < last_block) {
      fetch(block + 1, buffer ^ 1);
      await_copies<1>();
    } else {
      await_copies<0>();
    }
    __syncthreads();
    float score[kKeys / 8][4] = {};
    const uint32_t keys = shared_address(s.k[buffer]), queries = shared_address(s.q), cached = shared_address(s.v[buffer]);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, queries + swizzled<kPieces>(warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t b[4];
        load_matrices(b, keys + swizzled<kPieces>((n + lane / 16) * 8 + lane % 8, step * 2 + lane / 8 % 2));
        multiply_add(score[n], a, b[0], b[1]);
        multiply_add(score[n + 1], a, b[2], b[3]);
      }
    }
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = maximum[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = block * kKeys + n * 8 + lane % 4 * 2 + e;
          float& x = score[n][2 * half + e];
          x = key <= index[half] && key >= args.first_index ? __fmul_rn(x, scale) : -INFINITY;
          new_max = fmaxf(new_max, x);
        }
      new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, 2));
      correction[half] = weight(maximum[half], new_max);
      maximum[half] = new_max;
      float added = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[n][2 * half + e];
          x = weight(x, new_max);
          added += x;
        }
      sum[half] = fmaf(sum[half], correction[half], added);  // of the lane's keys; the four lanes of a row are added at the end
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      values[n][0] *= correction[0];
      values[n][1] *= correction[0];
      values[n][2] *= correction[1];
      values[n][3] *= correction[1];
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint32_t a[4] = {two_bf16(score[2 * step][0], score[2 * step][1]), two_bf16(score[2 * step][2], score[2 * step][3]),
                             two_bf16(score[2 * step + 1][0], score[2 * step + 1][1]), two_bf16(score[2 * step + 1][2], score[2 * step + 1][3])};
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, cached + swizzled<kPieces>(step * 16 + lane % 16, n + lane / 16));
        multiply_add(values[n], a, b[0], b[1]);
        multiply_add(values[n + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    const int i = warp * 16 + lane / 4 + half * 8;
    if (i >= num_rows) continue;
    const float factor = sum[half] > 0 ? v_scale / sum[half] : sum[half];
    const int64_t at = (int64_t{first_row + i} * args.num_q_heads + head) * kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const auto gates = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(args.gate) + at + n * 8);
      const float low = round_to(DType::kBF16, values[n][2 * half] * factor) * round_to(DType::kBF16, sigmoid(__low2float(gates)));
      const float high = round_to(DType::kBF16, values[n][2 * half + 1] * factor) * round_to(DType::kBF16, sigmoid(__high2float(gates)));
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + at + n * 8) = two_bf16(low, high);
    }
  }
}

}  // namespace

static_assert(sizeof(DecodeShared<1>) <= kDecodeSharedBytes1 && sizeof(DecodeShared<2>) <= kDecodeSharedBytes2 && sizeof(PromptShared) <= kPromptSharedBytes);
static_assert(kPromptRows == kPromptTileRows);

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt(const __grid_constant__ AttentionArgs args) { prompt(args); }
extern "C" __global__ void __launch_bounds__(kThreads, 2) attention_decode_1(const __grid_constant__ AttentionArgs args) {
  decode<1>(args);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_decode_2(const __grid_constant__ AttentionArgs args) { decode<2>(args); }

/// Merges the parts of rows whose parts were shared among blocks. A block per row and query head, a thread an element.
extern "C" __global__ void __launch_bounds__(kDim) attention_merge(const __grid_constant__ AttentionArgs args) {
  static_assert(kThreads == kDim);
  __shared__ float before[kDim], now[kDim], sums[kDim], maxima[kWarps];
  const int row = args.first_decode_row + static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  release_successor();
  await_predecessor();
  const int run_number = args.step.row_runs[row], index = args.step.indices[row];
  if (run_number < 0 || index < 0) return;
  const RunRecord run = args.step.runs[run_number];
  if ((run.flags & kIsDecode) == 0) return;
  const int64_t at = (int64_t{row} * args.num_q_heads + head) * kDim + thread;
  const float gate = round_to(args.activation, sigmoid(load(args.gate, args.activation, at)));
  int last_row = run.first_row + run.num_rows - 1;
  while (args.step.indices[last_row] < 0) --last_row;
  const int first_part = args.first_index / static_cast<int>(kKvSplit);
  if (args.step.indices[last_row] / static_cast<int>(kKvSplit) - first_part + 1 > args.max_parts) return;  // one block's, and done
  const float* parts = args.parts + (int64_t{row - args.first_decode_row} * args.num_q_heads + head) * args.max_parts * (kDim + 2);
  const int num_parts = index / static_cast<int>(kKvSplit) - first_part + 1;
  float total = 0, max = -INFINITY, sum = 0;
  for (int first = 0; first < num_parts; first += kDim) {
    const int count = min(kDim, num_parts - first);
    // What each merge multiplies with depends on the largest maximum up to it.
    const float2 own =
        thread < count ? *reinterpret_cast<const float2*>(parts + int64_t{first + thread} * (kDim + 2) + kDim) : make_float2(-INFINITY, 0);
    float reached = own.x;
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(kAllLanes, reached, static_cast<unsigned>(distance));
      if (lane >= distance) reached = fmaxf(reached, other);
    }
    __syncthreads();
    if (lane == 31) maxima[warp] = reached;
    float earlier = __shfl_up_sync(kAllLanes, reached, 1);
    if (lane == 0) earlier = -INFINITY;
    __syncthreads();
    earlier = fmaxf(earlier, max);
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) earlier = fmaxf(earlier, maxima[w]);
      max = fmaxf(max, maxima[w]);
    }
    reached = fmaxf(earlier, own.x);
    before[thread] = weight(earlier, reached);
    now[thread] = weight(own.x, reached);
    sums[thread] = own.y;
    __syncthreads();
#pragma unroll 8
    for (int part = 0; part < count; ++part) {
      total = merged(total, before[part], parts[int64_t{first + part} * (kDim + 2) + thread], now[part]);
      sum = merged(sum, before[part], sums[part], now[part]);
    }
  }
  const bool scaled = args.kv.dtype == DType::kE4M3 && args.kv.v_scale != nullptr;
  const float factor = sum > 0 ? (scaled ? args.kv.v_scale[args.kv_head[head]] : 1.0f) / sum : sum;
  store(args.out, args.activation, at, round_to(args.activation, total * factor) * gate);
}

}  // namespace quern::cuda
