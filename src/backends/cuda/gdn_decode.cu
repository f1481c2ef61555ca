#include "backends/cuda/async.cuh"
#include "backends/cuda/gdn_runs.cuh"

// Decode and verify rows of heads of 128 x 128, a block a head and run. The head's 128 columns of S are held in registers: 16 warps of 8
// columns each, a lane has 4 of the 128 rows. S is read once a step, for up to 4 rows at a time, and written only when the 64 rows of a
// chunk are folded in. A block is idle until its loads arrive, so they are issued together: state, ring and taps before the projections of
// the step are awaited, then everything of the rows. Two blocks of single rows fit a multiprocessor, so that one reads while the other
// computes. Every sum has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda {

namespace {

constexpr int kDim = 128;  // d_k and d_v
constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kColumns = kDim / kWarps;  // of a warp

/// Elements between rows of keys and of values in shared memory: threads that read at the same time find different banks.
template <class Ring>
constexpr int kKeyStride = sizeof(Ring) == 2 ? kDim + 32 : kDim + 4;
template <class Ring>
constexpr int kValueStride = sizeof(Ring) == 2 ? kDim + 8 : kDim + 4;

/// kRows: taken at a time.
template <int kRows, class Ring>
struct Shared {
  Ring k[kGrid][kKeyStride<Ring>];  // of the chunk, by position
  Ring u[kGrid][kValueStride<Ring>];
  float sums[kGrid];     // G
  float factors[kGrid];  // of a fold
  // Of the head's channels: v, q, k.
  float taps[4][3 * kDim];
  __nv_bfloat16 columns[kRows + 3][3 * kDim];  // raw, from the third before the first row on
  __nv_bfloat16 z[kRows][kDim];
  float q[kRows][kDim];
  float along_k[kRows][kGrid];
  float along_q[kRows][kGrid];
  float beta[kRows];
  float squares[kRows][kWarps];  // of the outputs
};

__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ float4 widened_four(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ float4 four(const __nv_bfloat16* at) { return widened_four(*reinterpret_cast<const uint2*>(at)); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }
/// To shared and to global memory, as the ring holds it.
__device__ void put_four(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
__device__ void put_four(__nv_bfloat16* at, float4 x) {
  put(at, x.x);
  put(at + 1, x.y);
  put(at + 2, x.z);
  put(at + 3, x.w);
}
__device__ float as_ring(float x, const float*) { return x; }
__device__ float as_ring(float x, const __nv_bfloat16*) { return round_to(DType::kBF16, x); }
__device__ float dot(const float4& a, const float4& b, float sum) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum)))); }
__device__ float silu_as_bf16(float x) { return round_to(DType::kBF16, silu(x)); }

/// The values of a run that do not change.
struct Place {
  int slot, first_row, cursor, end, head, k_head;
  int channels, ring_length, window_length;

  /// First channel of v (0), q (1) or k (2).
  __device__ int channel(const GdnArgs& g, int part) const {
    const int keys = g.num_k_heads * kDim;
    return part == 0 ? 2 * keys + head * kDim : (part - 1) * keys + k_head * kDim;
  }
  __device__ int64_t ring_row(int index) const { return int64_t{slot} * ring_length + index % ring_length; }
  /// The raw columns of an index; one before the sequence's start has an address, but no meaning.
  __device__ const __nv_bfloat16* columns(const GdnArgs& g, int index) const {
    const bool given = index >= cursor;
    const auto* base = static_cast<const __nv_bfloat16*>(given ? g.qkv : g.conv_window);
    const int64_t row = given ? int64_t{first_row} + index - cursor : int64_t{slot} * window_length + max(index, 0) % window_length;
    return base + row * channels;
  }
};

