#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"
#include "backends/cuda/widen.cuh"

// Attention of prompt rows with matrix instructions, bf16 queries, heads of 256 elements, KV in bf16 or e4m3 (widened to bf16). Keys are taken a block of 64 at a time from the sequence's start. A row of a
// matrix instruction's result depends on its own row alone, so a row's bits depend on its index only.
//
// It fits the 99 KB of shared memory that every card from sm_80 on gives a block: 64 KB are the queries' tile, the rest two places for half a block of keys or of values each. While one half is
// multiplied the next arrives in the other place.

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPromptRows = 16 * kWarps;
constexpr int kHalfKeys = kKeys / 2, kHalfBytes = kTileBytes / 2, kRowBytes = kDim * 2;

struct PromptShared {
  unsigned char q[kPromptRows * kRowBytes];
  unsigned char places[2][kHalfBytes];
};

/// Half a block of keys or values on its way to a place of shared memory; rows outside [begin, end) become zero, since what stands in their place may be no number.
template <bool kCodes>
struct Half;
template <>
struct Half<false> {
  __device__ void ask(unsigned char* to, const void* cache, int64_t first_element, int begin, int end) {
    constexpr int kRows = kThreads / kPieces;  // at a time
    const int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
    const auto* from = static_cast<const unsigned char*>(cache) + first_element * 2 + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kHalfKeys / kRows; ++i) {
      const int key = row + i * kRows;
      copy_async(to + swizzled<kPieces>(key, piece), from + i * kThreads * 16, key >= begin && key < end);
    }
    commit_copies();
  }
  __device__ void put(unsigned char*) {}
  __device__ void await() { await_copies<0>(); }
};
/// Codes wait in registers until the half before them has been multiplied.
template <>
struct Half<true> {
  static constexpr int kPairs = kPieces / 2, kRows = kThreads / kPairs, kEach = kHalfKeys / kRows;
  uint4 codes[kEach];
  __device__ void ask(unsigned char*, const void* cache, int64_t first_element, int begin, int end) {
    const int row = static_cast<int>(threadIdx.x) / kPairs;
    const auto* from = static_cast<const unsigned char*>(cache) + first_element + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int key = row + i * kRows;
      codes[i] = key >= begin && key < end ? *reinterpret_cast<const uint4*>(from + i * kThreads * 16) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ void put(unsigned char* to) {
    const int row = static_cast<int>(threadIdx.x) / kPairs, pair = static_cast<int>(threadIdx.x) % kPairs;
    const bool second_first = (pair & 4) != 0;  // eight threads write to different banks
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint4 low = widened(codes[i].x, codes[i].y), high = widened(codes[i].z, codes[i].w);
      *reinterpret_cast<uint4*>(to + swizzled<kPieces>(row + i * kRows, 2 * pair + (second_first ? 1 : 0))) = second_first ? high : low;
      *reinterpret_cast<uint4*>(to + swizzled<kPieces>(row + i * kRows, 2 * pair + (second_first ? 0 : 1))) = second_first ? low : high;
    }
  }
  __device__ void await() {}
};

__device__ uint32_t row_address(const void* tile, int row) { return shared_address(tile) + static_cast<uint32_t>(row * kRowBytes); }
/// From a row's start to piece `piece` (even) and the lane's: one operation, since `piece` is a constant.
__device__ uint32_t piece_offset(uint32_t turn, int piece) { return (turn ^ static_cast<uint32_t>(piece % 8 * 16)) + static_cast<uint32_t>(piece / 8 * 128); }

