#include "backends/cuda/gdn_runs.cuh"
#include "backends/cuda/gdn_state.cuh"

// Rows are computed one after the other, prompt or not, against the state of the last boundary, so that any cut gives the same bits. Three launches a layer: gdn_rows
// computes and keeps the state, the sums G and u; gdn_keys then writes the k of the rows that the ring holds, and gdn_window the raw columns, which gdn_rows of other
// heads have read until then.

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// silu(sum_i w_i raw[index - 3 + i])
__device__ float convolved(const GdnArgs& g, const Run& run, int64_t index, int64_t channel) {
  const int64_t channels = channels_of(g);
  float y = 0;
  for (int tap = 0; tap < 4; ++tap) y = fmaf(g.conv[tap * channels + channel], raw(g, run, index - 3 + tap, channel), y);
  return round_to(g.activation, silu(y));
}

/// The l2-normalized q (times `scale`) or k of an index, to shared memory; all threads of the block.
__device__ void normalized(const GdnArgs& g, const Run& run, int64_t index, int64_t first_channel, float scale, float* out, float* shared) {
  float sum = 0, mine = 0;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < g.d_k) {
    mine = convolved(g, run, index, first_channel + thread);
    sum = mine * mine;
  }
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(sum, shared) + 1e-6f) * scale;
  if (thread < g.d_k) out[thread] = mine * factor;
}

/// Shared memory of gdn_rows: rows by position from the chunk's boundary on. A verify that crosses the next boundary has its further rows behind the 64.
struct Chunk {
  float* k;        // [kGrid + k_max + 1, d_k]
  float* u;        // [kGrid + k_max + 1, d_v]
  float* sums;     // [kGrid + k_max + 1]: G, from the boundary below the row on
  float* along_k;  // [kGrid + k_max + 1]: e^(G - Gj) (kj . k) of the row
  float* along_q;
  float* factors;  // [kGrid]: e^(G64 - Gj)
  float* q;        // [d_k] of the row
  float* state_k;  // [d_v]: S^T k
  float* state_q;
  float* shared;   // [kWarps]
};
__device__ Chunk chunk_in(float* memory, const GdnArgs& g) {
  const int64_t rows = kGrid + g.k_max + 1;
  Chunk c;
  c.k = memory;
  c.u = c.k + rows * g.d_k;
  c.sums = c.u + rows * g.d_v;
  c.along_k = c.sums + rows;
  c.along_q = c.along_k + rows;
  c.factors = c.along_q + rows;
  c.q = c.factors + kGrid;
  c.state_k = c.q + g.d_k;
  c.state_q = c.state_k + g.d_v;
  c.shared = c.state_q + g.d_v;
  return c;
}

/// The factors of the fold of a full chunk; all threads.
__device__ void prepare_fold(const Chunk& c) {
  __syncthreads();
  for (int j = static_cast<int>(threadIdx.x); j < kGrid; j += kThreads) c.factors[j] = expf(c.sums[kGrid - 1] - c.sums[j]);
  __syncthreads();
}
/// Element (column, i) of e^G64 S + sum_j e^(G64 - Gj) uj kj^T.
__device__ float folded(const Chunk& c, const StoredState& state, int d_k, int d_v, int column, int i) {
  float x = expf(c.sums[kGrid - 1]) * state.get(column * d_k + i);
  for (int j = 0; j < kGrid; ++j) x = fmaf(c.factors[j] * c.u[j * d_v + column], c.k[j * d_k + i], x);
  return x;
}
__device__ void store_fold(const Chunk& c, const StoredState& state, int d_k, int d_v) {
  prepare_fold(c);
  for (int element = static_cast<int>(threadIdx.x); element < d_k * d_v; element += kThreads)
    state.put(element, folded(c, state, d_k, d_v, element / d_k, element % d_k));
  __syncthreads();
}

