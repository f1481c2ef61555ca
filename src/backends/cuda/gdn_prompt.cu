#include "backends/cuda/gdn_prompt.cuh"

// Prompt rows of heads of 128 x 128, a chunk of the 64-grid at a time on the matrix units (model-spec.md 1.6). With y the rows after the conv, which are bf16, and f what normalizes them:
//   L = strictly lower(beta_i f_i f_j e^(Gi - Gj) yk_i . yk_j)      T = (I + L)^-1 diag(beta)      P = lower(fq_i f_j e^(Gi - Gj) yq_i . yk_j)
//   U = T (V - diag(e^G f) Yk S)      O = diag(e^G fq) Yq S + P U      S <- e^G64 S + Yk^T diag(e^(G64 - G) f) U
// gdn_prompt_rows makes y and f, gdn_prompt_chunks T and P, both of all chunks at once; gdn_prompt_scan walks along the chunks of a run with S in registers; gdn_prompt_norm is the gated norm.
//
// Numbers: y is exact in bf16; whatever else meets the matrix units is split into two bf16 (16 bits of mantissa), sums are f32, as are S, G, e^G and the solve. O is rounded to bf16 before
// its norm, as transformers does. u and k are rounded to the ring's dtype when they are kept, not before.
// A row's bits depend on the rows before it and on its place on the grid: what a matrix product takes of later rows is a zero.
// Rows off the grid (a run that begins inside a chunk) are the plain kernel's: gdn_rows goes before with kGdnToGrid.

namespace quern::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

/// Within a few ulps of silu(), before it is rounded to bf16: exact divisions branch, which keeps those of several elements from overlapping.
__device__ float quick_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

/// Eight raw channels of an index, as words of two.
__device__ uint4 raw_eight(const GdnArgs& g, const Tile& t, int index, int channel, int channels) {
  if (index < 0 || index >= t.base + t.rows) return {0, 0, 0, 0};
  const int window = 3 + g.k_max + 1;
  const void* from = index >= t.cursor ? g.qkv : g.conv_window;
  const int64_t row = index >= t.cursor ? int64_t{t.first_row} + index - t.cursor : int64_t{t.slot} * window + index % window;
  return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + row * channels + channel);
}

}  // namespace

/// blockIdx: (tile, head of q, then k, then v). Sixteen lanes have a row's 128 channels, and eight rows after one another.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prompt_rows(const __grid_constant__ GdnPromptArgs args) {
  const GdnArgs& g = args.gdn;
  const Tile t = tile_of(g, args.first_tile + static_cast<int>(blockIdx.x));
  if (t.rows == 0) return;
  constexpr int kRowsEach = kChunk / (kThreads / 16);
  const int head = static_cast<int>(blockIdx.y), heads = 2 * g.num_k_heads + g.num_v_heads, channels = heads * kDim;
  const int lane = static_cast<int>(threadIdx.x) % 16, first = static_cast<int>(threadIdx.x) / 16 * kRowsEach, channel = head * kDim + lane * 8;
  float weight[4][8];
#pragma unroll
  for (int tap = 0; tap < 4; ++tap)
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[tap][i] = g.conv[tap * channels + channel + i];
  const bool normalizes = head < 2 * g.num_k_heads;
  const float scale = head < g.num_k_heads ? 1.0f / sqrtf(static_cast<float>(kDim)) : 1.0f;
  unsigned char* image = args.rows + (int64_t{blockIdx.x} * heads + head) * kGdnPromptRowBytes;
  float x[4][8];  // of the indices index - 3 .. index, at index mod 4
#pragma unroll
  for (int tap = 0; tap < 3; ++tap) unpack8(raw_eight(g, t, t.base + first - 3 + tap, channel, channels), x[(tap + 1) % 4]);
#pragma unroll
  for (int r = 0; r < kRowsEach; ++r) {
    const int row = first + r;
    unpack8(raw_eight(g, t, t.base + row, channel, channels), x[r % 4]);
    float y[8], square = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = 0;
#pragma unroll
      for (int tap = 0; tap < 4; ++tap) sum = fmaf(weight[tap][i], x[(r + 1 + tap) % 4][i], sum);
      y[i] = row < t.rows ? round_to(DType::kBF16, quick_silu(sum)) : 0.0f;
      square = fmaf(y[i], y[i], square);
    }
    *reinterpret_cast<uint4*>(image + image_at(row, lane)) = make_uint4(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]), bf16_pair(y[4], y[5]), bf16_pair(y[6], y[7]));
    if (!normalizes) continue;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
    if (lane == 0) args.factors[(int64_t{blockIdx.x} * 2 * g.num_k_heads + head) * kChunk + row] = row < t.rows ? 1.0f / sqrtf(square + 1e-6f) * scale : 0.0f;
  }
}