/// A warp's l2-normalized q or k: a lane has 4 elements. `columns` are the four raw ones up to the index, the lane's elements of each.
__device__ float4 normalized(const uint2 (&columns)[4], const float4 (&taps)[4], int index, float scale) {
  float4 y{0, 0, 0, 0};
#pragma unroll
  for (int tap = 0; tap < 4; ++tap) {
    const float4 x = widened_four(index - 3 + tap >= 0 ? columns[tap] : make_uint2(0, 0)), w = taps[tap];
    y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
  }
  y = {silu_as_bf16(y.x), silu_as_bf16(y.y), silu_as_bf16(y.z), silu_as_bf16(y.w)};
  const float factor = 1.0f / sqrtf(warp_sum(dot(y, y, 0.0f)) + 1e-6f) * scale;
  return {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
}

/// Halves the values that a lane holds: of each pair one is added up here, the other in the lane on the far side.
template <int kWidth>
__device__ void halve(float (&values)[16], int lane) {
  const bool upper = (lane & (2 * kWidth)) != 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float given = upper ? values[i] : values[i + kWidth], kept = upper ? values[i + kWidth] : values[i];
    values[i] = kept + __shfl_xor_sync(kAllLanes, given, 2 * kWidth);
  }
}
/// Adds 16 values over the lanes of a warp; the sum of value i ends in the lanes 2 i and 2 i + 1.
__device__ float transposed_sum(float (&values)[16], int lane) {
  halve<8>(values, lane);
  halve<4>(values, lane);
  halve<2>(values, lane);
  halve<1>(values, lane);
  return values[0] + __shfl_xor_sync(kAllLanes, values[0], 1);
}

/// Begins to copy rows [boundary, boundary + rows) from the ring to the chunk. The sums of a thread's row are there when this returns.
template <int kRows, class Ring>
__device__ void read_ring(const GdnArgs& g, const Place& p, Shared<kRows, Ring>& s, int boundary, int rows) {
  constexpr int kPiece = 16 / sizeof(Ring), kPieces = kDim / kPiece;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 2
  for (int item = thread; item < rows * kPieces; item += kThreads) {
    const int j = item / kPieces, i = item % kPieces * kPiece;
    const int64_t row = p.ring_row(boundary + j);
    copy_async(&s.k[j][i], static_cast<const Ring*>(g.ring_k) + (row * g.num_k_heads + p.k_head) * kDim + i);
    copy_async(&s.u[j][i], static_cast<const Ring*>(g.ring_u) + (row * g.num_v_heads + p.head) * kDim + i);
  }
  commit_copies();
#pragma unroll 1
  for (int j = thread; j < rows; j += kThreads) s.sums[j] = g.ring_g[p.ring_row(boundary + j) * g.num_v_heads + p.head];
}

/// Begins to copy the raw columns of the indices [index, index + count) to `place` and on.
template <int kRows, class Ring>
__device__ void read_columns(const GdnArgs& g, const Place& p, Shared<kRows, Ring>& s, int index, int count, int place) {
  constexpr int kPiece = 8, kPieces = kDim / kPiece;
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < count * 3 * kPieces; item += kThreads) {
    const int c = item / (3 * kPieces), part = item / kPieces % 3, i = item % kPieces * kPiece;
    if (index + c >= 0) copy_async(&s.columns[place + c][part * kDim + i], p.columns(g, index + c) + p.channel(g, part) + i);
  }
}

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns.
template <int kRows, class Ring>
__device__ void fold(Shared<kRows, Ring>& s, float4 (&state)[kColumns], int warp, int lane) {
  const float total = s.sums[kGrid - 1];
  for (int j = static_cast<int>(threadIdx.x); j < kGrid; j += kThreads) s.factors[j] = expf(total - s.sums[j]);
  __syncthreads();
  const float decay = expf(total);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) state[c] = {decay * state[c].x, decay * state[c].y, decay * state[c].z, decay * state[c].w};
