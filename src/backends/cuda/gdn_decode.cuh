#pragma once

#include "backends/cuda/async.cuh"
#include "backends/cuda/gdn_runs.cuh"

// Decode and verify rows of heads of 128 x 128: what a block computes that has a head of a run. The head's 128 columns of S are held in registers: 16 warps of 8
// columns each, a lane has 4 of the 128 rows. Every sum has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda::gdn {

constexpr int kDim = 128;  // d_k and d_v
constexpr int kThreads = 512, kWarps = kThreads / 32;  // that compute
constexpr int kColumns = kDim / kWarps;  // of a warp

/// Elements between rows of keys and of values in shared memory: threads that read at the same time find different banks.
template <class Ring>
constexpr int kKeyStride = sizeof(Ring) == 2 ? kDim + 32 : kDim + 4;
template <class Ring>
constexpr int kValueStride = sizeof(Ring) == 2 ? kDim + 8 : kDim + 4;

/// A block's shared memory while it has a head of a run; `kRows` rows are taken at a time.
template <class Ring>
struct Chunk {
  Ring (*k)[kKeyStride<Ring>];    // [kGrid], by position
  Ring (*u)[kValueStride<Ring>];  // [kGrid]
  float* sums;                    // [kGrid], G
  float* factors;                 // [kGrid], of a fold
  // Of the head's channels: v, q, k.
  float (*taps)[3 * kDim];             // [4]
  __nv_bfloat16 (*columns)[3 * kDim];  // [kRows + 3], raw, from the third before the first row on
  __nv_bfloat16 (*z)[kDim];            // [kRows]
  float (*q)[kDim];
  float (*along_k)[kGrid];
  float (*along_q)[kGrid];
  float* beta;
  float (*squares)[kWarps];  // of the outputs
};

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline float4 widened_four(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ inline float4 four(const __nv_bfloat16* at) { return widened_four(*reinterpret_cast<const uint2*>(at)); }
__device__ inline void put(float* at, float x) { *at = x; }
__device__ inline void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }
/// To shared and to global memory, as the ring holds it.
__device__ inline void put_four(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
__device__ inline void put_four(__nv_bfloat16* at, float4 x) {
  put(at, x.x);
  put(at + 1, x.y);
  put(at + 2, x.z);
  put(at + 3, x.w);
}
__device__ inline float as_ring(float x, const float*) { return x; }
__device__ inline float as_ring(float x, const __nv_bfloat16*) { return round_to(DType::kBF16, x); }
__device__ inline float dot(const float4& a, const float4& b, float sum) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum)))); }
__device__ inline float silu_as_bf16(float x) { return round_to(DType::kBF16, silu(x)); }

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
__device__ inline float4 normalized(const uint2 (&columns)[4], const float4 (&taps)[4], int index, float scale) {
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
__device__ inline float transposed_sum(float (&values)[16], int lane) {
  halve<8>(values, lane);
  halve<4>(values, lane);
  halve<2>(values, lane);
  halve<1>(values, lane);
  return values[0] + __shfl_xor_sync(kAllLanes, values[0], 1);
}

/// Begins to copy rows [boundary, boundary + rows) from the ring to the chunk. The sums of a thread's row are there when this returns.
template <class Ring>
__device__ void read_ring(const GdnArgs& g, const Place& p, const Chunk<Ring>& s, int boundary, int rows) {
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
template <class Ring>
__device__ void read_columns(const GdnArgs& g, const Place& p, const Chunk<Ring>& s, int index, int count, int place) {
  constexpr int kPiece = 8, kPieces = kDim / kPiece;
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < count * 3 * kPieces; item += kThreads) {
    const int c = item / (3 * kPieces), part = item / kPieces % 3, i = item % kPieces * kPiece;
    if (index + c >= 0) copy_async(&s.columns[place + c][part * kDim + i], p.columns(g, index + c) + p.channel(g, part) + i);
  }
}

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns.
template <class Ring>
__device__ void fold(const Chunk<Ring>& s, float4 (&state)[kColumns], int warp, int lane, const auto& barrier) {
  const float total = s.sums[kGrid - 1];
  for (int j = static_cast<int>(threadIdx.x); j < kGrid; j += kThreads) s.factors[j] = expf(total - s.sums[j]);
  barrier();
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
  barrier();
}

/// The columns before a boundary whose fold was stored. A thread has a channel.
__device__ inline void keep_boundary_columns(const GdnArgs& g, const Place& p, bool committed, bool first_of_key) {
  const int boundary = (committed ? p.end : p.cursor) / static_cast<int>(kGrid) * static_cast<int>(kGrid);
  const int part = static_cast<int>(threadIdx.x) / kDim, within = static_cast<int>(threadIdx.x) % kDim;
  if (boundary <= g.step.boundary[p.slot] || part >= (first_of_key ? 3 : 1)) return;
  const int channel = p.channel(g, part) + within;
  auto* stored = static_cast<__nv_bfloat16*>(g.boundary_columns) + int64_t{p.slot} * 3 * p.channels + channel;
#pragma unroll
  for (int c = 0; c < 3; ++c) stored[int64_t{c} * p.channels] = p.columns(g, boundary - 3 + c)[channel];
}
__device__ inline __nv_bfloat16* window_row(const GdnArgs& g, const Place& p, int index) {
  return static_cast<__nv_bfloat16*>(g.conv_window) + (int64_t{p.slot} * p.window_length + index % p.window_length) * p.channels;
}

/// Rows of a run that are computed together, all of one chunk.
struct RowGroup {
  int index, count;  // of the first in its sequence; at most kRows
  int row;           // of the first in the step
  int first;         // its position in the chunk
  bool keeps;        // keys and raw columns may be written at once
  bool first_of_key;
};

/// From raw columns, gates, earlier keys and values, and the state, to out and the ring. `barrier` meets the kThreads threads that compute; the positions of the group have their sums.
template <int kRows, class Ring>
__device__ void compute_rows(const GdnArgs& g, const Place& p, const Chunk<Ring>& s, const float4 (&state)[kColumns], const RowGroup& group_of_rows, float norm_weight,
                             const auto& barrier) {
  const auto [index, rows, row, first, keeps, first_of_key] = group_of_rows;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int my_column = warp * kColumns + lane / 4, group = lane % 4;  // in the recursion, four lanes share a column
  const float q_scale = 1.0f / sqrtf(static_cast<float>(kDim));
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
      if (keeps && first_of_key)
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
  if (const int part = thread / kDim; keeps && part < (first_of_key ? 3 : 1))
    for (int r = 0; r < rows; ++r) window_row(g, p, index + r)[p.channel(g, part) + thread % kDim] = s.columns[3 + r][thread];
  barrier();

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
  barrier();

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
  barrier();
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
}

}  // namespace quern::cuda::gdn
