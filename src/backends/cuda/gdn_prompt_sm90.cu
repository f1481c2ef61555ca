#include "backends/cuda/gdn_prompt.cuh"
#include "backends/cuda/ptx_sm90.cuh"

// The scan of gdn_prompt.cu on Hopper: the same products by a warpgroup, which reads an operand of shared memory once for 64 columns of a head; the other operand stays in registers.

namespace quern::cuda {

namespace {

namespace hopper = sm90;

constexpr int kThreads = 128;
constexpr int kStages = kGdnPromptStages90;

/// A [64, 64] that stands in sums, in two parts, as four operands of 16 columns.
struct Operands {
  uint32_t rounded[4][4], remainder[4][4];
  __device__ __forceinline__ explicit Operands(const float (&x)[32]) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) split(x[8 * step + 2 * i], x[8 * step + 2 * i + 1], rounded[step][i], remainder[step][i]);
  }
};

/// sums (or +)= x M^T for a matrix M [64, 64] in two parts.
__device__ __forceinline__ void multiply_split(float (&sums)[32], const Operands& x, uint32_t matrix, uint32_t matrix_rest, int accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t m = hopper::operand(matrix) + step * 2, rest = hopper::operand(matrix_rest) + step * 2;
    hopper::wgmma_from_registers(sums, x.rounded[step], m, accumulate + step);
    hopper::wgmma_from_registers(sums, x.remainder[step], m, 1);
    hopper::wgmma_from_registers(sums, x.rounded[step], rest, 1);
  }
}

}  // namespace

/// blockIdx: (half of a value head's columns, run). A warp has 16 columns of S, transposed: rows of the A operand are columns of the head.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gdn_prompt_scan_sm90(const __grid_constant__ GdnPromptArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) uint64_t full[kStages];
  Stage* stages = reinterpret_cast<Stage*>(memory);
  static_assert(sizeof(Stage) % 1024 == 0);
  const GdnArgs& g = args.gdn;
  constexpr int kParts = kDim / kGdnPromptColumns;
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts, k_head = g.k_head[head];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, column = part * kGdnPromptColumns + warp * 16;
  const Chunks chunks(args, static_cast<int>(blockIdx.y));
  if (chunks.begin >= chunks.end) return;

  const auto fetch = [&](int tile) {  // one thread
    if (tile >= chunks.end) return;
    const int stage = (tile - chunks.begin) % kStages;
    Stage& s = stages[stage];
    const uint32_t barrier = hopper::shared_address(&full[stage]);
    const StageSource from = stage_source(args, tile, head, k_head, part);
    hopper::barrier_expect(barrier, kGdnPromptStageBytes);
    hopper::bulk_copy(hopper::shared_address(s.keys), from.keys, kGdnPromptRowBytes, barrier);
    hopper::bulk_copy(hopper::shared_address(s.queries), from.queries, kGdnPromptRowBytes, barrier);
    hopper::bulk_copy(hopper::shared_address(s.t), from.matrices, 4 * kGdnPromptImageBytes, barrier);
    hopper::bulk_copy(hopper::shared_address(s.values), from.values, kGdnPromptImageBytes, barrier);
    hopper::bulk_copy(hopper::shared_address(s.scalars), from.scalars, kGdnPromptScalarBytes, barrier);
  };
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) hopper::barrier_init(hopper::shared_address(&full[stage]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // bulk copies arrive at them
    for (int stage = 0; stage < kStages; ++stage) fetch(chunks.begin + stage);
  }
  __syncthreads();

  float* stored = g.state + ((int64_t{chunks.record.slot} * g.num_v_heads + head) * kDim + column + lane / 4) * kDim + lane % 4 * 2;
  float state[2][32];  // S transposed, elements 0 .. 63 and 64 .. 127 of k: of tile n columns lane / 4 (+ 8) of the warp's, elements 8 n + 2 (lane % 4) (+ 1)
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(stored + i / 2 % 2 * 8 * kDim + side * 64 + i / 4 * 8);
      state[side][i] = pair.x;
      state[side][i + 1] = pair.y;
    }
  bool folded = false;

  for (int tile = chunks.begin; tile < chunks.end; ++tile) {
    const Tile t = chunks.at(g, tile);
    const int turn = tile - chunks.begin;
    Stage& s = stages[turn % kStages];
    hopper::barrier_wait(hopper::shared_address(&full[turn % kStages]), static_cast<uint32_t>(turn / kStages % 2));
    const uint32_t keys = hopper::shared_address(s.keys), queries = hopper::shared_address(s.queries);

    float known[32], o[32];  // transposed as well: the tiles' columns are rows of the chunk
#pragma unroll
    for (int side = 0; side < 2; ++side) {  // one after the other: registers
      const Operands half(state[side]);
      hopper::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t k = hopper::operand(keys + side * kGdnPromptImageBytes) + step * 2, q = hopper::operand(queries + side * kGdnPromptImageBytes) + step * 2;
        hopper::wgmma_from_registers(known, half.rounded[step], k, side + step);
        hopper::wgmma_from_registers(o, half.rounded[step], q, side + step);
        hopper::wgmma_from_registers(known, half.remainder[step], k, 1);
        hopper::wgmma_from_registers(o, half.remainder[step], q, 1);
      }
      hopper::wgmma_commit();
      hopper::wgmma_wait_for(0);
      hopper::settle(known);
      hopper::settle(o);
    }
    const uint32_t values = hopper::shared_address(s.values);