namespace {

/// (I + L)^-1 by columns, one a thread: with x_j known, L_ij x_j leaves all later rows. `lower` is L by columns.
template <int kBegin, int kEnd>
__device__ void eliminate(const float* lower, float (&x)[kChunk]) {
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < kChunk; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + j * kChunk + i);  // zero for rows up to j
      x[i] = fmaf(-l.x, x[j], x[i]);
      x[i + 1] = fmaf(-l.y, x[j], x[i + 1]);
      x[i + 2] = fmaf(-l.z, x[j], x[i + 2]);
      x[i + 3] = fmaf(-l.w, x[j], x[i + 3]);
    }
  }
}

}  // namespace

/// blockIdx: (tile, value head). A warp has 16 rows of L and P; then two warps have a column of the inverse a lane.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prompt_chunks(const __grid_constant__ GdnPromptArgs args) {
  __shared__ __align__(128) unsigned char keys[kGdnPromptRowBytes];     // afterwards L, f32 by columns
  __shared__ __align__(128) unsigned char queries[kGdnPromptRowBytes];  // afterwards T and its remainder
  __shared__ float sums[kChunk], beta[kChunk], key_factor[kChunk], query_factor[kChunk];
  static_assert(sizeof keys == kChunk * kChunk * sizeof(float) && sizeof queries == 2 * kGdnPromptImageBytes);
  const GdnArgs& g = args.gdn;
  const Tile t = tile_of(g, args.first_tile + static_cast<int>(blockIdx.x));
  if (t.rows == 0) return;
  const int head = static_cast<int>(blockIdx.y), k_head = g.k_head[head], heads = 2 * g.num_k_heads + g.num_v_heads;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const unsigned char* images = args.rows + int64_t{blockIdx.x} * heads * kGdnPromptRowBytes;
  for (int at = thread * 16; at < kGdnPromptRowBytes; at += kThreads * 16) {
    copy_async(queries + at, images + int64_t{k_head} * kGdnPromptRowBytes + at);
    copy_async(keys + at, images + int64_t{g.num_k_heads + k_head} * kGdnPromptRowBytes + at);
  }
  commit_copies();
  if (thread < kChunk) {
    const bool there = thread < t.rows;
    const int64_t at = (int64_t{t.first_row} + t.base + thread - t.cursor) * g.num_v_heads + head;
    const float* factors = args.factors + int64_t{blockIdx.x} * 2 * g.num_k_heads * kChunk + thread;
    beta[thread] = there ? round_to(g.activation, sigmoid(load(g.b, g.activation, at))) : 0.0f;
    sums[thread] = there ? g.decay[head] * softplus(load(g.a, g.activation, at) + g.dt_bias[head]) : 0.0f;
    query_factor[thread] = factors[k_head * kChunk];
    key_factor[thread] = factors[(g.num_k_heads + k_head) * kChunk];
  }
  __syncthreads();
  if (thread == 0) {
    float total = sums[0];
#pragma unroll
    for (int j = 1; j < kChunk; ++j) {
      total += sums[j];
      sums[j] = total;
    }
  }
  await_copies<0>();
  __syncthreads();

  float kk[kChunk / 8][4] = {}, qk[kChunk / 8][4] = {};  // rows lane / 4 (+ 8) of the warp's 16, columns 8 n + 2 (lane % 4) (+ 1)
  const uint32_t keys_at = shared_address(keys), queries_at = shared_address(queries);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t k[4], q[4];
    const uint32_t own = image_at(warp * 16 + lane % 16, step * 2 + lane / 16);
    load_matrices(k, keys_at + own);
    load_matrices(q, queries_at + own);
