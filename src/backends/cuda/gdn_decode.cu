#include <type_traits>

#include "backends/cuda/gdn_jobs.cuh"

// Decode and verify rows of heads of 128 x 128 whose ring is f32. A block takes a run and the value heads of a key head one after the
// other, or one of them alone while there are few. A warp has 16 of a head's 128 columns to itself: their 8 KB of S and the ring's updates
// are copied to shared memory while whatever comes before is computed, and as soon as it has been summed over either it asks for the next
// head's, so that loads are always under way. A spilled register waits for the L2 cache here, where little of L1 is left: what a job is
// stays in shared memory, not in registers. What the value heads have in common (q, k, and the products of earlier keys with both) is made
// once; a head takes one barrier, for its norm. S is read once for up to 4 rows and written only when the 64 rows of a chunk are folded in.
// Every sum has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda {

namespace {

/// What a warp reads of a head besides S and updates, on its way while the head before is computed: of its 16 columns, and G by position.
template <int kRows>
struct alignas(16) Inputs {
  static constexpr int kRaw = 2 * (kRows + 3), kZ = 2 * kRows, kTaps = 16, kPieces = kRaw + kZ + kTaps;  // of 16 bytes, in this order:
  __nv_bfloat16 raw[kRows + 3][kColumns], z[kRows][kColumns];  // raw: of v, from the third before the first row on
  float taps[4][kColumns];
  float sums[kChunk];
  uint32_t gates[2][kRows];  // the aligned words that hold b, a
  float decay_rate, dt_bias;
  const unsigned char* from[kPieces];  // where the pieces stand of a batch's head 0
};

/// kRows: taken at a time. kStaged: updates pass through shared memory, where there is as much.
template <int kRows, bool kStaged>
struct Shared : JobsOfBlock<kRows> {
  alignas(16) float state[kWarps][kColumns][kDim];        // pieces of 16 bytes of a column permuted: state_piece
  float updates[kWarps][kStaged ? kChunk : 0][kColumns];  // by position, pieces of 16 bytes permuted: update_piece
  Inputs<kRows> inputs[kWarps];
  float k[kRows][kDim], q[kRows][kDim];  // k as the ring holds it
  float2 dots[kRows][kChunk];            // by position: kj . k and kj . q
  float squares[2][kRows][kWarps];       // of the outputs, of this head and the one before
};
static_assert(sizeof(Inputs<1>) % 16 == 0 && sizeof(Inputs<4>) % 16 == 0);
constexpr int kUpdatePieces = kColumns * sizeof(float) / 16;  // of a position
/// Where piece `i` of position j stands: lanes that read at the same time find different banks.
__device__ constexpr int update_piece(int j, int i) { return i ^ (j / 2 % 4); }
template <int kRows, bool kStaged>
__device__ float* update_at(Shared<kRows, kStaged>& s, int warp, int j, int column) {
  constexpr int kOfPiece = kColumns / kUpdatePieces;
  return &s.updates[warp][j][update_piece(j, column / kOfPiece) * kOfPiece + column % kOfPiece];
}

/// The warp's columns of a head's stored S.
__device__ float* state_of(const GdnArgs& g, const Job& job, int head, int warp) {
  return g.state + ((job.slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim;
}
/// Where piece `i` of a warp's column stands: eight columns' two pieces of matrix instructions lie in different banks.
__device__ int state_piece(int column, int i) { return i ^ 2 * (column % 4); }
/// Begins to copy the warp's columns of a head's stored S.
template <class Memory>
__device__ void begin_state(Memory& s, const GdnArgs& g, int slot, int head, int warp, int lane) {
  const float* stored = g.state + ((slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim + 4 * lane;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) copy_async(&s.state[warp][c][4 * state_piece(c, lane)], stored + c * kDim);
}
constexpr int kPairsAtOnce = 2;  // of tiles: four chains of products hide each other's latency
/// S <- e^G64 S + products for the warp's columns in shared memory, two pairs of tiles of 8 places at a time, to whose sums `add` adds: sum
/// i of tile n is of column lane / 4 + 8 (i / 2) and place 16 (first_pair + pair) + 8 n + 2 (lane % 4) + i % 2. Where `stored` is given S
/// goes there, and back where it is read again; if not, the columns at `refill`, where given, are asked for in its place as soon as it is
/// read.
template <class State, class Add>
__device__ __forceinline__ void fold_state(State& state, float decay, float* stored, const float* refill, bool is_read, int warp, int lane,
                                           const Add& add) {
  constexpr int kTiles = kDim / 16;
#pragma unroll 1
  for (int first_pair = 0; first_pair < kTiles; first_pair += kPairsAtOnce) {
    float sum[kPairsAtOnce][2][4];
    const auto at = [&](int pair, int n, int half) {
      const int column = lane / 4 + 8 * half;
      return reinterpret_cast<float2*>(
          &state[warp][column][4 * state_piece(column, 4 * (first_pair + pair) + 2 * n + lane % 4 / 2) + lane % 2 * 2]);
    };
#pragma unroll
    for (int pair = 0; pair < kPairsAtOnce; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x = *at(pair, n, half);
          sum[pair][n][2 * half] = decay * x.x;
          sum[pair][n][2 * half + 1] = decay * x.y;
        }
    if (refill != nullptr) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kPairsAtOnce; ++i) {
        const int column = lane / 4 + i % 2 * 8, piece = 4 * (first_pair + i / 2) + lane % 4;
        copy_async(&state[warp][column][4 * state_piece(column, piece)], refill + column * kDim + 4 * piece);
      }
    }
    add(first_pair, sum);
#pragma unroll
    for (int pair = 0; pair < kPairsAtOnce; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x{sum[pair][n][2 * half], sum[pair][n][2 * half + 1]};
          if (is_read) *at(pair, n, half) = x;
          if (stored != nullptr)
            *reinterpret_cast<float2*>(stored + (lane / 4 + 8 * half) * kDim + 16 * (first_pair + pair) + 8 * n + 2 * (lane % 4)) = x;
        }
  }
}
/// Adds 8 values over 8 lanes; the sum of value i ends in lane i of the eight.
__device__ float transposed_sum(float (&values)[8], int lane) {
  halve<4>(values, lane, 4);
  halve<2>(values, lane, 2);
  halve<1>(values, lane, 1);
  return values[0];
}

/// Past L1, which is small beside so much shared memory and keeps what is read again.
__device__ float4 four_once(const float* at) { return __ldcg(reinterpret_cast<const float4*>(at)); }

/// Begins to copy the warp's columns of a head's updates at the first `count` positions of the chunk at `start`.
template <int kRows, bool kStaged>
__device__ void begin_updates(Shared<kRows, kStaged>& s, const GdnArgs& g, const Job& job, int start, int count, int head, int warp,
                              int lane) {
  constexpr int kPieces = kUpdatePieces, kOfPiece = kColumns / kPieces, kAtOnce = 32 / kPieces;
  static_assert(update_piece(kAtOnce, 0) == 0);  // a lane's pieces are at the same place of each row
  if constexpr (!kStaged) return;
  const int length = kChunk + g.k_max + 1, stride = g.num_v_heads * kDim, column = lane % kPieces * kOfPiece;
  const float* updates = static_cast<const float*>(g.ring_u) + job.slot * length * stride + head * kDim + warp * kColumns + column;
  float* to = update_at(s, warp, lane / kPieces, column);
  int row = start + lane / kPieces;
#pragma unroll 1
  for (int left = count - lane / kPieces; left > 0; left -= kAtOnce) {
    if (row >= length) row -= length;
    copy_async(to, updates + row * stride);
    row += kAtOnce;
    to += kAtOnce * kColumns;
  }
}
template <int kRows, bool kStaged>
__device__ void begin_updates(Shared<kRows, kStaged>& s, const GdnArgs& g, const Job& job, const Batch& batch, int head, int warp,
                              int lane) {
  begin_updates(s, g, job, batch.start, batch.first, head, warp, lane);
}
/// Where the warp's inputs of a batch stand.
template <int kRows>
__device__ void find_inputs(Inputs<kRows>& in, const GdnArgs& g, const Job& job, const Batch& batch, int warp, int lane) {
  using In = Inputs<kRows>;
  const int values = 2 * g.num_k_heads * kDim, channels = values + g.num_v_heads * kDim;
#pragma unroll
  for (int piece = lane; piece < In::kPieces; piece += 32) {
    const void* from;
    if (piece < In::kRaw) {
      const int index = max(batch.index - 3 + min(piece / 2, batch.rows + 2), 0);
      from = job.columns(g, index, values + warp * kColumns + piece % 2 * 8);
    } else if (piece < In::kRaw + In::kZ) {
      const int i = piece - In::kRaw, row = job.first_row + batch.index - job.cursor + min(i / 2, batch.rows - 1);
      from = static_cast<const __nv_bfloat16*>(g.z) + row * (g.num_v_heads * kDim) + warp * kColumns + i % 2 * 8;
    } else {
      const int i = piece - In::kRaw - In::kZ;
      from = g.conv + i / 4 * channels + values + warp * kColumns + i % 4 * 4;
    }
    in.from[piece] = static_cast<const unsigned char*>(from);
  }
}
/// Begins to copy the warp's inputs of a head of that batch.
template <int kRows>
__device__ void begin_inputs(Inputs<kRows>& in, const GdnArgs& g, const Job& job, const Batch& batch, int head, int lane) {
  using In = Inputs<kRows>;
#pragma unroll
  for (int piece = lane; piece < In::kPieces; piece += 32)
    copy_async(reinterpret_cast<unsigned char*>(&in) + 16 * piece,
               in.from[piece] + head * kDim * (piece < In::kRaw + In::kZ ? sizeof(__nv_bfloat16) : sizeof(float)));
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (const int j = lane + 32 * half; j < batch.first)
      copy_word_async(&in.sums[j], g.ring_g + ring_row(g, job, batch.start, j) * g.num_v_heads + head);
  if (lane < 2 * kRows) {
    const auto* gates = static_cast<const __nv_bfloat16*>(lane < kRows ? g.b : g.a);
    copy_word_async(
        &in.gates[lane / kRows][lane % kRows],
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(gates + gate_at(g, job, batch, head, lane % kRows)) & ~uintptr_t{3}));
  } else if (lane < 2 * kRows + 2) {
    copy_word_async(lane == 2 * kRows ? &in.decay_rate : &in.dt_bias, (lane == 2 * kRows ? g.decay : g.dt_bias) + head);
  }
}
/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns, by all warps of the block together: where `stored` is given there, and
/// in shared memory if it is read again; if not, the columns at `refill`, where given, are asked for in its place as soon as it is read.
/// `sums`: G of the positions lane and lane + 32. Keys from position `own` on are the rows' own. The chunk's updates are staged; the keys,
/// which all warps need, take their place. Products are those of f32 to about 2^-17, factors being split in two bf16.
template <int kRows>
__device__ void fold(Shared<kRows, true>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, const float* refill, bool is_read, int warp, int lane) {
  constexpr int kSteps = kChunk / 16;  // of a matrix instruction along positions
  constexpr uint32_t kPartBytes = kChunk * kDim * sizeof(__nv_bfloat16);
  static_assert(sizeof(s.updates) == 2 * kPartBytes);
  asm volatile("" : "+r"(start), "+r"(warp), "+r"(lane));  // what is made of them here takes no registers elsewhere
  float4 keys[kChunk / kWarps];
  const auto load_keys = [&](int half) {
#pragma unroll
    for (int i = half * kChunk / kWarps / 2; i < (half + 1) * kChunk / kWarps / 2; ++i) {
      const int j = warp + kWarps * i;
      keys[i] =
          j < own
              ? four_once(static_cast<const float*>(g.ring_k) + (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 4 * lane)
              : four(&s.k[j - own][4 * lane]);
    }
  };
  load_keys(0);  // half of them: registers are few
  const float total = __shfl_sync(kAllLanes, sums[1], 31), decay = expf(total);
  const float factors[2] = {expf(total - sums[0]), expf(total - sums[1])};
  SplitPair updates[2][kSteps][2];  // of 8 columns, 16 positions, 8 of them: two positions of a column
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 16 * step + 8 * half + 2 * (lane % 4);
      const float first = __shfl_sync(kAllLanes, factors[step / 2], j % 32), second = __shfl_sync(kAllLanes, factors[step / 2], j % 32 + 1);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        updates[n][step][half] =
            split(first * *update_at(s, warp, j, 8 * n + lane / 4), second * *update_at(s, warp, j + 1, 8 * n + lane / 4));
    }
  load_keys(1);
  __syncthreads();
  const uint32_t tile = shared_address(&s.updates);
#pragma unroll
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const SplitPair front = split(keys[i].x, keys[i].y), back = split(keys[i].z, keys[i].w);
    const uint32_t at = swizzled<kDim / 8>(warp + kWarps * i, lane / 2) + lane % 2 * 8;
    auto* to = reinterpret_cast<unsigned char*>(&s.updates) + at;
    *reinterpret_cast<uint2*>(to) = {front.high, back.high};
    *reinterpret_cast<uint2*>(to + kPartBytes) = {front.low, back.low};
  }
  __syncthreads();
  fold_state(s.state, decay, stored, refill, is_read, warp, lane, [&](int first_pair, float(&sum)[kPairsAtOnce][2][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const SplitPair &u0 = updates[0][step][0], &u1 = updates[1][step][0], &u2 = updates[0][step][1], &u3 = updates[1][step][1];
      const uint32_t u_high[4] = {u0.high, u1.high, u2.high, u3.high}, u_low[4] = {u0.low, u1.low, u2.low, u3.low};
#pragma unroll
      for (int pair = 0; pair < kPairsAtOnce; ++pair) {
        const uint32_t from = tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * (first_pair + pair) + lane / 16);
        uint32_t high[4], low[4];
        load_matrices_transposed(high, from);
        load_matrices_transposed(low, from + kPartBytes);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_add(sum[pair][n], u_high, high[2 * n], high[2 * n + 1]);
          multiply_add(sum[pair][n], u_low, high[2 * n], high[2 * n + 1]);
          multiply_add(sum[pair][n], u_high, low[2 * n], low[2 * n + 1]);
        }
      }
    }
  });
  __syncthreads();  // before updates are copied there again
}

