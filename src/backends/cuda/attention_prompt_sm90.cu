#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"
#include "backends/cuda/ptx_sm90.cuh"

// Prompt rows on Hopper: as attention_prompt of attention_mma.cu, a tile of 128 rows and a query head a block, with two warpgroups that multiply 64 rows each and a third that brings keys and
// values. A row takes its keys a block of 64 at a time from the sequence's start on, whatever the other rows of the tile are; blocks past a row change nothing. While weights are multiplied with
// values, the scores of the next block are on their way and then turned into weights.

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
  unsigned char codes[2][kTileBytes / 2];    // blocks of keys and values in e4m3, which are then widened
  uint64_t full[2][2], empty[2][2], came[2];  // of keys and of values, by place; of codes
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

/// Keys, then values of block after block, in turns. A place is free when what it held is used up: that of keys once their scores are known, while the values before are still needed, so that
/// two to three tiles are on their way.
struct Turn {
  int number, block, page, begin, end;  // rows [begin, end) of the block are there; what stands in the others' place may be no number
  __device__ Turn(const AttentionArgs& args, const Tile& t, int kv_head, int first_block, int number) : number(number), block(first_block + number / 2) {
    page = args.step.block_tables[int64_t{t.run.slot} * args.step.block_tables_stride + block] * args.num_kv_heads + kv_head;
    begin = max(0, args.first_index - block * kKeys);
    end = min(kKeys, t.last + 1 - block * kKeys);
  }
  [[nodiscard]] __device__ bool values() const { return number % 2 != 0; }
  [[nodiscard]] __device__ int place() const { return number / 2 % 2; }
  [[nodiscard]] __device__ unsigned char* tile(Shared& s) const { return values() ? s.v[place()] : s.k[place()]; }
  [[nodiscard]] __device__ uint32_t full(Shared& s) const { return hopper::shared_address(&s.full[values()][place()]); }
  __device__ void await_place(Shared& s) const { hopper::barrier_wait(hopper::shared_address(&s.empty[values()][place()]), static_cast<uint32_t>(number / 4 % 2 ^ 1)); }
};

/// bf16: whole blocks by the tensor memory accelerator, others by all threads.
__device__ __forceinline__ void produce(const AttentionPromptArgs& prompt, Shared& s, const Tile& t, int kv_head, int first_block, int last_block) {
  const AttentionArgs& args = prompt.attention;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, count = 2 * (last_block + 1 - first_block);
  for (int number = 0; number < count; ++number) {
    const Turn turn(args, t, kv_head, first_block, number);
    const bool whole = turn.begin == 0 && turn.end == kKeys;
    if (thread == 0) {
      turn.await_place(s);
      if (whole) {
        hopper::barrier_expect(turn.full(s), kTileBytes);
        hopper::tensor_copy(hopper::shared_address(turn.tile(s)), turn.values() ? &prompt.v : &prompt.k, 0, turn.page * kKeys, 0, turn.full(s));
      }
    }
    if (whole) continue;
    hopper::named_barrier<3, kProducers>();
    load_tile<kProducers>(turn.tile(s), KeyPlace(), thread, turn.values() ? args.kv.v : args.kv.k, DType::kBF16, int64_t{turn.page} * kKeys * kDim, turn.begin, turn.end);
    commit_copies();
    await_copies<0>();
    hopper::fence_async_proxy();  // what this thread has written will be read by the matrix units
    hopper::named_barrier<3, kProducers>();
    if (thread == 0) hopper::barrier_arrive(turn.full(s));
  }
}

