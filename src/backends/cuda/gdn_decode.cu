#include <cooperative_groups.h>

#include "backends/cuda/async.cuh"
#include "backends/cuda/gdn_runs.cuh"

// Decode and verify rows of heads of 128 x 128. A head's 128 columns of S are held in registers: 16 warps of 8 columns each, a lane has 4 of the 128 rows. They stand in one block, or in a
// cluster of 2 or 4 where there are few runs; the bits are the same. S is read once a step, for up to 4 rows at a time, and written only when the 64 rows of a chunk are folded in.
// Every sum has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda {

namespace {

#if __CUDA_ARCH__ >= 900
__device__ void meet_cluster() { cooperative_groups::this_cluster().sync(); }
__device__ float* at_rank(float* own, int rank) { return cooperative_groups::this_cluster().map_shared_rank(own, rank); }
#else  // no clusters: gdn_decode_1 alone is there, and does not call these
__device__ void meet_cluster() { __trap(); }
__device__ float* at_rank(float* own, int) { return own; }
#endif

constexpr int kDim = 128;         // d_k and d_v
constexpr int kAllWarps = 16;     // of a head
constexpr int kColumns = 8;       // of a warp
constexpr int kRows = 4;          // taken at a time
constexpr int kKeyStride = kDim + 4;

template <int kCluster>
struct Shared {
  static constexpr int kWarps = kAllWarps / kCluster, kOwn = kWarps * kColumns;
  float k[kGrid][kKeyStride];  // of the chunk, by position
  float u[kGrid][kOwn];
  float sums[kGrid];           // G
  float factors[kGrid];        // of a fold
  float q[kRows][kDim];
  float along_k[kRows][kGrid];
  float along_q[kRows][kGrid];
  float beta[kRows];
  float squares[2][kRows][kAllWarps];  // of the outputs, by warp of the head
};

__device__ float4 four(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kF32) return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
  const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ float dot(const float4& a, const float4& b, float sum) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum)))); }

/// The values of a run that do not change.
struct Place {
  int slot, first_row, cursor, end, head, k_head;
  int channels, ring_length, window_length;
};