/// blockIdx: (query head, tile of 128 rows of a prompt run). A warp has 16 rows, all keys and all 256 elements of them.
template <bool kCodes>
__device__ void prompt(const AttentionArgs& args) {
  extern __shared__ __align__(128) unsigned char memory[];
  PromptShared& s = *reinterpret_cast<PromptShared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, head = static_cast<int>(blockIdx.x);
  int tile = static_cast<int>(blockIdx.y), tiles = 0, number = 0;
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
    copy_async(s.q + swizzled<kPieces>(i, piece), static_cast<const __nv_bfloat16*>(args.query) + (int64_t{first_row + min(i, num_rows - 1)} * args.num_q_heads + head) * kDim + piece * 8, i < num_rows);
  }
  commit_copies();
  const float k_scale = kCodes && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f;
  const float v_scale = kCodes && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  const float scale = k_scale / sqrtf(static_cast<float>(kDim));
  // The lane's two rows.
  int index[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = warp * 16 + lane / 4 + half * 8;
    index[half] = i < num_rows ? args.step.indices[first_row + i] : -1;
  }
  const int last_of_warp = __reduce_max_sync(kAllLanes, max(index[0], index[1]));  // further keys change nothing
  int valid_rows = num_rows;  // padding stands at the end
  while (valid_rows > 0 && args.step.indices[first_row + valid_rows - 1] < 0) --valid_rows;
  const int last = valid_rows > 0 ? args.step.indices[first_row + valid_rows - 1] : -1;
  const int first_block = args.first_index / kKeys, last_block = last < 0 ? first_block - 1 : last / kKeys;
  float values[kDim / 8][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  Half<kCodes> half_block;
  /// Part 0 and 1 of a block are its keys, 2 and 3 its values.
  const auto ask = [&](int block, int page, int part) {
    const int first = part % 2 * kHalfKeys, before = block * kKeys + first;
    half_block.ask(s.places[part % 2], part < 2 ? args.kv.k : args.kv.v, ((int64_t{page} * args.num_kv_heads + kv_head) * kKeys + first) * kDim, args.first_index - before, last + 1 - before);
  };
  int page = 0, next_page = 0;
  if (first_block <= last_block) {
    page = block_table[first_block];
    ask(first_block, page, 0);
    half_block.put(s.places[0]);
  }
  // Where a lane finds its rows of what matrix instructions load, and its piece in the first of their pieces, permuted by the row as swizzled() has it.
  const uint32_t queries = row_address(s.q, warp * 16 + lane % 16), keys = row_address(s.places, lane / 16 * 8 + lane % 8), cached = row_address(s.places, lane % 16);
  const uint32_t key_turn = static_cast<uint32_t>((lane / 8 % 2 ^ lane % 8) * 16), turn = static_cast<uint32_t>((lane / 16 ^ lane % 8) * 16);
  for (int block = first_block; block <= last_block; ++block, page = next_page) {
    if (block < last_block) next_page = block_table[block + 1];
    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      half_block.await();
      if (kCodes && part == 0 && block == first_block) await_copies<0>();  // the queries
      __syncthreads();  // this part is there, and the place of the one before is free
      if (part < 3) ask(block, page, part + 1);
      else if (block < last_block) ask(block + 1, next_page, 0);
      const uint32_t place = part % 2 * kHalfBytes;
      if (block * kKeys + part % 2 * kHalfKeys <= last_of_warp) {
        if (part < 2) {
#pragma unroll
          for (int step = 0; step < kDim / 16; ++step) {
            uint32_t a[4];
            load_matrices(a, queries + piece_offset(turn, step * 2));
#pragma unroll
            for (int n = 0; n < kHalfKeys / 8; n += 2) {
              uint32_t b[4];
              load_matrices(b, keys + place + n * 8 * kRowBytes + piece_offset(key_turn, step * 2));
              multiply_add(score[part * kHalfKeys / 8 + n], a, b[0], b[1]);
              multiply_add(score[part * kHalfKeys / 8 + n + 1], a, b[2], b[3]);
            }
          }
        } else {
#pragma unroll
          for (int step = 0; step < kHalfKeys / 16; ++step) {
            const int n0 = (part - 2) * kHalfKeys / 8 + 2 * step;
            const uint32_t a[4] = {bf16_pair(score[n0][0], score[n0][1]), bf16_pair(score[n0][2], score[n0][3]), bf16_pair(score[n0 + 1][0], score[n0 + 1][1]), bf16_pair(score[n0 + 1][2], score[n0 + 1][3])};
#pragma unroll
            for (int n = 0; n < kDim / 8; n += 2) {
              uint32_t b[4];
              load_matrices_transposed(b, cached + place + step * 16 * kRowBytes + piece_offset(turn, n));
              multiply_add(values[n], a, b[0], b[1]);
              multiply_add(values[n + 1], a, b[2], b[3]);
            }
          }
        }
      }
      if (part == 1 && block * kKeys <= last_of_warp) {
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
      }
      if (part < 3 || block < last_block) half_block.put(s.places[(part + 1) % 2]);
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

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt_bf16(const __grid_constant__ AttentionArgs args) { prompt<false>(args); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt_e4m3(const __grid_constant__ AttentionArgs args) { prompt<true>(args); }

}  // namespace quern::cuda