#pragma unroll
    for (int n = 0; n < kChunk / 8; n += 2) {
      if (n > 2 * warp) continue;  // above the diagonal
      uint32_t b[4];
      load_matrices(b, keys_at + image_at(8 * n + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply_add(kk[n], k, b[0], b[1]);
      multiply_add(kk[n + 1], k, b[2], b[3]);
      multiply_add(qk[n], q, b[0], b[1]);
      multiply_add(qk[n + 1], q, b[2], b[3]);
    }
  }
  __syncthreads();  // keys and queries have been read

  float* lower = reinterpret_cast<float*>(keys);
  unsigned char* matrices = args.matrices + (int64_t{blockIdx.x} * g.num_v_heads + head) * 4 * kGdnPromptImageBytes;
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    float p[4] = {};
    if (n <= 2 * warp + 1)  // else above the diagonal
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = warp * 16 + lane / 4 + e / 2 * 8, j = n * 8 + lane % 4 * 2 + e % 2;
      const float factor = j <= i ? expf(sums[i] - sums[j]) * key_factor[j] : 0.0f;
      lower[j * kChunk + i] = j < i ? beta[i] * key_factor[i] * factor * kk[n][e] : 0.0f;
      p[e] = j <= i ? query_factor[i] * factor * qk[n][e] : 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = image_at(warp * 16 + lane / 4 + half * 8, n) + lane % 4 * 4;
      uint32_t rounded, remainder;
      split(p[2 * half], p[2 * half + 1], rounded, remainder);
      *reinterpret_cast<uint32_t*>(matrices + 2 * kGdnPromptImageBytes + at) = rounded;
      *reinterpret_cast<uint32_t*>(matrices + 3 * kGdnPromptImageBytes + at) = remainder;
    }
  }
  if (thread < kChunk) {
    float* scalars = args.scalars + ((int64_t{blockIdx.x} * g.num_v_heads + head) * kChunk + thread) * 4;
    const float decay = expf(sums[thread]), rest = expf(sums[kChunk - 1] - sums[thread]);
    *reinterpret_cast<float4*>(scalars) = make_float4(decay * key_factor[thread], decay * query_factor[thread], rest * key_factor[thread], sums[thread]);
  }
  __syncthreads();
  // Which two warps it is changes from block to block: a multiprocessor gives the warps of one number to one of its quarters.
  if (const int turn = (warp + static_cast<int>(blockIdx.x + blockIdx.y)) % kWarps, column = turn * 32 + lane; turn < 2) {
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = i == column ? 1.0f : 0.0f;
    if (turn == 0) eliminate<0, kChunk / 2>(lower, x);  // the other warp's columns begin below
    eliminate<kChunk / 2, kChunk>(lower, x);
    const float column_beta = beta[column];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float value = x[i] * column_beta;
      const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
      const uint32_t at = image_at(i, column / 8) + column % 8 * 2;
      *reinterpret_cast<__nv_bfloat16*>(queries + at) = rounded;
      *reinterpret_cast<__nv_bfloat16*>(queries + kGdnPromptImageBytes + at) = __float2bfloat16_rn(value - __bfloat162float(rounded));
    }
  }
  __syncthreads();
  for (int at = thread * 16; at < 2 * kGdnPromptImageBytes; at += kThreads * 16) *reinterpret_cast<uint4*>(matrices + at) = *reinterpret_cast<const uint4*>(queries + at);
}

namespace {

/// The A operand of 16 columns of a matrix that stands in sums: tiles n and n + 1 of it, split.
__device__ void operand(const float (&low)[4], const float (&high)[4], uint32_t (&rounded)[4], uint32_t (&remainder)[4]) {
  split(low[0], low[1], rounded[0], remainder[0]);
  split(low[2], low[3], rounded[1], remainder[1]);
  split(high[0], high[1], rounded[2], remainder[2]);
  split(high[2], high[3], rounded[3], remainder[3]);
}

/// sums [16, 64] += x [16, 64] M^T for a lower triangular M [64, 64]: rows of M from 16 j on meet the columns 16 j .. of x.
__device__ void multiply_lower(float (&sums)[kChunk / 8][4], const float (&x)[kChunk / 8][4], uint32_t matrix, uint32_t matrix_rest, int lane) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    uint32_t a[4], a_rest[4];
    operand(x[2 * step], x[2 * step + 1], a, a_rest);
#pragma unroll
    for (int n = 2 * step; n < kChunk / 8; n += 2) {
      const uint32_t at = image_at(8 * n + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2);
      uint32_t b[4], b_rest[4];
      load_matrices(b, matrix + at);
      load_matrices(b_rest, matrix_rest + at);
      multiply_add(sums[n], a, b[0], b[1]);
      multiply_add(sums[n + 1], a, b[2], b[3]);
      multiply_add(sums[n], a_rest, b[0], b[1]);
      multiply_add(sums[n + 1], a_rest, b[2], b[3]);
      multiply_add(sums[n], a, b_rest[0], b_rest[1]);
      multiply_add(sums[n + 1], a, b_rest[2], b_rest[3]);
    }
  }
}