/// Raw columns [channel, channel + 4) of an index.
__device__ float4 raw_four(const GdnArgs& g, const Place& p, int index, int channel) {
  if (index < 0) return {0, 0, 0, 0};
  if (index >= p.cursor) return four(g.qkv, g.activation, int64_t{p.first_row + index - p.cursor} * p.channels + channel);
  return four(g.conv_window, g.activation, (int64_t{p.slot} * p.window_length + index % p.window_length) * p.channels + channel);
}
__device__ float raw_one(const GdnArgs& g, const Place& p, int index, int channel) {
  if (index < 0) return 0;
  if (index >= p.cursor) return load(g.qkv, g.activation, int64_t{p.first_row + index - p.cursor} * p.channels + channel);
  return load(g.conv_window, g.activation, (int64_t{p.slot} * p.window_length + index % p.window_length) * p.channels + channel);
}
__device__ float4 convolved_four(const GdnArgs& g, const Place& p, int index, int channel) {
  float4 y{0, 0, 0, 0};
#pragma unroll
  for (int tap = 0; tap < 4; ++tap) {
    const float4 x = raw_four(g, p, index - 3 + tap, channel), w = *reinterpret_cast<const float4*>(g.conv + tap * p.channels + channel);
    y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
  }
  return {round_to(g.activation, silu(y.x)), round_to(g.activation, silu(y.y)), round_to(g.activation, silu(y.z)), round_to(g.activation, silu(y.w))};
}
__device__ float convolved_one(const GdnArgs& g, const Place& p, int index, int channel) {
  float y = 0;
#pragma unroll
  for (int tap = 0; tap < 4; ++tap) y = fmaf(g.conv[tap * p.channels + channel], raw_one(g, p, index - 3 + tap, channel), y);
  return round_to(g.activation, silu(y));
}
/// A warp's l2-normalized q or k of an index: a lane has 4 elements.
__device__ float4 normalized_four(const GdnArgs& g, const Place& p, int index, int first_channel, float scale, int lane) {
  const float4 x = convolved_four(g, p, index, first_channel + 4 * lane);
  const float factor = 1.0f / sqrtf(warp_sum(dot(x, x, 0.0f)) + 1e-6f) * scale;
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
__device__ float4 rounded_key(const GdnArgs& g, float4 k) { return {round_to(g.ring, k.x), round_to(g.ring, k.y), round_to(g.ring, k.z), round_to(g.ring, k.w)}; }

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

/// Rows [boundary, boundary + rows) from the ring to the chunk; `column` is the first that the block owns.
template <int kCluster>
__device__ void read_ring(const GdnArgs& g, const Place& p, Shared<kCluster>& s, int boundary, int rows, int column) {
  constexpr int kThreads = 32 * Shared<kCluster>::kWarps, kOwn = Shared<kCluster>::kOwn;
  const int thread = static_cast<int>(threadIdx.x);
  const auto place = [&](int j) { return int64_t{p.slot} * p.ring_length + (boundary + j) % p.ring_length; };
  for (int item = thread; item < rows * (kDim / 4); item += kThreads) {
    const int j = item / (kDim / 4), i = item % (kDim / 4) * 4;
    *reinterpret_cast<float4*>(&s.k[j][i]) = four(g.ring_k, g.ring, (place(j) * g.num_k_heads + p.k_head) * kDim + i);
  }
  for (int item = thread; item < rows * (kOwn / 4); item += kThreads) {
    const int j = item / (kOwn / 4), i = item % (kOwn / 4) * 4;
    *reinterpret_cast<float4*>(&s.u[j][i]) = four(g.ring_u, g.ring, (place(j) * g.num_v_heads + p.head) * kDim + column + i);
  }
  for (int j = thread; j < rows; j += kThreads) s.sums[j] = g.ring_g[place(j) * g.num_v_heads + p.head];
}

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns.
template <int kCluster>
__device__ void fold(Shared<kCluster>& s, float4 (&state)[kColumns], int warp, int lane) {
  const float total = s.sums[kGrid - 1];
  for (int j = static_cast<int>(threadIdx.x); j < kGrid; j += 32 * Shared<kCluster>::kWarps) s.factors[j] = expf(total - s.sums[j]);
  __syncthreads();
  const float decay = expf(total);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) state[c] = {decay * state[c].x, decay * state[c].y, decay * state[c].z, decay * state[c].w};
  for (int j = 0; j < kGrid; ++j) {
    const float4 k = *reinterpret_cast<const float4*>(&s.k[j][4 * lane]);
    const float factor = s.factors[j];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float u = factor * s.u[j][warp * kColumns + c];
      state[c] = {fmaf(u, k.x, state[c].x), fmaf(u, k.y, state[c].y), fmaf(u, k.z, state[c].z), fmaf(u, k.w, state[c].w)};
    }
  }
  __syncthreads();
}

template <int kCluster>
__device__ void meet() {
  if constexpr (kCluster > 1)
    meet_cluster();
  else
    __syncthreads();
}

/// What later steps need of the run's rows: raw columns and keys. One thread of the grid owns a channel.
template <int kCluster>
__device__ void keep(const GdnArgs& g, const Place& p, bool committed, int own_column) {
  constexpr int kThreads = 32 * Shared<kCluster>::kWarps, kOwn = Shared<kCluster>::kOwn;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  bool first_of_key = true;  // of the value heads that share the key head
  for (int head = 0; head < p.head; ++head) first_of_key = first_of_key && g.k_head[head] != p.k_head;
  const int keys_at = g.num_k_heads * kDim, values_at = 2 * keys_at, rank = own_column / kOwn;
  if (first_of_key)
    for (int index = max(p.cursor, p.end - p.ring_length) + rank * Shared<kCluster>::kWarps + warp; index < p.end; index += kAllWarps) {
      const float4 k = rounded_key(g, normalized_four(g, p, index, keys_at + p.k_head * kDim, 1.0f, lane));
      const int64_t at = ((int64_t{p.slot} * p.ring_length + index % p.ring_length) * g.num_k_heads + p.k_head) * kDim + 4 * lane;
      store(g.ring_k, g.ring, at, k.x);
      store(g.ring_k, g.ring, at + 1, k.y);
      store(g.ring_k, g.ring, at + 2, k.z);
      store(g.ring_k, g.ring, at + 3, k.w);
    }
  meet<kCluster>();  // the keys were made from the window's columns
  const int boundary = (committed ? p.end : p.cursor) / static_cast<int>(kGrid) * static_cast<int>(kGrid);
  const bool new_boundary = boundary > g.step.boundary[p.slot];
  // The block's share of the head's v channels and, for the first head of a key head, of its q and k channels.
  for (int i = thread; i < (first_of_key ? 3 : 1) * kOwn; i += kThreads) {
    const int part = i / kOwn, within = own_column + i % kOwn;
    const int channel = part == 0 ? values_at + p.head * kDim + within : (part - 1) * keys_at + p.k_head * kDim + within;
    if (new_boundary)
      for (int c = 0; c < 3; ++c) store(g.boundary_columns, g.activation, (int64_t{p.slot} * 3 + c) * p.channels + channel, raw_one(g, p, boundary - 3 + c, channel));
    for (int index = max(p.cursor, p.end - p.window_length); index < p.end; ++index)
      store(g.conv_window, g.activation, (int64_t{p.slot} * p.window_length + index % p.window_length) * p.channels + channel, raw_one(g, p, index, channel));
  }
}

