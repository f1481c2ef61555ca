#include "backends/cuda/gdn_decode.cuh"

// Decode and verify rows of heads of 128 x 128, a block a head and run. The head's 128 columns of S are held in registers: 16 warps of 8
// columns each, a lane has 4 of the 128 rows. S is read once a step, for up to 4 rows at a time, and written only when the 64 rows of a
// chunk are folded in. A block is idle until its loads arrive, so they are issued together: state, ring and taps before the projections of
// the step are awaited, then everything of the rows. Two blocks of single rows fit a multiprocessor, so that one reads while the other
// computes. Every sum has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda {

namespace {

using namespace gdn;

/// kRows: taken at a time.
template <int kRows, class Ring>
struct Shared {
  Ring k[kGrid][kKeyStride<Ring>];
  Ring u[kGrid][kValueStride<Ring>];
  float sums[kGrid];
  float factors[kGrid];
  float taps[4][3 * kDim];
  __nv_bfloat16 columns[kRows + 3][3 * kDim];
  __nv_bfloat16 z[kRows][kDim];
  float q[kRows][kDim];
  float along_k[kRows][kGrid];
  float along_q[kRows][kGrid];
  float beta[kRows];
  float squares[kRows][kWarps];
};

/// The second launch: keys and raw columns of runs whose places other heads may have been reading. Only the head's v channels are its own;
/// the first head of a key head keeps q and k.
template <class Ring>
__device__ void keep(const GdnArgs& g, const Place& p, bool committed, bool first_of_key) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (first_of_key)
    for (int index = max(p.cursor, p.end - p.ring_length) + warp; index < p.end; index += kWarps) {
      const int channel = p.channel(g, 2) + 4 * lane;
      uint2 columns[4];
      float4 taps[4];
#pragma unroll
      for (int tap = 0; tap < 4; ++tap) {
        columns[tap] = *reinterpret_cast<const uint2*>(p.columns(g, index - 3 + tap) + channel);
        taps[tap] = four(g.conv + tap * p.channels + channel);
      }
      put_four(static_cast<Ring*>(g.ring_k) + (p.ring_row(index) * g.num_k_heads + p.k_head) * kDim + 4 * lane,
               normalized(columns, taps, index, 1.0f));
    }
  __syncthreads();  // the keys were made from the window's columns
  keep_boundary_columns(g, p, committed, first_of_key);
  const int part = thread / kDim, channel = p.channel(g, part % 3) + thread % kDim;
  if (part < (first_of_key ? 3 : 1))
    for (int index = max(p.cursor, p.end - p.window_length); index < p.end; ++index)
      window_row(g, p, index)[channel] = p.columns(g, index)[channel];
}

template <int kRows, class Ring>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kRows, Ring>;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory& m = *reinterpret_cast<Memory*>(memory);
  const Chunk<Ring> s{m.k, m.u, m.sums, m.factors, m.taps, m.columns, m.z, m.q, m.along_k, m.along_q, m.beta, m.squares};
  const auto barrier = [] { __syncthreads(); };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const RunRecord record = g.step.runs[blockIdx.y];
  if (record.slot < 0 || record.num_rows == 0 || (record.flags & kIsDecode) == 0) {
    release_successor();
    await_predecessor();
    return;
  }
  Place p;
  p.slot = record.slot;
  p.first_row = record.first_row;
  p.cursor = g.step.cursor[record.slot];
  p.end = p.cursor + (kRows == 1 ? 1 : record.num_rows);
  p.head = static_cast<int>(blockIdx.x);
  p.k_head = g.k_head[p.head];
  p.channels = (2 * g.num_k_heads + g.num_v_heads) * kDim;
  p.ring_length = static_cast<int>(kGrid) + g.k_max + 1;
  p.window_length = 3 + g.k_max + 1;
  const bool committed = (record.flags & kIsCommitted) != 0;
  int boundary = g.step.boundary[p.slot];
  const bool fold_is_due = boundary + kGrid <= p.cursor;
  // What a verify writes has places of its own in window and ring, but for the keys of more than one row after a fold that other heads may
  // still have to do: a second launch keeps those.
  const bool keeps_at_once = kRows == 1 || record.num_rows == 1 || (record.num_rows <= g.k_max + 1 && !fold_is_due);
  bool earlier = false;  // a value head with the same key head comes before this one