/// e4m3: a block's codes come as they are, while those before them are widened.
__device__ __forceinline__ void produce_widened(const AttentionArgs& args, Shared& s, const Tile& t, int kv_head, int first_block, int last_block) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, count = 2 * (last_block + 1 - first_block);
  const auto fetch = [&](int number) {  // one thread
    if (number >= count) return;
    const Turn turn(args, t, kv_head, first_block, number);
    const uint32_t came = hopper::shared_address(&s.came[number % 2]);
    hopper::barrier_expect(came, kTileBytes / 2);
    hopper::bulk_copy(hopper::shared_address(s.codes[number % 2]), static_cast<const unsigned char*>(turn.values() ? args.kv.v : args.kv.k) + int64_t{turn.page} * kKeys * kDim, kTileBytes / 2, came);
  };
  if (thread == 0) {
    fetch(0);
    fetch(1);
  }
  for (int number = 0; number < count; ++number) {
    const Turn turn(args, t, kv_head, first_block, number);
    hopper::barrier_wait(hopper::shared_address(&s.came[number % 2]), static_cast<uint32_t>(number / 2 % 2));
    if (thread == 0) turn.await_place(s);
    hopper::named_barrier<3, kProducers>();
    load_tile<kProducers>(turn.tile(s), KeyPlace(), thread, s.codes[number % 2], DType::kE4M3, 0, turn.begin, turn.end);
    hopper::fence_async_proxy();
    hopper::named_barrier<3, kProducers>();
    if (thread == 0) {
      hopper::barrier_arrive(turn.full(s));
      fetch(number + 2);
    }
  }
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
__device__ __forceinline__ void begin_values(float (&values)[kDim / 2], const uint32_t (&a)[kKeys / 16][4], uint32_t cached) {
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) hopper::wgmma_from_registers_wide(values, a[step], hopper::operand_of_images(cached + step * 16 * 128, kKeyImageBytes));
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
/// The weights as operands.
__device__ __forceinline__ void take_weights(const float (&score)[32], uint32_t (&a)[kKeys / 16][4]) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[step][i] = bf16_pair(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
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
  float values[kDim / 2] = {}, score[32];
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
  if (first_block <= last_block) {
    await(0, first_block);
    begin_scores(score, queries, keys(first_block));
    hopper::wgmma_wait_for(0);
    hopper::settle(score);
    release(0, first_block);
    weigh(score, rows, first_block, args.first_index, scale);
    take_weights(score, a);
    for (int block = first_block; block < last_block; ++block) {
      await(0, block + 1);
      begin_scores(score, queries, keys(block + 1));
      await(1, block);
      begin_values(values, a, cached(block));
      hopper::wgmma_wait_for(1);
      hopper::settle(score);
      release(0, block + 1);
      weigh(score, rows, block + 1, args.first_index, scale);
      hopper::wgmma_wait_for(0);
      hopper::settle(values);
      release(1, block);
      if (__any_sync(kAllLanes, rows.correction[0] != 1.0f || rows.correction[1] != 1.0f)) {  // maxima soon stand still
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) values[i] *= rows.correction[i / 2 % 2];
      }
      take_weights(score, a);
    }
    await(1, last_block);
    begin_values(values, a, cached(last_block));
    hopper::wgmma_wait_for(0);
    hopper::settle(values);
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
        const float low = round_to(DType::kBF16, values[32 * image + 4 * n + 2 * half] * factor) * round_to(DType::kBF16, sigmoid(__low2float(gates)));
        const float high = round_to(DType::kBF16, values[32 * image + 4 * n + 2 * half + 1] * factor) * round_to(DType::kBF16, sigmoid(__high2float(gates)));
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + to) = bf16_pair(low, high);
      }
  }
}

template <bool kE4m3>
__device__ __forceinline__ void attend(const AttentionPromptArgs& prompt) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const AttentionArgs& args = prompt.attention;
  const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x), kv_head = args.kv_head[head];
  const Tile t = tile_of(args, static_cast<int>(blockIdx.y));
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
  if (thread == 0) {
    for (int i = 0; i < 4; ++i) {
      hopper::barrier_init(hopper::shared_address(&s.full[i / 2][i % 2]), 1);
      hopper::barrier_init(hopper::shared_address(&s.empty[i / 2][i % 2]), kConsumers / 32);
    }
    for (uint64_t& came : s.came) hopper::barrier_init(hopper::shared_address(&came), 1);
    hopper::fence_barrier_init();
  }
  await_copies<0>();
  hopper::fence_async_proxy();
  __syncthreads();
  const int first_block = args.first_index / kKeys, last_block = t.last < 0 ? first_block - 1 : t.last / kKeys;
  if (thread >= kConsumers) {
    hopper::fewer_registers<40>();
    if constexpr (kE4m3)
      produce_widened(args, s, t, kv_head, first_block, last_block);
    else
      produce(prompt, s, t, kv_head, first_block, last_block);
  } else {
    hopper::more_registers<232>();
    consume(args, s, t, head, kv_head, first_block, last_block);
  }
}

}  // namespace

/// blockIdx: (query head, tile of 128 rows of a prompt run), by the dtype of the cache.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt_bf16_sm90(const __grid_constant__ AttentionPromptArgs args) { attend<false>(args); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_prompt_e4m3_sm90(const __grid_constant__ AttentionPromptArgs args) { attend<true>(args); }

}  // namespace quern::cuda
