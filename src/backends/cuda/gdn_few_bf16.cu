#include "backends/cuda/gdn_bf16.cuh"

// Up to 4 decode or verify rows of few runs, of heads of 128 x 128 whose ring is bfloat16: a run and a value head have a block, alone on
// its multiprocessor. Memory is no matter here, only how long a block takes from the end of the projections before it to its own end, so
//
// - whatever earlier steps have left is there before: a warp has its 16 columns of S's upper half in registers, and a chunk that is due to
//   be folded (as after a verify that ended it) was folded. Behind the wait addresses are known, and one round of loads is all there is;
// - all rows go through each stage together: convolution, a row's k and q a warp; products of keys, a matrix instruction for all rows;
//   their weights, a row and position a lane; sums over S, which is read once. Only what a row's update needs of those before it is left
//   to be done row after row, in registers;
// - code is short: instructions are fetched from far by blocks that run once.
//
// Rows that end their chunk and begin the next are taken in two turns with the fold between them. Sums are those of gdn_decode_bf16.cu, in
// the same order.

namespace quern::cuda {

namespace {

template <int kRows>
struct Shared {
  // Halves of S where a chunk is folded; pieces of 16 bytes of a column permuted: state_piece.
  alignas(128) uint16_t upper[kWarps][kColumns][kDim], lower[kWarps][kColumns][kDim];
  __nv_bfloat16 updates[kWarps][kChunk][kColumns];  // by position, pieces of 16 bytes permuted: update_piece
  __nv_bfloat16 keys[kChunk][kDim];                 // of a chunk that is folded; swizzled
  float sums[kChunk];                               // G, of a chunk that rows end
  uint32_t weights[kRows][kTerms][4][8];            // pairs, as a matrix instruction's lanes have them: weight_at
  __nv_bfloat16 parts[kRows][kParts][kDim];
  float dots[kRows][kParts][kChunk];  // by position: kj . k, and kj . q in two
  __nv_bfloat16 v[kRows][kDim];
  Factors factors[kRows];
  float squares[kRows][kWarps];  // of the outputs
  bool reads_last;               // of a key head's blocks
};

/// Begins to copy the warp's columns of a head's updates at the first `count` positions of the chunk at `start`, and zeros up to position
/// `end`.
template <int kRows>
__device__ void begin_updates(Shared<kRows>& s, const GdnArgs& g, const Job& job, int start, int count, int end, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i)
    if (const int j = lane / 2 + 16 * i; j < end)
      copy_async(&s.updates[warp][j][update_piece(j, lane % 2) * 8],
                 static_cast<const __nv_bfloat16*>(g.ring_u) + (ring_row(g, job, start, j) * g.num_v_heads + job.head) * kDim +
                     warp * kColumns + lane % 2 * 8,
                 j < count);
}
/// Where a lane's pieces of the key at position `at` of the warp's chunk stand.
template <int kRows>
__device__ uint4* staged_key(Shared<kRows>& s, int at, int piece) {
  return reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(s.keys) + swizzled<kDim / 8>(at, piece));
}
/// Folds the staged chunk into the warp's columns of S in shared memory. `sum` and `sum_further`: G at the positions lane and lane + 32.
template <int kRows>
__device__ __noinline__ void fold_staged(Shared<kRows>& s, const GdnArgs& g, float sum, float sum_further) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float total = __shfl_sync(kAllLanes, sum_further, 31), factors[2] = {expf(total - sum), expf(total - sum_further)};
  fold<true>(s, g, Job{}, 0, expf(total), factors, kChunk, nullptr, warp, lane);
}
/// The chunk of 64 rows from the stored boundary on is folded into S in shared memory, before its keys are overwritten. All threads.
template <int kRows>
__device__ void fold_what_is_due(Shared<kRows>& s, const GdnArgs& g, const Job& job, int run, int warp, int lane) {
  const int start = job.boundary % (kChunk + g.k_max + 1);
  const Halves stored = halves_of(g, job.slot, job.head);
  begin_half(s.upper[warp], stored.upper, warp, lane);
  begin_half(s.lower[warp], stored.lower, warp, lane);
  begin_updates(s, g, job, start, kChunk, kChunk, warp, lane);
#pragma unroll
  for (int i = 0; i < kChunk / kWarps / 2; ++i) {
    const int j = warp * (kChunk / kWarps) + 2 * i + lane / 16, piece = lane % 16;
    copy_async(staged_key(s, j, piece),
               static_cast<const __nv_bfloat16*>(g.ring_k) + (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 8 * piece);
  }
  commit_copies();
  const float sum = __ldcg(g.ring_g + ring_row(g, job, start, lane) * g.num_v_heads + job.head),
              sum_further = __ldcg(g.ring_g + ring_row(g, job, start, lane + 32) * g.num_v_heads + job.head);
  await_copies<0>();
  __syncthreads();
  // Keys of these rows may take the place of some that were just read, so the block that reads them last writes those.
  if (threadIdx.x == 0) {
    const auto last = static_cast<unsigned>(g.first_head[job.k_head + 1] - g.first_head[job.k_head] - 1);
    s.reads_last = atomicInc(g.key_readers + run * g.num_k_heads + job.k_head, last) == last;
  }
  fold_staged(s, g, sum, sum_further);
}

template <int kRows>
__device__ void decode(const GdnArgs& g) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared<kRows>& s = *reinterpret_cast<Shared<kRows>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int run = static_cast<int>(blockIdx.x) / g.num_v_heads;
  Job job;
  job.head = static_cast<int>(blockIdx.x) - run * g.num_v_heads;
  job.end_head = job.head + 1;
  job.k_head = g.k_head[job.head];
  const RunRecord record = g.step.runs[run];
  if (!has_rows(record)) return await_predecessor();
  const int rows = kRows == 1 ? 1 : record.num_rows;
  job.slot = record.slot;
  job.first_row = record.first_row;
  job.cursor = g.step.cursor[job.slot];
  job.end = job.cursor + rows;
  job.boundary = g.step.boundary[job.slot];
  job.window = job.cursor % (3 + g.k_max + 1);
  job.start = job.cursor / kChunk * kChunk % (kChunk + g.k_max + 1);
  job.committed = (record.flags & kIsCommitted) != 0;
  job.keeps_keys = g.first_head[job.k_head] == job.head;
  const int head = job.head, first = job.cursor % kChunk;
  // Not both: rows that also end a chunk would be further ahead than a ring holds.
  const bool due = job.boundary + kChunk <= job.cursor, ends = first + rows >= kChunk, stores = due || (ends && job.committed);
  const int keys = g.num_k_heads * kDim, channels = 2 * keys + g.num_v_heads * kDim;

  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  const Halves stored = halves_of(g, job.slot, head);
  uint4 state[kDim / 32][2];  // of the columns lane / 4 and the one 8 further, by 32 places, of which a lane has eight: upper halves
  const auto in_memory = [&](int i, int half) {
    return reinterpret_cast<uint4*>(&s.upper[warp][lane / 4 + 8 * half][lane_place(lane, i)]);
  };
  const auto each_piece = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) visit(state[i][half], i, half);
  };
  const auto read_folded = [&] { each_piece([&](uint4& piece, int i, int half) { piece = *in_memory(i, half); }); };
  if (due) {
    fold_what_is_due(s, g, job, run, warp, lane);
    read_folded();
  } else {
    each_piece([&](uint4& piece, int i, int half) {
      piece =
          __ldcg(reinterpret_cast<const uint4*>(stored.upper + (warp * kColumns + lane / 4 + 8 * half) * kDim + 32 * i + 8 * (lane % 4)));
    });
    if (ends) begin_half(s.lower[warp], stored.lower, warp, lane);
  }
  begin_updates(s, g, job, job.start, first, min((first + kRows - 1) / 16 * 16 + 16, kChunk), warp, lane);
  commit_copies();
  // A lane has pieces of the key at position lane / 4 of the warp's eight, and for row lane / 8 what belongs to position lane % 8.
  const int key_at = warp * 8 + lane / 4, my_row = lane / 8, mine_at = warp * 8 + lane % 8;
  uint4 earlier[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    earlier[i] = key_at < first ? __ldcg(reinterpret_cast<const uint4*>(
                                      static_cast<const __nv_bfloat16*>(g.ring_k) +
                                      (ring_row(g, job, job.start, key_at) * g.num_k_heads + job.k_head) * kDim + 8 * (lane % 4) + 32 * i))
                                : make_uint4(0, 0, 0, 0);
  float sum_at = 0, total = 0;
  if (mine_at < first) sum_at = __ldcg(g.ring_g + ring_row(g, job, job.start, mine_at) * g.num_v_heads + head);
  if (first > 0) total = __ldcg(g.ring_g + ring_row(g, job, job.start, first - 1) * g.num_v_heads + head);
  const float decay_rate = g.decay[head], dt_bias = g.dt_bias[head];
  // Of sums over a head's 16 columns a lane keeps that of one: with k, or with q.
  const int my_column = lane / 4 + lane % 4 / 2 * 8, column = warp * kColumns + my_column;
  const bool has_q = lane % 2 == 1;
  const float norm_weight = g.norm[column];
  // A warp has k or q of a row, and half of its v. A lane has four channels, and two of v.
  const bool is_key = kRows == 1 ? warp % 2 == 0 : warp < 4;
  const int row = kRows == 1 ? 0 : warp % 4;
  const bool converts = kRows == 1 ? warp < 2 : row < rows;
  const int channel = (is_key ? keys : 0) + job.k_head * kDim + 4 * lane, channel_of_head = (is_key ? 0 : 64) + 2 * lane,
            v_channel = 2 * keys + head * kDim + channel_of_head;
  float4 taps[4];
  float2 v_taps[4];
  uint2 raw[4];
  uint32_t v_raw[4];
#pragma unroll
  for (int tap = 0; tap < 4; ++tap) {
    taps[tap] = four(g.conv + tap * channels + channel);
    v_taps[tap] = *reinterpret_cast<const float2*>(g.conv + tap * channels + v_channel);
    raw[tap] = make_uint2(0, 0);
    v_raw[tap] = 0;
    if (const int index = job.cursor + row - 3 + tap; index < job.cursor && index >= 0) {
      raw[tap] = __ldcg(reinterpret_cast<const uint2*>(job.kept_columns(g, index, channel)));
      v_raw[tap] = __ldcg(reinterpret_cast<const uint32_t*>(job.kept_columns(g, index, v_channel)));
    }
  }
  const __nv_bfloat16* given = job.given_columns(g, job.cursor + row - 3, 0);
  const int gate = (job.first_row + min(my_row, rows - 1)) * g.num_v_heads + head,
            at_z = (job.first_row * g.num_v_heads + head) * kDim + column;
  const auto bits = [](const void* values, int at) { return __ldcg(static_cast<const unsigned short*>(values) + at); };
  const auto of_bits = [](uint32_t x) { return __uint_as_float(x << 16); };
  release_successor();
  await_predecessor();
#pragma unroll
  for (int tap = kRows == 1 ? 3 : 0; tap < 4; ++tap)
    if (converts && row - 3 + tap >= 0) {
      raw[tap] = __ldcg(reinterpret_cast<const uint2*>(given + tap * channels + channel));
      v_raw[tap] = __ldcg(reinterpret_cast<const uint32_t*>(given + tap * channels + v_channel));
    }
  const float b = of_bits(bits(g.b, gate)), a = of_bits(bits(g.a, gate));
  uint16_t z[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) z[r] = bits(g.z, at_z + min(r, rows - 1) * g.num_v_heads * kDim);

  const float beta = round_to(DType::kBF16, __fdividef(1.0f, 1.0f + expf(-b))), step = __fmul_rn(decay_rate, softplus(a + dt_bias));
  uint2 high;  // of k or q
  {
    float4 y{0, 0, 0, 0};
    float2 v{0, 0};
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) {
      const float4 x = widened_four(raw[tap]), w = taps[tap];
      y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
      v = {fmaf(v_taps[tap].x, of_bits(v_raw[tap]), v.x), fmaf(v_taps[tap].y, __uint_as_float(v_raw[tap] & 0xffff0000u), v.y)};
    }
    y = {silu_as_bf16(y.x), silu_as_bf16(y.y), silu_as_bf16(y.z), silu_as_bf16(y.w)};
    v = {silu_as_bf16(v.x), silu_as_bf16(v.y)};
    const float factor = rsqrtf(warp_sum(dot(y, y, 0.0f)) + 1e-6f) * (is_key ? 1.0f : rsqrtf(static_cast<float>(kDim)));
    y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
    if (is_key) y = {round_to(DType::kBF16, y.x), round_to(DType::kBF16, y.y), round_to(DType::kBF16, y.z), round_to(DType::kBF16, y.w)};
    const SplitPair front = split(y.x, y.y), back = split(y.z, y.w);
    high = {front.high, back.high};
    if (converts) {
      *reinterpret_cast<uint2*>(&s.parts[row][is_key ? 0 : 1][4 * lane]) = high;
      if (!is_key) *reinterpret_cast<uint2*>(&s.parts[row][2][4 * lane]) = {front.low, back.low};
      *reinterpret_cast<uint32_t*>(&s.v[row][channel_of_head]) = split(v.x, v.y).high;
    }
    __syncthreads();
  }

  float y[kRows] = {}, squares[kRows] = {};
  // The rows [from, to) stand in one chunk, row r at position r + shift; those behind them begin the next.
  int from = 0, to = min(rows, kChunk - first), shift = first;