/// Rows [boundary, end) of a chunk from the ring.
__device__ void read_ring(const GdnArgs& g, const Chunk& c, int64_t slot, int64_t boundary, int64_t end, int head, int k_head) {
  const int rows = static_cast<int>(end - boundary);
  for (int element = static_cast<int>(threadIdx.x); element < rows * g.d_k; element += kThreads)
    c.k[element] = load(g.ring_k, g.ring, (ring_row(g, slot, boundary + element / g.d_k) * g.num_k_heads + k_head) * g.d_k + element % g.d_k);
  for (int element = static_cast<int>(threadIdx.x); element < rows * g.d_v; element += kThreads)
    c.u[element] = load(g.ring_u, g.ring, (ring_row(g, slot, boundary + element / g.d_v) * g.num_v_heads + head) * g.d_v + element % g.d_v);
  for (int j = static_cast<int>(threadIdx.x); j < rows; j += kThreads) c.sums[j] = g.ring_g[ring_row(g, slot, boundary + j) * g.num_v_heads + head];
  __syncthreads();
}

}  // namespace

/// A block per run and value head.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_rows(const __grid_constant__ GdnArgs g) {
  extern __shared__ float memory[];
  const int head = static_cast<int>(blockIdx.y), k_head = g.k_head[head], d_k = g.d_k, d_v = g.d_v;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Run run = to_grid(g, run_of(g, g.first_run + static_cast<int>(blockIdx.x)));
  const bool fold_only = run.cursor == run.end && g.step.boundary[run.slot] + kGrid <= run.cursor;  // a run from a grid point on
  if (run.cursor == run.end && !fold_only) return;
  const Chunk c = chunk_in(memory, g);
  const StoredState state(g, run.slot, head);
  int64_t boundary = g.step.boundary[run.slot];
  if (boundary + kGrid <= run.cursor) {  // a fold that is due
    read_ring(g, c, run.slot, boundary, boundary + kGrid, head, k_head);
    store_fold(c, state, d_k, d_v);
    boundary += kGrid;
  }
  read_ring(g, c, run.slot, boundary, run.cursor, head, k_head);

  const int64_t keys_at = int64_t{g.num_k_heads} * d_k, values_at = 2 * keys_at;
  const float q_scale = 1.0f / sqrtf(static_cast<float>(d_k));
  const int64_t first_kept = run.end - (kGrid + g.k_max + 1);  // what the ring holds after the step
  bool crossed = false;  // the row's boundary is one past the chunk's, whose fold is not stored
  for (int64_t index = run.cursor; index < run.end; ++index) {
    if (index == boundary + kGrid) {
      if (run.committed) {
        store_fold(c, state, d_k, d_v);
        boundary += kGrid;
      } else {
        prepare_fold(c);
        crossed = true;
      }
    }
    const int64_t row = run.first_row + index - run.cursor;
    const int i = static_cast<int>(index - boundary), base = crossed ? static_cast<int>(kGrid) : 0;  // of the row, and of its chunk, in the arrays
    float* k = c.k + i * d_k;
    normalized(g, run, index, keys_at + int64_t{k_head} * d_k, 1.0f, k, c.shared);
    if (thread < d_k) k[thread] = round_to(g.ring, k[thread]);
    normalized(g, run, index, int64_t{k_head} * d_k, q_scale, c.q, c.shared);
    const float beta = round_to(g.activation, sigmoid(load(g.b, g.activation, row * g.num_v_heads + head)));
    const float decay_log = g.decay[head] * softplus(load(g.a, g.activation, row * g.num_v_heads + head) + g.dt_bias[head]);
    const float total = i > base ? c.sums[i - 1] + decay_log : decay_log, decay = expf(total);
    __syncthreads();
    if (thread == 0) c.sums[i] = total;

    for (int j = base + warp; j <= i; j += kWarps) {
      float dot_k = 0, dot_q = 0;
      for (int x = lane; x < d_k; x += 32) {
        dot_k = fmaf(c.k[j * d_k + x], k[x], dot_k);
        dot_q = fmaf(c.k[j * d_k + x], c.q[x], dot_q);
      }
      dot_k = warp_sum(dot_k);
      dot_q = warp_sum(dot_q);
      const float factor = j < i ? expf(total - c.sums[j]) : 1.0f;
      if (lane == 0) {
        c.along_k[j] = factor * dot_k;
        c.along_q[j] = factor * dot_q;
      }
    }
    for (int column = warp; column < d_v; column += kWarps) {
      float dot_k = 0, dot_q = 0;
      for (int x = lane; x < d_k; x += 32) {
        const float s = crossed ? folded(c, state, d_k, d_v, column, x) : state.get(column * d_k + x);
        dot_k = fmaf(s, k[x], dot_k);
        dot_q = fmaf(s, c.q[x], dot_q);
      }
      dot_k = warp_sum(dot_k);
      dot_q = warp_sum(dot_q);
      if (lane == 0) {
        c.state_k[column] = decay * dot_k;
        c.state_q[column] = decay * dot_q;
      }
    }
    __syncthreads();

    float o = 0;
    const int64_t place = ring_row(g, run.slot, index) * g.num_v_heads + head;
    if (thread < d_v) {
      float known = c.state_k[thread];
      o = c.state_q[thread];
      for (int j = base; j < i; ++j) {
        known = fmaf(c.along_k[j], c.u[j * d_v + thread], known);
        o = fmaf(c.along_q[j], c.u[j * d_v + thread], o);
      }
      const float v = convolved(g, run, index, values_at + int64_t{head} * d_v + thread);
      const float u = round_to(g.ring, beta * (v - known));
      o = fmaf(c.along_q[i], u, o);
      c.u[i * d_v + thread] = u;
      if (index >= first_kept) store(g.ring_u, g.ring, place * d_v + thread, u);
    }
    if (thread == 0 && index >= first_kept) g.ring_g[place] = total;
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(o * o, c.shared) / static_cast<float>(d_v) + g.eps);
    if (thread < d_v) {
      const int64_t at = (row * g.num_v_heads + head) * d_v + thread;
      store(g.out, g.activation, at, o * scale * g.norm[thread] * silu(load(g.z, g.activation, at)));
    }
    __syncthreads();
  }
  if (run.committed && run.end == boundary + kGrid) store_fold(c, state, d_k, d_v);
}