/// The same where updates and keys are read from memory, products in f32, without a refill.
template <int kRows>
__device__ void fold(Shared<kRows, false>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, const float* /*refill*/, bool /*is_read*/, int warp, int lane) {
  constexpr int kPart = 8, kAhead = 4;  // columns at a time; keys on their way
  asm volatile("" : "+r"(start), "+r"(warp), "+r"(lane));
  const float total = __shfl_sync(kAllLanes, sums[1], 31), decay = expf(total);
  const float factors[2] = {expf(total - sums[0]), expf(total - sums[1])};
  const float* ring_keys = static_cast<const float*>(g.ring_k) + job.k_head * kDim + 4 * lane;
  const float* ring_updates = static_cast<const float*>(g.ring_u) + head * kDim + warp * kColumns;
  const auto key = [&](int j) {
    return j < own ? four(ring_keys + ring_row(g, job, start, j) * (g.num_k_heads * kDim)) : four(&s.k[j - own][4 * lane]);
  };
#pragma unroll 1
  for (int part = 0; part < kColumns; part += kPart) {
    float4 ahead[kAhead], state[kPart];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = key(i);
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const float4 x = four(&s.state[warp][part + c][4 * state_piece(c, lane)]);
      state[c] = {decay * x.x, decay * x.y, decay * x.z, decay * x.w};
    }
#pragma unroll 1
    for (int base = 0; base < kChunk; base += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int j = base + i;
        const float4 k = ahead[i];
        if (base + kAhead < kChunk) ahead[i] = key(j + kAhead);
        const float factor = __shfl_sync(kAllLanes, j < 32 ? factors[0] : factors[1], j % 32);
        const float* us = ring_updates + ring_row(g, job, start, j) * (g.num_v_heads * kDim) + part;
#pragma unroll
        for (int c = 0; c < kPart; c += 4) {
          const float4 u = four(us + c);
          const float all[4] = {factor * u.x, factor * u.y, factor * u.z, factor * u.w};
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            float4& x = state[c + m];
            x = {fmaf(all[m], k.x, x.x), fmaf(all[m], k.y, x.y), fmaf(all[m], k.z, x.z), fmaf(all[m], k.w, x.w)};
          }
        }
      }
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      *reinterpret_cast<float4*>(&s.state[warp][part + c][4 * state_piece(c, lane)]) = state[c];
      if (stored != nullptr) *reinterpret_cast<float4*>(stored + (part + c) * kDim + 4 * lane) = state[c];
    }
  }
  __syncwarp();
}