#pragma unroll
    for (int n = 0; n < kChunk / 8; n += 2) {
      uint32_t v[4];  // tile n, columns 0 .. 7 and 8 .. 15; tile n + 1
      load_matrices_transposed(v, values + image_at(8 * n + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int at = 4 * (n + second);
        const float4 even = s.scalars[8 * (n + second) + lane % 4 * 2], odd = s.scalars[8 * (n + second) + lane % 4 * 2 + 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          known[at + 2 * half] = low_of(v[2 * second + half]) - even.x * known[at + 2 * half];
          known[at + 2 * half + 1] = high_of(v[2 * second + half]) - odd.x * known[at + 2 * half + 1];
          o[at + 2 * half] *= even.y;
          o[at + 2 * half + 1] *= odd.y;
        }
      }
    }
    float u[32];
    {
      const Operands rest(known);
      hopper::wgmma_fence();
      multiply_split(u, rest, hopper::shared_address(s.t), hopper::shared_address(s.t_rest), 0);
      hopper::wgmma_commit();
      hopper::wgmma_wait_for(0);
      hopper::settle(u);
    }
    const auto store_out = [&] {
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) store_transposed(g, t, head, column, n, o + 4 * n);
    };
    if (t.rows == kChunk) {
      const Operands updates(u);
      const float total = expf(s.scalars[kChunk - 1].w);
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 32; ++i) state[side][i] *= total;
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const float even = s.scalars[8 * n + lane % 4 * 2].z, odd = s.scalars[8 * n + lane % 4 * 2 + 1].z;
#pragma unroll
        for (int e = 0; e < 4; ++e) u[4 * n + e] *= e % 2 == 0 ? even : odd;
      }
      const Operands faded(u);
      hopper::wgmma_fence();
      multiply_split(o, updates, hopper::shared_address(s.p), hopper::shared_address(s.p_rest), 1);
      hopper::wgmma_commit();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const uint64_t k = hopper::operand(keys + side * kGdnPromptImageBytes + step * 16 * 128);
          hopper::wgmma_from_registers<1>(state[side], faded.rounded[step], k, 1);
          hopper::wgmma_from_registers<1>(state[side], faded.remainder[step], k, 1);
        }
      hopper::wgmma_commit();
      hopper::wgmma_wait_for(1);
      hopper::settle(o);
      store_out();
      hopper::wgmma_wait_for(0);
      hopper::settle(state[0]);
      hopper::settle(state[1]);
      folded = true;
    } else {  // the run's last chunk: its rows are kept
      const Operands updates(u);
      hopper::wgmma_fence();
      multiply_split(o, updates, hopper::shared_address(s.p), hopper::shared_address(s.p_rest), 1);
      hopper::wgmma_commit();
      hopper::wgmma_wait_for(0);
      hopper::settle(o);
      store_out();
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) keep_updates(g, t, head, column, n, u + 4 * n);
      if (part == 0) keep_keys<kThreads>(args, t, tile, head, s.keys, s.scalars);
    }
    __syncthreads();  // the stage is free
    if (thread == 0) fetch(tile + kStages);
  }
  if (!folded) return;
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < 32; i += 2)
      *reinterpret_cast<float2*>(stored + i / 2 % 2 * 8 * kDim + side * 64 + i / 4 * 8) = make_float2(state[side][i], state[side][i + 1]);
}

}  // namespace quern::cuda