/// A block per run, k head and row that the ring holds.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_keys(const __grid_constant__ GdnArgs g) {
  __shared__ float k[kMaxGdnDim], shared[kWarps];
  const Run run = to_grid(g, run_of(g, g.first_run + static_cast<int>(blockIdx.x)));
  const int k_head = static_cast<int>(blockIdx.y);
  const int64_t index = run.end - 1 - blockIdx.z;
  if (index < run.cursor) return;
  normalized(g, run, index, (int64_t{g.num_k_heads} + k_head) * g.d_k, 1.0f, k, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < g.d_k) store(g.ring_k, g.ring, (ring_row(g, run.slot, index) * g.num_k_heads + k_head) * g.d_k + thread, k[thread]);
}

/// A thread per run and channel: the columns before the boundary that gdn_rows has stored a fold at, then the window.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_window(const __grid_constant__ GdnArgs g) {
  const Run run = run_of(g, g.first_run + static_cast<int>(blockIdx.x));
  const int64_t channels = channels_of(g), channel = int64_t{blockIdx.y} * kThreads + threadIdx.x, window = 3 + g.k_max + 1;
  if (run.cursor == run.end || channel >= channels) return;
  const int64_t boundary = (run.committed ? run.end : run.cursor) / kGrid * kGrid;
  if (boundary > g.step.boundary[run.slot])
    for (int i = 0; i < 3; ++i) store(g.boundary_columns, g.activation, (run.slot * 3 + i) * channels + channel, raw(g, run, boundary - 3 + i, channel));
  const int64_t first = run.end - window > run.cursor ? run.end - window : run.cursor;
  for (int64_t index = first; index < run.end; ++index)
    store(g.conv_window, g.activation, (run.slot * window + index % window) * channels + channel,
          load(g.qkv, g.activation, (run.first_row + index - run.cursor) * channels + channel));
}

/// The conv's taps apart, and -exp(A_log).
extern "C" __global__ void gdn_prepare(const __grid_constant__ GdnPrepareArgs args) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < args.channels)
    for (int tap = 0; tap < 4; ++tap) args.conv[tap * args.channels + i] = load(args.conv1d, args.conv_dtype, i * 4 + tap);
  if (i < args.num_v_heads) args.decay[i] = -expf(args.decay[i]);
}

}  // namespace quern::cuda