#pragma unroll 1
  for (;;) {
    // Keys of the rows themselves, and products of all with k and q.
    {
      if (const int r = key_at - shift; r >= from && r < to)
#pragma unroll
        for (int i = 0; i < 4; ++i) earlier[i] = *reinterpret_cast<const uint4*>(&s.parts[r][0][8 * (lane % 4) + 32 * i]);
      if (ends && from == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) *staged_key(s, key_at, lane % 4 + 4 * i) = earlier[i];
      put_dots<kRows>(s, earlier, warp, lane);
    }
    // Weights of updates.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float of_row = __shfl_sync(kAllLanes, step, 8 * r);
      if (r < from || r > my_row) continue;
      total = shift + r > 0 ? __fadd_rn(total, of_row) : of_row;
      if (mine_at == shift + r) sum_at = total;
    }
    const float decay = mine_at < shift + my_row ? expf(total - sum_at) : 0.0f;
    __syncwarp();
    if (my_row >= from && my_row < to) {
      const float dot_q = s.dots[my_row][1][mine_at] + s.dots[my_row][2][mine_at];
      if (ends && from == 0 && my_row == to - 1) s.sums[mine_at] = sum_at;
      if (mine_at == shift + my_row) {
        s.factors[my_row] = {beta, expf(total), total, dot_q};
        g.ring_g[ring_row(g, job, job.start, first + my_row) * g.num_v_heads + head] = total;
      }
      const SplitPair both = split(decay == 0.0f ? 0.0f : decay * s.dots[my_row][0][mine_at], decay == 0.0f ? 0.0f : decay * dot_q);
      auto* weights = reinterpret_cast<uint16_t*>(&s.weights[my_row]) + weight_at(mine_at);
      weights[0] = static_cast<uint16_t>(both.high);
      weights[kChunk] = static_cast<uint16_t>(both.low);
      weights[2 * kChunk] = static_cast<uint16_t>(both.high >> 16);
      weights[3 * kChunk] = static_cast<uint16_t>(both.low >> 16);
    }
    await_copies<0>();
    __syncthreads();

    // Along the updates of earlier positions: a lane has the sums of its column in two terms. First of those 16 at a time that no row is
    // among.
    float sums[kRows][4] = {};
    const uint32_t updates = shared_address(&s.updates[warp][lane / 16 * 8 + lane % 8][update_piece(lane % 8, lane / 8 % 2) * 8]);
    const auto weights_at = [&](int r, int of_16) {
      return *reinterpret_cast<const uint2*>(&s.weights[r][lane / 4 % kTerms][lane % 4][2 * of_16]);
    };
    const int full = (shift + from) / 16;