/// kAlone: the block is alone on its multiprocessor, and has registers to spare.
template <int kRows, bool kStaged, bool kAlone>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kRows, kStaged>;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  constexpr bool kDeals = !kAlone, kStays = kRows == 1 && !kAlone;
  find_first<kRows, kDeals>(s, g);
  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  if (s.numbers[0] >= 0) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    begin_state(s, g, s.jobs[0].slot, s.jobs[0].head, warp, lane);
    begin_updates(s, g, s.jobs[0], s.jobs[0].begin, s.jobs[0].head, warp, lane);
    commit_copies();
  }
  if (threadIdx.x == kFinder) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  release_successor();
  const auto place = [&] { return s.place[threadIdx.x / 32]; };
  const auto next_place = [&] { return place() == 2 ? 0 : place() + 1; };
  s.place[threadIdx.x / 32] = 0;
  __syncwarp();
  while (s.numbers[place()] >= 0) {
    const Job& job = s.jobs[place()];
    int boundary_now = job.boundary, index = job.cursor;
    do {
      int thread = static_cast<int>(threadIdx.x);
      asm volatile("" : "+r"(thread));  // addresses are made anew for each batch: kept, they would push what is loaded out of the registers
      const int warp = thread / 32, lane = thread % 32;
      // Eight lanes share a place: a column of S, a row of the ring. Of sums over them, lane `phase` keeps one.
      const int group = lane / 8, phase = lane % 8;
      Inputs<kRows>& in = s.inputs[warp];
      const int keys = g.num_k_heads * kDim, channels = 2 * keys + g.num_v_heads * kDim;
      const float q_scale = rsqrtf(static_cast<float>(kDim));
      // A single row's stays where it is: registers are few.
      std::conditional_t<kStays, const Batch&, const Batch> batch = [&]() -> std::conditional_t<kStays, const Batch&, const Batch> {
        if constexpr (kRows == 1)
          return job.begin;
        else
          return batch_at<kRows>(g, job, index);
      }();
      const int rows = kRows == 1 ? 1 : batch.rows;
      const auto boundary = [&] { return kStays ? job.boundary : boundary_now; };
      const auto begins = [&] { return job.is_first || (kRows > 1 && index > job.cursor); };  // nobody has asked for inputs yet
      const auto stores_fold = [&] { return boundary() + kChunk <= job.cursor; };
      // Earlier keys: a lane has pieces of the rows warp + 8 group and 32 further.
      float4 earlier[2][4];
      const auto load_earlier = [&] {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 32 * half + 8 * group + warp;
          const float* at =
              static_cast<const float*>(g.ring_k) + (ring_row(g, job, batch.start, j) * g.num_k_heads + job.k_head) * kDim + 4 * phase;
#pragma unroll
          for (int m = 0; m < 4; ++m) earlier[half][m] = j < batch.first ? four_once(at + 32 * m) : float4{0, 0, 0, 0};
        }
      };
      // After the conv: the warps 2 r and 2 r + 1 have k and q of row r, a lane four channels.
      const int r_conv = warp / 2;
      const bool is_key = warp % 2 == 0;
      const int channel = (is_key ? keys : 0) + job.k_head * kDim + 4 * lane;
      float4 taps[4];
      uint2 raw[4];
      const auto load_raw = [&](bool given) {  // the step's rows, or those before them
        if (r_conv < rows)
#pragma unroll
          for (int tap = 0; tap < 4; ++tap)
            if (const int at = max(batch.index + r_conv - 3 + tap, 0); (kRows == 1 ? tap == 3 : at >= job.cursor) == given)
              raw[tap] =
                  __ldcg(reinterpret_cast<const uint2*>(given ? job.given_columns(g, at, channel) : job.kept_columns(g, at, channel)));
      };
      const auto load_taps = [&] {
        if (r_conv < rows)
#pragma unroll
          for (int tap = 0; tap < 4; ++tap) taps[tap] = four(g.conv + tap * channels + channel);
      };
      if constexpr (kAlone) {
        load_earlier();
        load_raw(false);
      }
      if (begins()) find_inputs(in, g, job, batch, warp, lane);
      await_predecessor();
      if constexpr (kAlone) {
        load_raw(true);
        load_taps();
      }
      if (begins()) {
        begin_inputs(in, g, job, batch, job.head, lane);
        commit_copies();
      }
      if constexpr (!kAlone) {  // registers are few: what comes later is loaded later
        load_earlier();
        load_raw(false);
        load_raw(true);
        load_taps();
      }
      if (r_conv < rows) {
        float4 y{0, 0, 0, 0};
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
          const float4 x = widened_four(batch.index + r_conv - 3 + tap >= 0 ? raw[tap] : make_uint2(0, 0)), w = taps[tap];
          y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
        }
        y = {silu_as_bf16(y.x), silu_as_bf16(y.y), silu_as_bf16(y.z), silu_as_bf16(y.w)};
        const float factor = rsqrtf(warp_sum(dot(y, y, 0.0f)) + 1e-6f) * (is_key ? 1.0f : q_scale);
        y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
        *reinterpret_cast<float4*>(&(is_key ? s.k : s.q)[r_conv][4 * lane]) = y;
        if (job.keeps_at_once && job.keeps_keys) *reinterpret_cast<uint2*>(window_at(g, job, batch.index + r_conv, channel)) = raw[3];
      }
      __syncthreads();

      // Along earlier keys and those of the rows themselves.
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (const int r = 32 * half + 8 * group + warp - batch.first; r >= 0 && r < rows)
#pragma unroll
          for (int m = 0; m < 4; ++m) earlier[half][m] = four(&s.k[r][32 * m + 4 * phase]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) continue;
        float values[4] = {};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float4 k = four(&s.k[r][32 * m + 4 * phase]), q = four(&s.q[r][32 * m + 4 * phase]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            values[2 * half] = dot(earlier[half][m], k, values[2 * half]);
            values[2 * half + 1] = dot(earlier[half][m], q, values[2 * half + 1]);
          }
        }
        halve<2>(values, lane, 4);
        halve<1>(values, lane, 2);
        const float sum = values[0] + __shfl_xor_sync(kAllLanes, values[0], 1);
        float2& dots = s.dots[r][32 * (phase / 4) + 8 * group + warp];
        if (phase % 4 == 0) dots.x = sum;
        if (phase % 4 == 2) dots.y = sum;
      }
      __syncthreads();

      const bool is_last = kRows == 1 || batch.index + rows == job.end;
      for (int head = job.head; head < job.end_head; ++head) {
        int thread = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(thread));  // as above
        const int warp = thread / 32, lane = thread % 32, group = lane / 8, phase = lane % 8;
        const int my_column = 4 * group + phase / 2, column = warp * kColumns + my_column;  // whose sums the lane keeps:
        const bool has_q = phase % 2 == 1;                                                  // those with q, or those with k
        float* mine = &s.state[warp][0][0];
        Inputs<kRows>& in = s.inputs[warp];
        // The next job is looked for beside the first head, and known to all at the last one's start. What is dealt takes a while to be
        // known.
        const bool dealt = kDeals && (g.phases & kGdnDealt) != 0, looks = is_last && head == job.head && thread == kFinder;
        int before = 0;
        if (looks && dealt) before = deal_one(g);
        if (looks && !dealt && jobs_of(g) > static_cast<int>(gridDim.x))
          find_next<kRows>(s.jobs[next_place()], s.numbers[next_place()], g, s.numbers[place()] + static_cast<int>(gridDim.x), false);
        if (job.end_head == job.head + 1 && is_last && jobs_of(g) > static_cast<int>(gridDim.x)) {
          if (looks && dealt) take_job(s, s.jobs[next_place()], s.numbers[next_place()], g, before, false);
          __syncthreads();
        }
        if (batch.base > boundary()) {
          const int old_start = boundary() % (kChunk + g.k_max + 1);
          float old_sums[2];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            old_sums[half] = g.ring_g[ring_row(g, job, old_start, lane + 32 * half) * g.num_v_heads + head];
          await_copies<0>();
          begin_updates(s, g, job, old_start, kChunk, head, warp, lane);  // in place of the new chunk's
          commit_copies();
          await_copies<0>();
          __syncwarp();
          fold(s, g, job, head, old_start, old_sums, kChunk, stores_fold() ? state_of(g, job, head, warp) : nullptr, nullptr, true, warp,
               lane);
          begin_updates(s, g, job, batch, head, warp, lane);
          commit_copies();
        }
        // What is copied next: of this job's next head, or of the next job's first.
        const bool goes_on = head + 1 < job.end_head, copies_next = goes_on || (is_last && s.numbers[next_place()] >= 0);
        const Job& next_job = goes_on ? job : s.jobs[next_place()];
        const int next_head = goes_on ? head + 1 : next_job.head;
        const auto next_batch = [&]() -> std::conditional_t<kStays, const Batch&, Batch> { return goes_on ? batch : next_job.begin; };
        // Copies were begun in the order inputs, S, updates; a batch's first inputs may have been the last.
        if (head == job.head && begins())
          await_copies<0>();
        else
          await_copies<1>();
        __syncwarp();
        const float norm_weight = g.norm[column];
        const int my_row = min(lane, kRows - 1);
        const bool upper = gate_at(g, job, batch, head, my_row) % 2 == 1;
        const float my_beta = round_to(DType::kBF16, __fdividef(1.0f, 1.0f + expf(-of_word(in.gates[0][my_row], upper)))),
                    my_step = __fmul_rn(in.decay_rate, softplus(of_word(in.gates[1][my_row], upper) + in.dt_bias));  // of row `lane`
        float total = batch.first > 0 ? in.sums[batch.first - 1] : 0.0f, my_total = 0, y[kRows], sums[2];
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
          const int position = batch.first + r;
          float v = 0;
