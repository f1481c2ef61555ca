#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"

// Attention of prompt rows with matrix instructions, bf16 queries, heads of 256 elements, KV in bf16 or e4m3 (widened to bf16). Keys are taken a block of 64 at a time from the sequence's start. A row of a
// matrix instruction's result depends on its own row alone, so a row's bits depend on its index only.

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// A tile of keys or values: rows of kPieces pieces.
struct RowPlace {
  __device__ uint32_t operator()(int row, int piece) const { return swizzled<kPieces>(row, piece); }
};
__device__ void load_rows(unsigned char* tile, const void* cache, DType dtype, int64_t first_element, int begin, int end) {
  load_tile<kThreads>(tile, RowPlace(), static_cast<int>(threadIdx.x), cache, dtype, first_element, begin, end);
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
      const uint32_t a[4] = {bf16_pair(score[2 * step][0], score[2 * step][1]), bf16_pair(score[2 * step][2], score[2 * step][3]),
                             bf16_pair(score[2 * step + 1][0], score[2 * step + 1][1]), bf16_pair(score[2 * step + 1][2], score[2 * step + 1][3])};
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
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + at + n * 8) = bf16_pair(low, high);
    }
  }
}

}  // namespace

static_assert(sizeof(PromptShared) <= kPromptSharedBytes);
static_assert(kPromptRows == kPromptTileRows);

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt(const __grid_constant__ AttentionArgs args) { prompt(args); }

}  // namespace quern::cuda
