#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"
#include "backends/cuda/ptx_sm90.cuh"

// Prompt rows on Hopper: as attention_prompt of attention_mma.cu, a tile of 128 rows and a query head a block, with two warpgroups that multiply 64 rows each and a third that brings keys and
// values. A row takes its keys a block of 64 at a time from the sequence's start on, whatever the other rows of the tile are; blocks past a row change nothing.

namespace quern::cuda {

namespace {

namespace hopper = sm90;

constexpr int kRows = kPromptTileRows, kConsumers = 256, kProducers = 128, kThreads = kConsumers + kProducers;
constexpr int kImages = kDim / 64;  // of 64 columns
constexpr int kKeyImageBytes = kKeys * 128, kQueryImageBytes = kRows * 128;

/// Images of 64 columns: rows of 128 bytes, swizzled as in mma.cuh.
struct Shared {
  unsigned char k[2][kTileBytes], v[2][kTileBytes];
  unsigned char q[kRows * kDim * 2];
  uint64_t full[2][2], empty[2][2];  // of keys and of values, by place
};
static_assert(sizeof(Shared) <= kPromptSharedBytes90);

struct KeyPlace {
  __device__ uint32_t operator()(int row, int piece) const { return static_cast<uint32_t>(piece / 8 * kKeyImageBytes) + swizzled<8>(row, piece % 8); }
};

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A prompt tile: its run, and rows.
struct Tile {
  RunRecord run;
  int first_row, num_rows, last;  // step's rows; the index of the last that is no padding, -1: none
};
__device__ Tile tile_of(const AttentionArgs& args, int tile) {
  for (int number = 0; number < args.step.num_runs; ++number) {
    const RunRecord run = args.step.runs[number];
    if (run.slot < 0 || (run.flags & kIsDecode) != 0) continue;
    const int tiles = (run.num_rows + kRows - 1) / kRows;
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    tile = tiles - 1 - tile;  // those with the most keys first
    Tile t{run, run.first_row + tile * kRows, min(kRows, run.num_rows - tile * kRows), -1};
    for (int i = t.num_rows - 1; i >= 0 && t.last < 0; --i) t.last = args.step.indices[t.first_row + i];  // padding stands at the end
    return t;
  }
  return {{}, 0, 0, -1};
}

/// Brings keys and values of a block of 64 in turns. A place is free when what it held is used up: that of keys once their scores are known, while the values before
/// are still needed, so that two to three tiles are on their way.
__device__ __forceinline__ void produce(const AttentionArgs& args, Shared& s, const Tile& t, int kv_head, int first_block, int last_block) {
  const int32_t* block_table = args.step.block_tables + int64_t{t.run.slot} * args.step.block_tables_stride;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, count = 2 * (last_block + 1 - first_block);
  const auto announce = [&](int number) {
    hopper::fence_async_proxy();  // what this thread has written will be read by the matrix units
    hopper::barrier_arrive(hopper::shared_address(&s.full[number % 2][number / 2 % 2]));
  };
  for (int number = 0; number < count; ++number) {
    const int block = first_block + number / 2, place = number / 2 % 2;
    hopper::barrier_wait(hopper::shared_address(&s.empty[number % 2][place]), static_cast<uint32_t>(number / 4 % 2 ^ 1));
    const int64_t at = (int64_t{block_table[block]} * args.num_kv_heads + kv_head) * kKeys * kDim;
    const int begin = max(0, args.first_index - block * kKeys), end = min(kKeys, t.last + 1 - block * kKeys);
    load_tile<kProducers>(number % 2 == 0 ? s.k[place] : s.v[place], KeyPlace(), thread, number % 2 == 0 ? args.kv.k : args.kv.v, args.kv.dtype, at, begin, end);
    commit_copies();
    if (number > 0) {
      await_copies<1>();
      announce(number - 1);
    }
  }
  await_copies<0>();
  if (count > 0) announce(count - 1);
}

/// What a lane knows of its two rows.
struct Rows {
  int index[2], least;  // least: of the warp's rows
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {}, correction[2];
};

__device__ __forceinline__ void begin_scores(float (&score)[32], uint32_t queries, uint32_t keys) {
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step)
    hopper::wgmma<64, false>(score, hopper::operand(queries + step / 4 * kQueryImageBytes) + step % 4 * 2, hopper::operand(keys + step / 4 * kKeyImageBytes) + step % 4 * 2, step);
  hopper::wgmma_commit();
}
__device__ __forceinline__ void begin_values(float (&values)[kImages][32], const uint32_t (&a)[kKeys / 16][4], uint32_t cached) {
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int image = 0; image < kImages; ++image)
      hopper::wgmma_from_registers<1>(values[image], a[step], hopper::operand(cached + image * kKeyImageBytes + step * 16 * 128), 1);
  hopper::wgmma_commit();
}