#pragma unroll 2
  for (int j = 0; j < kGrid; ++j) {
    const float4 k = four(&s.k[j][4 * lane]);
    const float factor = s.factors[j];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float u = factor * widened(s.u[j][warp * kColumns + c]);
      state[c] = {fmaf(u, k.x, state[c].x), fmaf(u, k.y, state[c].y), fmaf(u, k.z, state[c].z), fmaf(u, k.w, state[c].w)};
    }
  }
  __syncthreads();
}

/// The columns before a boundary whose fold was stored. A thread has a channel.
__device__ void keep_boundary_columns(const GdnArgs& g, const Place& p, bool committed, bool first_of_key) {
  const int boundary = (committed ? p.end : p.cursor) / static_cast<int>(kGrid) * static_cast<int>(kGrid);
  const int part = static_cast<int>(threadIdx.x) / kDim, within = static_cast<int>(threadIdx.x) % kDim;
  if (boundary <= g.step.boundary[p.slot] || part >= (first_of_key ? 3 : 1)) return;
  const int channel = p.channel(g, part) + within;
  auto* stored = static_cast<__nv_bfloat16*>(g.boundary_columns) + int64_t{p.slot} * 3 * p.channels + channel;
#pragma unroll
  for (int c = 0; c < 3; ++c) stored[int64_t{c} * p.channels] = p.columns(g, boundary - 3 + c)[channel];
}
__device__ __nv_bfloat16* window_row(const GdnArgs& g, const Place& p, int index) {
  return static_cast<__nv_bfloat16*>(g.conv_window) + (int64_t{p.slot} * p.window_length + index % p.window_length) * p.channels;
}

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
  Memory& s = *reinterpret_cast<Memory*>(memory);
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
  const int my_column = column + lane / 4, group = lane % 4;  // in the recursion, four lanes share a column
  const float decay_rate = g.decay[p.head], dt_bias = g.dt_bias[p.head], norm_weight = g.norm[my_column];
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
    fold(s, state, warp, lane);
    store_state();
    boundary += static_cast<int>(kGrid);
  }
  read_ring(g, p, s, boundary, p.cursor - boundary);
  const bool first_of_key = __syncthreads_or(earlier) == 0;
  if (thread == 0) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x + gridDim.x * blockIdx.y), static_cast<int>(gridDim.x * gridDim.y));
  release_successor();
  await_predecessor();

  const float q_scale = 1.0f / sqrtf(static_cast<float>(kDim));
  for (int index = p.cursor; index < p.end;) {
    if (index == boundary + kGrid) {
      fold(s, state, warp, lane);
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

    // After the conv: the warps 2 r and 2 r + 1 have k and q of row r, every lane a column of v.
    if (const int r = warp / 2; r < rows) {
      const bool is_key = warp % 2 == 0;
      const int at = (is_key ? 2 : 1) * kDim + 4 * lane;
      uint2 columns[4];
      float4 taps[4];
#pragma unroll
      for (int tap = 0; tap < 4; ++tap) {
        columns[tap] = *reinterpret_cast<const uint2*>(&s.columns[r + tap][at]);
        taps[tap] = four(&s.taps[tap][at]);
      }
      const float4 x = normalized(columns, taps, index + r, is_key ? 1.0f : q_scale);
      if (is_key) {
        put_four(&s.k[first + r][4 * lane], x);
        if (keeps_at_once && first_of_key)
          put_four(static_cast<Ring*>(g.ring_k) + (p.ring_row(index + r) * g.num_k_heads + p.k_head) * kDim + 4 * lane, x);
      } else {
        *reinterpret_cast<float4*>(&s.q[r][4 * lane]) = x;
      }
    }
    float v[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float y = 0;
#pragma unroll
      for (int tap = 0; tap < 4; ++tap)
        y = fmaf(s.taps[tap][my_column], index + r - 3 + tap >= 0 ? __bfloat162float(s.columns[r + tap][my_column]) : 0.0f, y);
      v[r] = silu_as_bf16(y);
    }
    if (const int part = thread / kDim; keeps_at_once && part < (first_of_key ? 3 : 1))
      for (int r = 0; r < rows; ++r) window_row(g, p, index + r)[p.channel(g, part) + thread % kDim] = s.columns[3 + r][thread];
    __syncthreads();

    // Along earlier keys: eight lanes a position.
    {
      const int j = thread / 8;
      float dots[kRows][2] = {};
      if (j < first + rows) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int at = 4 * (thread % 8 + 8 * m);
          const float4 kj = four(&s.k[j][at]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            if (r >= rows) continue;
            dots[r][0] = dot(kj, four(&s.k[first + r][at]), dots[r][0]);
            dots[r][1] = dot(kj, four(&s.q[r][at]), dots[r][1]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) continue;
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int distance = 4; distance > 0; distance /= 2) dots[r][which] += __shfl_xor_sync(kAllLanes, dots[r][which], distance);
        if (thread % 8 == 0 && j <= first + r) {
          const float factor = j < first + r ? expf(s.sums[first + r] - s.sums[j]) : 1.0f;
          s.along_k[r][j] = factor * dots[r][0];
          s.along_q[r][j] = factor * dots[r][1];
        }
      }
    }
    // Along the state: lane 2 i has value i, columns with k first, then with q.
    float along_state[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const float4 k = four(&s.k[first + r][4 * lane]), q = four(&s.q[r][4 * lane]);
      float values[16];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        values[c] = dot(state[c], k, 0.0f);
        values[kColumns + c] = dot(state[c], q, 0.0f);
      }
      along_state[r] = transposed_sum(values, lane);
    }
    __syncthreads();

    float o[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      o[r] = 0;
      if (r >= rows) continue;
      const int position = first + r;
      const float decay = expf(s.sums[position]);
      float known = 0, out = 0;
#pragma unroll 4
      for (int j = group; j < position; j += 4) {
        const float u = widened(s.u[j][my_column]);
        known = fmaf(s.along_k[r][j], u, known);
        out = fmaf(s.along_q[r][j], u, out);
      }
#pragma unroll
      for (int distance = 1; distance <= 2; distance *= 2) {
        known += __shfl_xor_sync(kAllLanes, known, distance);
        out += __shfl_xor_sync(kAllLanes, out, distance);
      }
      known = fmaf(decay, __shfl_sync(kAllLanes, along_state[r], 2 * (lane / 4)), known);
      out = fmaf(decay, __shfl_sync(kAllLanes, along_state[r], 2 * (kColumns + lane / 4)), out);
      const float u = as_ring(s.beta[r] * (v[r] - known), static_cast<const Ring*>(nullptr));
      if (group == 0) {
        put(&s.u[position][my_column], u);
        if (index + r >= p.end - p.ring_length)
          put(static_cast<Ring*>(g.ring_u) + (p.ring_row(index + r) * g.num_v_heads + p.head) * kDim + my_column, u);
      }
      __syncwarp();
      o[r] = fmaf(s.along_q[r][position], u, out);
      float square = __fmul_rn(o[r], o[r]);
#pragma unroll
      for (int distance = 4; distance <= 16; distance *= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
      if (lane == 0) s.squares[r][warp] = square;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += s.squares[r][w];
      const float scale = 1.0f / sqrtf(sum / static_cast<float>(kDim) + g.eps);
      const int64_t at = (int64_t{row + r} * g.num_v_heads + p.head) * kDim + my_column;
      if (group == 0)
        static_cast<__nv_bfloat16*>(g.out)[at] =
            __float2bfloat16_rn(o[r] * scale * norm_weight * silu(__bfloat162float(s.z[r][my_column])));
      if (thread == 0 && index + r >= p.end - p.ring_length) g.ring_g[p.ring_row(index + r) * g.num_v_heads + p.head] = s.sums[first + r];
    }
    index += rows;
    if constexpr (kRows > 1) __syncthreads();  // z has been read
  }
  if (committed && p.end == boundary + kGrid) {
    fold(s, state, warp, lane);
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