/// blockIdx: (half of a value head's columns, run). A warp has 16 columns of S, transposed: rows of the A operand are columns of the head. No warp waits for another but for copies.
template <int kStages>
__device__ void scan(const GdnPromptArgs& args) {
  extern __shared__ __align__(128) unsigned char memory[];
  Stage* stages = reinterpret_cast<Stage*>(memory);
  const GdnArgs& g = args.gdn;
  constexpr int kParts = kDim / kGdnPromptColumns;
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts, k_head = g.k_head[head];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int column = part * kGdnPromptColumns + warp * 16;
  const Chunks chunks(args, args.gdn.first_run + static_cast<int>(blockIdx.y));
  if (chunks.begin >= chunks.end) return;

  const auto fetch = [&](int tile, Stage& s) {
    if (tile < chunks.end) {
      const StageSource from = stage_source(args, tile, head, k_head, part);
      const auto copy = [&](void* to, const unsigned char* source, int bytes) {
        for (int at = thread * 16; at < bytes; at += kThreads * 16) copy_async(static_cast<unsigned char*>(to) + at, source + at);
      };
      copy(s.keys, from.keys, kGdnPromptRowBytes);
      copy(s.queries, from.queries, kGdnPromptRowBytes);
      copy(s.t, from.matrices, 4 * kGdnPromptImageBytes);
      copy(s.values, from.values, kGdnPromptImageBytes);
      copy(s.scalars, from.scalars, kGdnPromptScalarBytes);
    }
    commit_copies();
  };

  const StoredState stored(g, chunks.record.slot, head);
  const int stored_at = (column + lane / 4) * kDim + lane % 4 * 2;
  float state[kDim / 8][4];  // S transposed: columns lane / 4 (+ 8) of the warp's, elements 8 n + 2 (lane % 4) (+ 1) of k
  const auto each_pair = [&](const auto& visit) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) visit(stored_at + half * 8 * kDim + n * 8, state[n][2 * half], state[n][2 * half + 1]);
  };
  stored.read_pairs(each_pair);
  bool folded = false;

  fetch(chunks.begin, stages[0]);
  for (int tile = chunks.begin; tile < chunks.end; ++tile) {
    const Tile t = chunks.at(g, tile);
    Stage& s = stages[kStages == 2 ? (tile - chunks.begin) % 2 : 0];
    if constexpr (kStages == 2) fetch(tile + 1, stages[(tile + 1 - chunks.begin) % 2]);
    await_copies<kStages - 1>();
    __syncthreads();
    const uint32_t keys = shared_address(s.keys), queries = shared_address(s.queries), values = shared_address(s.values);

    float o[kChunk / 8][4] = {}, known[kChunk / 8][4] = {};  // transposed as well: column 8 n + 2 (lane % 4) (+ 1) is a row of the chunk
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4], a_rest[4];
      operand(state[2 * step], state[2 * step + 1], a, a_rest);