#pragma unroll
          for (int tap = 0; tap < 4; ++tap)
            v = fmaf(in.taps[tap][my_column], batch.index + r - 3 + tap >= 0 ? __bfloat162float(in.raw[r + tap][my_column]) : 0.0f, v);
          v = silu_as_bf16(v);
          if (job.keeps_at_once && !has_q) *window_at(g, job, batch.index + r, 2 * keys + head * kDim + column) = in.raw[r + 3][my_column];
          const float step = __shfl_sync(kAllLanes, my_step, r), beta = __shfl_sync(kAllLanes, my_beta, r);
          total = position > 0 ? __fadd_rn(total, step) : step;
          if (lane == r) my_total = total;
          if (kRows > 1 && lane == 0) in.sums[position] = total;
          sums[0] = in.sums[lane];
          sums[1] = in.sums[lane + 32];
          float2 weights[2];  // of the updates at positions lane and lane + 32
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float decay = expf(total - sums[half]);
            const float2 dots = s.dots[r][lane + 32 * half];
            const bool is_earlier = lane + 32 * half < position;
            weights[half] = {is_earlier ? decay * dots.x : 0.0f, is_earlier ? decay * dots.y : 0.0f};
          }
          const float z = fast_silu(__bfloat162float(in.z[r][my_column]));
          const bool ends_batch = kRows == 1 || r + 1 == rows;
          if (ends_batch) {
            __syncwarp();
            if (copies_next) {
              const auto& begun = next_batch();
              if (!goes_on) find_inputs(in, g, next_job, begun, warp, lane);
              begin_inputs(in, g, next_job, begun, next_head, lane);
            }
            commit_copies();
          }

          // Along the state.
          float along[8] = {};
          int piece = phase;
          asm volatile("" : "+r"(piece));  // as above
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float4 k = four(&s.k[r][32 * m + 4 * phase]), q = four(&s.q[r][32 * m + 4 * phase]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float4 x = four(mine + (4 * group + c) * kDim + 32 * m + 4 * state_piece(c, piece));
              along[2 * c] = dot(x, k, along[2 * c]);
              along[2 * c + 1] = dot(x, q, along[2 * c + 1]);
            }
          }
          if (ends_batch) {
            __syncwarp();
            if (copies_next && !batch.ends_chunk) begin_state(s, g, next_job.slot, next_head, warp, lane);
            commit_copies();
          }
          const float along_state = transposed_sum(along, lane);
          if (r == 0) {
            if (ends_batch)
              await_copies<2>();
            else
              await_copies<0>();
            __syncwarp();
          }
          // Along the updates of earlier positions.
          float sums_u[8] = {};