#pragma unroll 1
    for (int i = 0; i < full; ++i) {
      uint32_t u[4];
      load_matrices_transposed(u, updates + i * 16 * kColumns * sizeof(__nv_bfloat16));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint2 weights = weights_at(r, i);
        multiply_add(sums[r], u, weights.x, weights.y);
      }
    }
    // Along the state.
    float of_state[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) of_state[r] = along_state(s.parts[r], has_q, lane, [&](int i, int half) { return state[i][half]; });
    // Row after row. The updates at the 16 positions that the first row is among, and the 16 behind them, are completed in registers.
    uint32_t near[2][4] = {};
    if (from == 0) load_matrices_transposed(near[0], updates + full * 16 * kColumns * sizeof(__nv_bfloat16));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < from || r >= to) continue;
      const int position = shift + r, place = position - 16 * full;
      const Factors factors = s.factors[r];
      const float v = __bfloat162float(s.v[r][column]);
      const uint2 weights = weights_at(r, full);
      multiply_add(sums[r], near[0], weights.x, weights.y);
      if (kRows > 1 && place > 16) {
        const uint2 further = weights_at(r, full + 1);
        multiply_add(sums[r], near[1], further.x, further.y);
      }
      const auto [u, o] = finish_row(factors, v, of_state[r], sums[r], has_q, lane);
      if (r + 1 < kRows) {  // two lanes of four have the update of one column, the others that of the column 8 further
        const uint32_t mine = __bfloat16_as_ushort(u), others = __shfl_xor_sync(kAllLanes, mine, 2);
        const uint32_t lower = lane % 4 < 2 ? mine : others, upper = lane % 4 < 2 ? others : mine;
        const bool has_pair = lane % 4 == place % 8 / 2;
        const uint32_t put = place % 2 == 0 ? 0x3254 : 0x5410, keep = 0x3210;
#pragma unroll
        for (int eighth = 0; eighth < 3; ++eighth) {
          const uint32_t selector = has_pair && place / 8 == eighth ? put : keep;
          uint32_t &of_lower = near[eighth / 2][eighth % 2 * 2], &of_upper = near[eighth / 2][eighth % 2 * 2 + 1];
          of_lower = __byte_perm(of_lower, lower, selector);
          of_upper = __byte_perm(of_upper, upper, selector);
        }
      }
      if (!has_q) {
        static_cast<__nv_bfloat16*>(g.ring_u)[(ring_row(g, job, job.start, first + r) * g.num_v_heads + head) * kDim + column] = u;
        if (ends) s.updates[warp][position][update_piece(position, my_column / 8) * 8 + my_column % 8] = u;
      }
      y[r] = o * (norm_weight * fast_silu(of_bits(z[r])));
      squares[r] = __fmul_rn(o, o);
    }
    if (!ends || from > 0 || (to == rows && !job.committed)) break;
    __syncwarp();
    each_piece([&](const uint4& piece, int i, int half) { *in_memory(i, half) = piece; });
    __syncwarp();
    fold_staged(s, g, s.sums[lane], s.sums[lane + 32]);
    if (to == rows) break;
    read_folded();
    __syncthreads();  // sums of the first turn read weights of all rows, if only to drop them
    from = to;
    to = rows;
    shift = -from;
  }

  if constexpr (kRows == 4) {  // a lane has the sum of one row
    halve<2>(squares, lane, 2);
    halve<1>(squares, lane, 4);
#pragma unroll
    for (int distance = 8; distance <= 16; distance *= 2) squares[0] += __shfl_xor_sync(kAllLanes, squares[0], distance);
    if ((lane & ~6) == 0) s.squares[(lane & 2) + lane / 4][warp] = squares[0];
  } else {
#pragma unroll
    for (int distance = 2; distance <= 16; distance *= 2) squares[0] += __shfl_xor_sync(kAllLanes, squares[0], distance);
    if (lane == 0) s.squares[0][warp] = squares[0];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) continue;
    const float scale = norm_factor(s.squares[r], g.eps);
    if (has_q)
      static_cast<__nv_bfloat16*>(g.out)[((job.first_row + r) * g.num_v_heads + head) * kDim + column] = __float2bfloat16_rn(y[r] * scale);
  }
  // What the rows leave behind, besides updates and their G.
  if (converts && is_key && (due ? s.reads_last : job.keeps_keys))
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(g.ring_k) +
                              (ring_row(g, job, job.start, first + row) * g.num_k_heads + job.k_head) * kDim + 4 * lane) = high;
  if (converts && !stores) {
    *reinterpret_cast<uint32_t*>(window_at(g, job, job.cursor + row, v_channel)) = v_raw[3];
    if (job.keeps_keys) *reinterpret_cast<uint2*>(window_at(g, job, job.cursor + row, channel)) = raw[3];
  }
  if (stores) {
    store_state(s, stored, warp, lane);
    keep_columns(g, job);
  }
}

}  // namespace

// Rows at most.
#define QUERN_GDN_FEW(name, rows)                                   \
  static_assert(sizeof(Shared<rows>) <= kGdnDecodeSharedBytesBF16); \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ GdnArgs g) { decode<rows>(g); }
QUERN_GDN_FEW(gdn_few_1_bf16, 1)
QUERN_GDN_FEW(gdn_few_4_bf16, 4)

}  // namespace quern::cuda