/// From scores to weights, with what the values before them are multiplied with.
__device__ __forceinline__ void weigh(float (&score)[32], Rows& rows, int block, int first_index, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // score[4 n + 2 half + e] is the row's with key 8 n + 2 (lane % 4) + e; from here on in powers of two.
  if (block * kKeys < first_index || (block + 1) * kKeys - 1 > rows.least) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int key = block * kKeys + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (key > rows.index[i / 2 % 2] || key < first_index) score[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const float new_max = fmaxf(rows.maximum[half], __fmul_rn(largest, scale)), shift = new_max == -INFINITY ? 0.0f : new_max;
    rows.correction[half] = exp2_of(rows.maximum[half] - shift);
    rows.maximum[half] = new_max;
    float added = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = score[4 * n + 2 * half + e];
        x = exp2_of(fmaf(x, scale, -shift));
        added += x;
      }
    rows.sum[half] = fmaf(rows.sum[half], rows.correction[half], added);  // of the lane's keys; the four lanes of a row are added at the end
  }
}
/// The weights as operands, and the values so far corrected.
__device__ __forceinline__ void take_weights(const float (&score)[32], const Rows& rows, uint32_t (&a)[kKeys / 16][4], float (&values)[kImages][32]) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[step][i] = two_bf16(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
#pragma unroll
  for (int image = 0; image < kImages; ++image)
#pragma unroll
    for (int i = 0; i < 32; ++i) values[image][i] *= rows.correction[i / 2 % 2];
}

__device__ __forceinline__ void consume(const AttentionArgs& args, Shared& s, const Tile& t, int head, int kv_head, int first_block, int last_block) {
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128, warp = thread / 32, lane = thread % 32;
  const bool fp8 = args.kv.dtype == DType::kE4M3;
  const float k_scale = fp8 && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f;
  const float v_scale = fp8 && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  constexpr float kLog2OfE = 1.4426950408889634f;
  const float scale = k_scale / sqrtf(static_cast<float>(kDim)) * kLog2OfE;
  Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = warp * 16 + lane / 4 + half * 8;
    rows.index[half] = i < t.num_rows ? args.step.indices[t.first_row + i] : -1;
  }
  rows.least = __reduce_min_sync(kAllLanes, min(rows.index[0], rows.index[1]));
  const uint32_t queries = hopper::shared_address(s.q) + group * 64 * 128;
  float values[kImages][32] = {}, score[32];
  uint32_t a[kKeys / 16][4];
  const auto place = [&](int block) { return (block - first_block) % 2; };
  const auto await = [&](int kind, int block) {
    hopper::barrier_wait(hopper::shared_address(&s.full[kind][place(block)]), static_cast<uint32_t>((block - first_block) / 2 % 2));
  };
  const auto release = [&](int kind, int block) {
    if (lane == 0) hopper::barrier_arrive(hopper::shared_address(&s.empty[kind][place(block)]));
  };
  const auto keys = [&](int block) { return hopper::shared_address(s.k[place(block)]); };
  const auto cached = [&](int block) { return hopper::shared_address(s.v[place(block)]); };
  for (int block = first_block; block <= last_block; ++block) {
    await(0, block);
    begin_scores(score, queries, keys(block));
    hopper::wgmma_wait_for(0);
    hopper::settle(score);
    release(0, block);
    weigh(score, rows, block, args.first_index, scale);
    take_weights(score, rows, a, values);
    await(1, block);
    begin_values(values, a, cached(block));
    hopper::wgmma_wait_for(0);
#pragma unroll
    for (int image = 0; image < kImages; ++image) hopper::settle(values[image]);
    release(1, block);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int i = warp * 16 + lane / 4 + half * 8;
    if (i >= t.num_rows) continue;
    const float factor = sum > 0 ? v_scale / sum : sum;
    const int64_t at = (int64_t{t.first_row + i} * args.num_q_heads + head) * kDim + lane % 4 * 2;
#pragma unroll
    for (int image = 0; image < kImages; ++image)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int64_t to = at + image * 64 + n * 8;
        const auto gates = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(args.gate) + to);
        const float low = round_to(DType::kBF16, values[image][4 * n + 2 * half] * factor) * round_to(DType::kBF16, sigmoid(__low2float(gates)));
        const float high = round_to(DType::kBF16, values[image][4 * n + 2 * half + 1] * factor) * round_to(DType::kBF16, sigmoid(__high2float(gates)));
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + to) = two_bf16(low, high);
      }
  }
}

}  // namespace

/// blockIdx: (tile of 128 rows of a prompt run, query head).
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt_sm90(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.y), kv_head = args.kv_head[head];
  const Tile t = tile_of(args, static_cast<int>(blockIdx.x));
  if (t.num_rows == 0) return;
  for (int item = thread; item < kRows * kPieces; item += kThreads) {
    const int i = item / kPieces, piece = item % kPieces;
    unsigned char* to = s.q + piece / 8 * kQueryImageBytes + swizzled<8>(i, piece % 8);
    if (i < t.num_rows)
      copy_async(to, static_cast<const __nv_bfloat16*>(args.query) + (int64_t{t.first_row + i} * args.num_q_heads + head) * kDim + piece * 8);
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  commit_copies();
  if (thread == 0)
    for (int i = 0; i < 4; ++i) {
      hopper::barrier_init(hopper::shared_address(&s.full[i / 2][i % 2]), kProducers);
      hopper::barrier_init(hopper::shared_address(&s.empty[i / 2][i % 2]), kConsumers / 32);
    }
  await_copies<0>();
  hopper::fence_async_proxy();
  __syncthreads();
  const int first_block = args.first_index / kKeys, last_block = t.last < 0 ? first_block - 1 : t.last / kKeys;
  if (thread >= kConsumers) {
    hopper::fewer_registers<40>();
    produce(args, s, t, kv_head, first_block, last_block);
  } else {
    hopper::more_registers<232>();
    consume(args, s, t, head, kv_head, first_block, last_block);
  }
}

}  // namespace quern::cuda