#pragma unroll 1
  for (int head = thread; head < p.head; head += kThreads) earlier = earlier || g.k_head[head] == p.k_head;
  if ((g.phases & kGdnCompute) == 0) {
    release_successor();
    await_predecessor();
    if (!keeps_at_once) keep<Ring>(g, p, committed, __syncthreads_or(earlier) == 0);
    return;
  }

  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  const int column = warp * kColumns;  // of the warp
  float* stored = g.state + ((int64_t{p.slot} * g.num_v_heads + p.head) * kDim + column) * kDim + 4 * lane;
  float4 state[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) state[c] = *reinterpret_cast<const float4*>(stored + c * kDim);
  const auto store_state = [&] {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) *reinterpret_cast<float4*>(stored + c * kDim) = state[c];
  };
  const float decay_rate = g.decay[p.head], dt_bias = g.dt_bias[p.head], norm_weight = g.norm[column + lane / 4];
#pragma unroll 1
  for (int item = thread; item < 4 * 3 * kDim / 4; item += kThreads) {
    const int tap = item / (3 * kDim / 4), part = item / (kDim / 4) % 3, i = item % (kDim / 4) * 4;
    copy_async(&s.taps[tap][part * kDim + i], g.conv + tap * p.channels + p.channel(g, part) + i);
  }
  read_columns(g, p, s, p.cursor - 3, 3, 0);
  if (fold_is_due) {
    read_ring(g, p, s, boundary, static_cast<int>(kGrid));
    await_copies<0>();
    __syncthreads();
    fold(s, state, warp, lane, barrier);
    store_state();
    boundary += static_cast<int>(kGrid);
  }
  read_ring(g, p, s, boundary, p.cursor - boundary);
  const bool first_of_key = __syncthreads_or(earlier) == 0;
  if (thread == 0) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x + gridDim.x * blockIdx.y), static_cast<int>(gridDim.x * gridDim.y));
  release_successor();
  await_predecessor();

  for (int index = p.cursor; index < p.end;) {
    if (index == boundary + kGrid) {
      fold(s, state, warp, lane, barrier);
      if (committed) store_state();
      boundary += static_cast<int>(kGrid);
    }
    const int rows = kRows == 1 ? 1 : min(min(kRows, p.end - index), boundary + static_cast<int>(kGrid) - index), first = index - boundary;
    const int row = p.first_row + index - p.cursor;
    if (index == p.cursor)
      read_columns(g, p, s, index, rows, 3);
    else
      read_columns(g, p, s, index - 3, rows + 3, 0);
#pragma unroll 1
    for (int item = thread; item < rows * (kDim / 8); item += kThreads) {
      const int r = item / (kDim / 8), i = item % (kDim / 8) * 8;
      copy_async(&s.z[r][i], static_cast<const __nv_bfloat16*>(g.z) + (int64_t{row + r} * g.num_v_heads + p.head) * kDim + i);
    }
    commit_copies();
    if (warp == kWarps - 1) {  // gates: lane r has row r
      const int64_t at = int64_t{row + min(lane, rows - 1)} * g.num_v_heads + p.head;
      const float b = __bfloat162float(static_cast<const __nv_bfloat16*>(g.b)[at]),
                  a = __bfloat162float(static_cast<const __nv_bfloat16*>(g.a)[at]);
      const float beta = round_to(DType::kBF16, sigmoid(b)), decay_log = __fmul_rn(decay_rate, softplus(a + dt_bias));
      float total = first > 0 ? s.sums[first - 1] : 0.0f;
      for (int r = 0; r < rows; ++r) {
        const float step = __shfl_sync(kAllLanes, decay_log, r);
        total = first + r > 0 ? __fadd_rn(total, step) : step;
        if (lane == r) {
          s.sums[first + r] = total;
          s.beta[r] = beta;
        }
      }
    }
    await_copies<0>();
    __syncthreads();

    compute_rows<kRows>(g, p, s, state, {index, rows, row, first, keeps_at_once, first_of_key}, norm_weight, barrier);
    index += rows;
    if constexpr (kRows > 1) __syncthreads();  // z has been read
  }
  if (committed && p.end == boundary + kGrid) {
    fold(s, state, warp, lane, barrier);
    store_state();
  }
  if (keeps_at_once) keep_boundary_columns(g, p, committed, first_of_key);
}

}  // namespace

static_assert(sizeof(Shared<1, float>) <= kGdnDecodeSharedBytes && sizeof(Shared<4, float>) <= kGdnDecodeSharedBytes);

// Rows at a time, and the ring's dtype.
extern "C" __global__ void __launch_bounds__(kThreads, 2) gdn_decode_1_f32(const __grid_constant__ GdnArgs g) { decode<1, float>(g); }
extern "C" __global__ void __launch_bounds__(kThreads, 2) gdn_decode_1_bf16(const __grid_constant__ GdnArgs g) {
  decode<1, __nv_bfloat16>(g);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1) gdn_decode_4_f32(const __grid_constant__ GdnArgs g) { decode<4, float>(g); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) gdn_decode_4_bf16(const __grid_constant__ GdnArgs g) {
  decode<4, __nv_bfloat16>(g);
}

}  // namespace quern::cuda