template <int kCluster>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kCluster>;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
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
  p.end = p.cursor + record.num_rows;
  p.head = static_cast<int>(blockIdx.x) / kCluster;
  p.k_head = g.k_head[p.head];
  p.channels = (2 * g.num_k_heads + g.num_v_heads) * kDim;
  p.ring_length = static_cast<int>(kGrid) + g.k_max + 1;
  p.window_length = 3 + g.k_max + 1;
  const bool committed = (record.flags & kIsCommitted) != 0;
  const int own_column = rank * Memory::kOwn, column = own_column + warp * kColumns;  // of the block, of the warp

  if ((g.phases & kGdnCompute) != 0) {
    // State and ring are of the step before: they are read while the projections before this kernel still run.
    float* stored = g.state + ((int64_t{p.slot} * g.num_v_heads + p.head) * kDim + column) * kDim + 4 * lane;
    float4 state[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state[c] = *reinterpret_cast<const float4*>(stored + c * kDim);
    const auto store_state = [&] {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) *reinterpret_cast<float4*>(stored + c * kDim) = state[c];
    };
    int boundary = g.step.boundary[p.slot];
    if (boundary + kGrid <= p.cursor) {  // a fold that is due
      read_ring(g, p, s, boundary, static_cast<int>(kGrid), own_column);
      __syncthreads();
      fold(s, state, warp, lane);
      store_state();
      boundary += static_cast<int>(kGrid);
    }
    read_ring(g, p, s, boundary, p.cursor - boundary, own_column);
    release_successor();
    await_predecessor();
    __syncthreads();

    const int keys_at = g.num_k_heads * kDim, values_at = 2 * keys_at;
    const float q_scale = 1.0f / sqrtf(static_cast<float>(kDim));
    const float decay_rate = g.decay[p.head], dt_bias = g.dt_bias[p.head];
    const int my_column = column + lane / 4, group = lane % 4;  // in the recursion, four lanes share a column
    const float norm_weight = g.norm[my_column];
    int parity = 0;
    for (int index = p.cursor; index < p.end; parity ^= 1) {
      if (index == boundary + kGrid) {
        fold(s, state, warp, lane);
        if (committed) store_state();
        boundary += static_cast<int>(kGrid);
      }
      const int rows = min(min(kRows, p.end - index), boundary + static_cast<int>(kGrid) - index), first = index - boundary;
      const int row = p.first_row + index - p.cursor;

      for (int task = warp; task < 2 * rows + 1; task += Memory::kWarps) {
        if (task == 2 * rows) {  // gates: lane r has row r
          float beta = 0, decay_log = 0;
          if (lane < rows) {
            const int64_t at = int64_t{row + lane} * g.num_v_heads + p.head;
            beta = round_to(g.activation, sigmoid(load(g.b, g.activation, at)));
            decay_log = decay_rate * softplus(load(g.a, g.activation, at) + dt_bias);
          }
          float total = first > 0 ? s.sums[first - 1] : 0.0f;
          for (int r = 0; r < rows; ++r) {
            const float step = __shfl_sync(kAllLanes, decay_log, r);
            total = first + r > 0 ? total + step : step;
            if (lane == r) {
              s.sums[first + r] = total;
              s.beta[r] = beta;
            }
          }
        } else if (task % 2 == 0) {
          *reinterpret_cast<float4*>(&s.k[first + task / 2][4 * lane]) =
              rounded_key(g, normalized_four(g, p, index + task / 2, keys_at + p.k_head * kDim, 1.0f, lane));
        } else {
          *reinterpret_cast<float4*>(&s.q[task / 2][4 * lane]) = normalized_four(g, p, index + task / 2, p.k_head * kDim, q_scale, lane);
        }
      }
      float v[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) v[r] = r < rows ? convolved_one(g, p, index + r, values_at + p.head * kDim + my_column) : 0.0f;
      __syncthreads();

      // Along earlier keys: eight lanes a position.
      constexpr int kThreads = 32 * Memory::kWarps;
      for (int j = thread / 8; j < ((first + rows + 3) & ~3); j += kThreads / 8) {
        float dots[kRows][2] = {};
        if (j < first + rows) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int at = 4 * (thread % 8 + 8 * m);
            const float4 kj = *reinterpret_cast<const float4*>(&s.k[j][at]);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (r >= rows) continue;
              dots[r][0] = dot(kj, *reinterpret_cast<const float4*>(&s.k[first + r][at]), dots[r][0]);
              dots[r][1] = dot(kj, *reinterpret_cast<const float4*>(&s.q[r][at]), dots[r][1]);
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) continue;
#pragma unroll
          for (int which = 0; which < 2; ++which)
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
        const float4 k = *reinterpret_cast<const float4*>(&s.k[first + r][4 * lane]), q = *reinterpret_cast<const float4*>(&s.q[r][4 * lane]);
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
        for (int j = group; j < position; j += 4) {
          const float u = s.u[j][warp * kColumns + lane / 4];
          known = fmaf(s.along_k[r][j], u, known);
          out = fmaf(s.along_q[r][j], u, out);
        }
        for (int distance = 1; distance <= 2; distance *= 2) {
          known += __shfl_xor_sync(kAllLanes, known, distance);
          out += __shfl_xor_sync(kAllLanes, out, distance);
        }
        known = fmaf(decay, __shfl_sync(kAllLanes, along_state[r], 2 * (lane / 4)), known);
        out = fmaf(decay, __shfl_sync(kAllLanes, along_state[r], 2 * (kColumns + lane / 4)), out);
        const float u = round_to(g.ring, s.beta[r] * (v[r] - known));
        if (group == 0) {
          s.u[position][warp * kColumns + lane / 4] = u;
          const int at = index + r;
          if (at >= p.end - p.ring_length) {
            const int64_t place = (int64_t{p.slot} * p.ring_length + at % p.ring_length) * g.num_v_heads + p.head;
            store(g.ring_u, g.ring, place * kDim + my_column, u);
          }
        }
        __syncwarp();
        o[r] = fmaf(s.along_q[r][position], u, out);
        float square = __fmul_rn(o[r], o[r]);  // not contracted: every cluster size has the same bits
        for (int distance = 4; distance <= 16; distance *= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
        if (lane < kCluster) {
          float* target = &s.squares[parity][r][column / kColumns];
          if constexpr (kCluster > 1) target = at_rank(target, lane);
          *target = square;
        }
      }
      meet<kCluster>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) continue;
        float sum = 0;
        for (int w = 0; w < kAllWarps; ++w) sum += s.squares[parity][r][w];
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(kDim) + g.eps);
        const int64_t at = (int64_t{row + r} * g.num_v_heads + p.head) * kDim + my_column;
        if (group == 0) store(g.out, g.activation, at, o[r] * scale * norm_weight * silu(load(g.z, g.activation, at)));
        if (my_column == 0 && group == 0 && index + r >= p.end - p.ring_length)  // only now has every block of the cluster read the ring
          g.ring_g[(int64_t{p.slot} * p.ring_length + (index + r) % p.ring_length) * g.num_v_heads + p.head] = s.sums[first + r];
      }
      __syncthreads();
      index += rows;
    }
    if (committed && p.end == boundary + kGrid) {
      fold(s, state, warp, lane);
      store_state();
    }
  } else {
    release_successor();
    await_predecessor();
  }
  if ((g.phases & kGdnKeep) != 0) keep<kCluster>(g, p, committed, own_column);
}

}  // namespace

static_assert(sizeof(Shared<1>) <= kGdnDecodeSharedBytes && sizeof(Shared<2>) <= sizeof(Shared<1>) && sizeof(Shared<4>) <= sizeof(Shared<1>));

extern "C" __global__ void __launch_bounds__(512, 1) gdn_decode_1(const __grid_constant__ GdnArgs g) { decode<1>(g); }
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(256, 1) gdn_decode_2(const __grid_constant__ GdnArgs g) { decode<2>(g); }
extern "C" __global__ void __launch_bounds__(128, 1) gdn_decode_4(const __grid_constant__ GdnArgs g) { decode<4>(g); }
#endif

}  // namespace quern::cuda