#pragma unroll
          for (int part = 0; part < kChunk / 16; ++part) {
            if (16 * part >= position) continue;
#pragma unroll
            for (int m = 2 * part; m < 2 * part + 2; ++m) {
              const int j = phase + 8 * m;
              const float along_k = __shfl_sync(kAllLanes, weights[m / 4].x, phase + 8 * (m % 4)),
                          along_q = __shfl_sync(kAllLanes, weights[m / 4].y, phase + 8 * (m % 4));
              float4 u{0, 0, 0, 0};
              if (j < position) {
                if constexpr (kStaged)
                  u = four(update_at(s, warp, phase, 4 * group) + 8 * m * kColumns);
                else
                  u = four(static_cast<const float*>(g.ring_u) + (ring_row(g, job, batch.start, j) * g.num_v_heads + head) * kDim +
                           warp * kColumns + 4 * group);
              }
              const float all[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums_u[2 * i] = fmaf(along_k, all[i], sums_u[2 * i]);
                sums_u[2 * i + 1] = fmaf(along_q, all[i], sums_u[2 * i + 1]);
              }
            }
          }
          const float sum = fmaf(expf(total), along_state, transposed_sum(sums_u, lane)), other = __shfl_xor_sync(kAllLanes, sum, 1);
          const float u = beta * (v - (has_q ? other : sum));
          const float o = fmaf(s.dots[r][position].y, u, has_q ? sum : other);
          if (!has_q) static_cast<float*>(g.ring_u)[(ring_row(g, job, batch.start, position) * g.num_v_heads + head) * kDim + column] = u;
          if (kStaged && !has_q) *update_at(s, warp, position, my_column) = u;  // for later rows and the fold
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            if (i == r) y[i] = o * norm_weight * z;
          float square = __fmul_rn(o, o);