#pragma unroll
      for (int n = 0; n < kChunk / 8; n += 2) {
        const uint32_t at = image_at(8 * n + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2);
        uint32_t k[4], q[4];
        load_matrices(k, keys + at);
        load_matrices(q, queries + at);
        multiply_add(known[n], a, k[0], k[1]);
        multiply_add(known[n + 1], a, k[2], k[3]);
        multiply_add(o[n], a, q[0], q[1]);
        multiply_add(o[n + 1], a, q[2], q[3]);
        multiply_add(known[n], a_rest, k[0], k[1]);
        multiply_add(known[n + 1], a_rest, k[2], k[3]);
        multiply_add(o[n], a_rest, q[0], q[1]);
        multiply_add(o[n + 1], a_rest, q[2], q[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kChunk / 8; n += 2) {
      uint32_t v[4];  // tile n, columns 0 .. 7 and 8 .. 15; tile n + 1
      load_matrices_transposed(v, values + image_at(8 * n + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int tile_of_two = 0; tile_of_two < 2; ++tile_of_two) {
        const int m = n + tile_of_two;
        const float4 even = s.scalars[8 * m + lane % 4 * 2], odd = s.scalars[8 * m + lane % 4 * 2 + 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          known[m][2 * half] = low_of(v[2 * tile_of_two + half]) - even.x * known[m][2 * half];
          known[m][2 * half + 1] = high_of(v[2 * tile_of_two + half]) - odd.x * known[m][2 * half + 1];
          o[m][2 * half] *= even.y;
          o[m][2 * half + 1] *= odd.y;
        }
      }
    }
    float u[kChunk / 8][4] = {};
    multiply_lower(u, known, shared_address(s.t), shared_address(s.t_rest), lane);
    multiply_lower(o, u, shared_address(s.p), shared_address(s.p_rest), lane);

#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) store_transposed(g, t, head, column, n, o[n]);

    if (t.rows == kChunk) {
      const float total = expf(s.scalars[kChunk - 1].w);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] *= total;
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const float even = s.scalars[8 * n + lane % 4 * 2].z, odd = s.scalars[8 * n + lane % 4 * 2 + 1].z;
#pragma unroll
        for (int e = 0; e < 4; ++e) u[n][e] *= e % 2 == 0 ? even : odd;
      }
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        uint32_t a[4], a_rest[4];
        operand(u[2 * step], u[2 * step + 1], a, a_rest);
#pragma unroll
        for (int n = 0; n < kDim / 8; n += 2) {
          uint32_t k[4];  // rows 0 .. 7 and 8 .. 15 of the step for tile n, then for tile n + 1
          load_matrices_transposed(k, keys + image_at(step * 16 + lane / 8 % 2 * 8 + lane % 8, n + lane / 16));
          multiply_add(state[n], a, k[0], k[1]);
          multiply_add(state[n + 1], a, k[2], k[3]);
          multiply_add(state[n], a_rest, k[0], k[1]);
          multiply_add(state[n + 1], a_rest, k[2], k[3]);
        }
      }
      folded = true;
    } else {  // the run's last chunk: its rows are kept
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) keep_updates(g, t, head, column, n, u[n]);
      if (part == 0) keep_keys<kThreads>(args, t, tile, head, s.keys, s.scalars);
    }
    __syncthreads();  // the stage is free
    if constexpr (kStages == 1) fetch(tile + 1, s);
  }
  await_copies<0>();
  if (folded) stored.write_pairs(each_pair);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) gdn_prompt_scan_1(const __grid_constant__ GdnPromptArgs args) { scan<1>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prompt_scan_2(const __grid_constant__ GdnPromptArgs args) { scan<2>(args); }

/// blockIdx: (tile, value head). out <- rms norm of out, times the norm's weight and silu(z); a warp has a row.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prompt_norm(const __grid_constant__ GdnPromptArgs args) {
  const GdnArgs& g = args.gdn;
  const Tile t = tile_of(g, args.first_tile + static_cast<int>(blockIdx.x));
  const int head = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* weight = g.norm + lane * 4;  // behind vectors of any number of heads: not aligned
  for (int row = warp; row < t.rows; row += kWarps) {
    const int64_t at = ((int64_t{t.first_row} + t.base + row - t.cursor) * g.num_v_heads + head) * kDim + lane * 4;
    uint2* out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(g.out) + at);
    const uint2 o = *out, z = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(g.z) + at);
    const float x[4] = {low_of(o.x), high_of(o.x), low_of(o.y), high_of(o.y)};
    const float sum = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(kDim) + g.eps);
    *out = make_uint2(bf16_pair(x[0] * scale * weight[0] * quick_silu(low_of(z.x)), x[1] * scale * weight[1] * quick_silu(high_of(z.x))),
                      bf16_pair(x[2] * scale * weight[2] * quick_silu(low_of(z.y)), x[3] * scale * weight[3] * quick_silu(high_of(z.y))));
  }
}

}  // namespace quern::cuda