#pragma unroll
          for (int distance = 2; distance <= 16; distance *= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
          if (lane == 0) s.squares[head % 2][r][warp] = square;
          __syncwarp();
        }
        if (batch.ends_chunk) {
          if (lane == 31) sums[1] = total;  // the others of the rows were there before the last one's
          fold(s, g, job, head, batch.start, sums, batch.first, state_of(g, job, head, warp),
               kStaged && copies_next ? state_of(g, next_job, next_head, warp) : nullptr, false, warp, lane);
          if (!kStaged && copies_next) begin_state(s, g, next_job.slot, next_head, warp, lane);
          commit_copies();
        }
        if (looks && dealt && goes_on) take_job(s, s.jobs[next_place()], s.numbers[next_place()], g, before, false);
        if (copies_next) begin_updates(s, g, next_job, next_batch(), next_head, warp, lane);
        commit_copies();
        __syncthreads();
        const int row = job.first_row + batch.index - job.cursor;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) continue;
          float sum = 0;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += s.squares[head % 2][r][w];
          const float scale = rsqrtf(sum / static_cast<float>(kDim) + g.eps);
          if (has_q)
            static_cast<__nv_bfloat16*>(g.out)[((row + r) * g.num_v_heads + head) * kDim + column] = __float2bfloat16_rn(y[r] * scale);
        }
        if (thread < rows) g.ring_g[ring_row(g, job, batch.start, batch.first + thread) * g.num_v_heads + head] = my_total;
      }
      // No head reads what these overwrite any more.
      if (const int r = warp / 2; job.keeps_keys && warp % 2 == 0 && r < rows)
        *reinterpret_cast<float4*>(static_cast<float*>(g.ring_k) +
                                   (ring_row(g, job, batch.start, batch.first + r) * g.num_k_heads + job.k_head) * kDim + 4 * lane) =
            four(&s.k[r][4 * lane]);
      if constexpr (kRows > 1) {
        if (batch.base > boundary_now && stores_fold()) boundary_now = batch.base;
        if (batch.ends_chunk) boundary_now = batch.base + kChunk;
        index += rows;
        if (index < job.end) {
          __threadfence();
          __syncthreads();
          begin_state(s, g, job.slot, job.head, warp, lane);
          begin_updates(s, g, job, batch_at<kRows>(g, job, index), job.head, warp, lane);
          commit_copies();
        }
      }
    } while (kRows > 1 && index < job.end);
    if (!job.keeps_at_once) keep_columns(g, job);
    const int next = next_place();
    __syncwarp();
    s.place[threadIdx.x / 32] = next;
    __syncwarp();
  }
  await_predecessor();
  leave_counts<kDeals>(g);
}

}  // namespace

static_assert(sizeof(Shared<4, true>) <= kGdnDecodeSharedBytesF32);
static_assert(sizeof(Shared<4, false>) <= kGdnDecodeSharedBytesUnstaged);

// Rows at a time. Alone: the only block on its multiprocessor has registers to spare, and a spill is what takes long in a small launch.
#define QUERN_GDN_DECODE(name, blocks, rows, staged)                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks) name(const __grid_constant__ GdnArgs g) { \
    decode<rows, staged, blocks == 1>(g);                                                                  \
  }
QUERN_GDN_DECODE(gdn_decode_1_f32, 2, 1, true)
QUERN_GDN_DECODE(gdn_decode_4_f32, 2, 4, true)
QUERN_GDN_DECODE(gdn_decode_1_f32_alone, 1, 1, true)
QUERN_GDN_DECODE(gdn_decode_4_f32_alone, 1, 4, true)
QUERN_GDN_DECODE(gdn_decode_1_f32_unstaged, 1, 1, false)
QUERN_GDN_DECODE(gdn_decode_4_f32_unstaged, 1, 4, false)

}  // namespace quern::cuda
