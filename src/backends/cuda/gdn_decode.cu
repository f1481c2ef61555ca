#include "backends/cuda/gdn_runs.cuh"
#include "backends/cuda/mma.cuh"

// Decode and verify rows of heads of 128 x 128. A block takes a run and the value heads of a key head one after the other, or one of them
// alone while there are few. A warp has 16 of a head's 128 columns to itself: their 8 KB of S and the ring's updates are copied to shared
// memory while whatever comes before is computed, and as soon as it has been summed over them it asks for those of the next head, so that
// loads are always under way. What the value heads have in common (q, k, and the products of earlier keys with both) is made once; a head
// takes one barrier, for its norm. S is read once for up to 4 rows and written only when the 64 rows of a chunk are folded in. Every sum
// has an order fixed by positions in the chunk: a row's bits are the same alone, as a draft row, and recomputed.
//
// Places are counted in 32 bits: 2^31 elements of a layer's states would be 8 GiB.

namespace quern::cuda {

namespace {

constexpr int kDim = 128;  // d_k and d_v
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = kDim / kWarps;  // of a warp
constexpr int kChunk = static_cast<int>(kGrid);
constexpr int kFinder = kThreads - 32;  // the thread that looks for the next job: its warp has least to do for a single row

/// The rows of a run, and the heads [head, end_head) of a key head.
struct Job {
  int slot, first_row, cursor, end;
  int boundary;       // of the stored state
  int window, start;  // where the rows of the cursor, and of its chunk's boundary, stand in conv window and ring
  int k_head, head, end_head;
  bool committed, keeps_keys;  // keeps_keys: the key and the raw q and k columns too

  /// Of an index that is at most a window's length before the cursor, or behind it.
  __device__ int window_row(const GdnArgs& g, int index) const {
    const int length = 3 + g.k_max + 1, place = window + index - cursor;
    return slot * length + (place < 0 ? place + length : place >= length ? place % length : place);
  }
  /// The raw columns of an index that is not negative, from `channel` on.
  __device__ const __nv_bfloat16* columns(const GdnArgs& g, int index, int channel) const {
    const bool given = index >= cursor;
    const int row = given ? first_row + index - cursor : window_row(g, index);
    return static_cast<const __nv_bfloat16*>(given ? g.qkv : g.conv_window) + row * ((2 * g.num_k_heads + g.num_v_heads) * kDim) + channel;
  }
};

/// Rows of a job that are taken at a time: those of a chunk whose boundary is `base`, at its positions [first, first + rows).
struct Batch {
  int index, base, first, rows;
  int start;  // place in the ring of the chunk's first row

  template <int kRows>
  __device__ static Batch at(const GdnArgs& g, const Job& job, int index) {
    const int base = index / kChunk * kChunk, passed = base - job.cursor / kChunk * kChunk;
    return {index, base, index - base, kRows == 1 ? 1 : min(min(kRows, job.end - index), base + kChunk - index),
            kRows == 1 || passed == 0 ? job.start : (job.start + passed) % (kChunk + g.k_max + 1)};
  }
};
/// The row of the ring j after the one at `start`, of all slots' rows.
__device__ int ring_row(const GdnArgs& g, const Job& job, int start, int j) {
  const int length = kChunk + g.k_max + 1, place = start + j;
  return job.slot * length + (place < length ? place : place - length);
}

/// What a warp reads of a head besides S and updates, on its way while the head before is computed: of its 16 columns, and G by position.
template <int kRows>
struct alignas(16) Inputs {
  __nv_bfloat16 raw[kRows + 3][kColumns], z[kRows][kColumns];  // raw: of v, from the third before the first row on
  float taps[4][kColumns];
  float sums[kChunk];
  uint32_t gates[2][kRows];  // the aligned words that hold b, a
  float decay_rate, dt_bias;
};

/// kRows: taken at a time. kStaged: updates pass through shared memory, where there is as much.
template <int kRows, class Ring, bool kStaged>
struct Shared {
  float state[kWarps][kColumns][kDim];                   // pieces of 16 bytes of a column permuted: state_piece
  Ring updates[kWarps][kStaged ? kChunk : 0][kColumns];  // by position, pieces of 16 bytes permuted: update_piece
  Inputs<kRows> inputs[kWarps];
  float k[kRows][kDim], q[kRows][kDim];  // k as the ring holds it
  float2 dots[kRows][kChunk];            // by position: kj . k and kj . q
  float squares[2][kRows][kWarps];       // of the outputs, of this head and the one before
  Job jobs[3];                           // of the block: this one, the next, and the one before, which some warp may not have left
  int numbers[3];
};
static_assert(sizeof(Inputs<1>) % 16 == 0 && sizeof(Inputs<4>) % 16 == 0);
template <class Ring>
constexpr int kUpdatePieces = kColumns * sizeof(Ring) / 16;  // of a position
/// Where piece `i` of position j stands: lanes that read at the same time find different banks.
template <class Ring>
__device__ int update_piece(int j, int i) {
  return sizeof(Ring) == sizeof(float) ? i ^ (j / 2 % 4) : i ^ (j / 4 % 2);
}
/// Where piece `i` of a warp's column stands: eight columns' two pieces of matrix instructions lie in different banks.
__device__ int state_piece(int column, int i) { return i ^ 2 * (column % 4); }
template <int kRows, class Ring, bool kStaged>
__device__ Ring* update_at(Shared<kRows, Ring, kStaged>& s, int warp, int j, int column) {
  constexpr int kOfPiece = kColumns / kUpdatePieces<Ring>;
  return &s.updates[warp][j][update_piece<Ring>(j, column / kOfPiece) * kOfPiece + column % kOfPiece];
}

__device__ float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ float4 widened_four(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ float4 four(const __nv_bfloat16* at) { return widened_four(*reinterpret_cast<const uint2*>(at)); }
/// Past L1, which is small beside so much shared memory and keeps what is read again.
__device__ float4 four_once(const float* at) { return __ldcg(reinterpret_cast<const float4*>(at)); }
__device__ float4 four_once(const __nv_bfloat16* at) { return widened_four(__ldcg(reinterpret_cast<const uint2*>(at))); }
__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }
template <class Ring>
__device__ void put_four(Ring* at, float4 x) {
  if constexpr (sizeof(Ring) == sizeof(float)) {
    *reinterpret_cast<float4*>(at) = x;
  } else {
    put(at, x.x);
    put(at + 1, x.y);
    put(at + 2, x.z);
    put(at + 3, x.w);
  }
}
template <class Ring>
__device__ float as_ring(float x) {
  return sizeof(Ring) == sizeof(float) ? x : round_to(DType::kBF16, x);
}
__device__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
/// As far as bf16 and the sums of f32 can tell; without the branches of an exact quotient.
__device__ float fast_silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
__device__ float silu_as_bf16(float x) { return round_to(DType::kBF16, fast_silu(x)); }

__device__ int jobs_of(const GdnArgs& g) { return g.step.num_runs * ((g.phases & kGdnHeadsApart) != 0 ? g.num_v_heads : g.num_k_heads); }

/// The first job from `number` on that has rows to compute, in steps of the grid; jobs_of(g) if there is none.
template <int kRows>
__device__ int find_job(const GdnArgs& g, int number, Job& job) {
  const int jobs = jobs_of(g);
  const bool apart = (g.phases & kGdnHeadsApart) != 0;
  const int parts = apart ? g.num_v_heads : g.num_k_heads;
  for (; number < jobs; number += static_cast<int>(gridDim.x)) {
    const RunRecord record = g.step.runs[number / parts];
    if (record.slot < 0 || record.num_rows == 0 || (record.flags & kIsDecode) == 0) continue;
    job.slot = record.slot;
    job.first_row = record.first_row;
    job.cursor = g.step.cursor[record.slot];
    job.end = job.cursor + (kRows == 1 ? 1 : record.num_rows);
    job.boundary = g.step.boundary[record.slot];
    job.window = job.cursor % (3 + g.k_max + 1);
    job.start = job.cursor / kChunk * kChunk % (kChunk + g.k_max + 1);
    job.committed = (record.flags & kIsCommitted) != 0;
    const int part = number % parts;
    job.k_head = apart ? g.k_head[part] : part;
    job.head = g.first_head[job.k_head];
    job.end_head = g.first_head[job.k_head + 1];
    job.keeps_keys = true;
    if (apart) {
      // What the rows leave behind has places of its own, but for keys after a fold that other heads may still have to do, and for rows
      // that are taken in turns: then the first head's block takes all heads.
      const bool is_first = part == job.head;
      const int rows = job.end - job.cursor;
      const bool in_turns = rows > min(kRows, g.k_max + 1) || (job.end - 1) / kChunk != job.cursor / kChunk;
      const bool together = kRows > 1 && (in_turns || (rows > 1 && job.boundary + kChunk <= job.cursor));
      if (together && !is_first) continue;
      if (!together) {
        job.keeps_keys = is_first;
        job.head = part;
        job.end_head = part + 1;
      }
    }
    if (job.head < job.end_head) return number;
  }
  return jobs;
}

/// Begins to copy the warp's columns of a head's updates at positions before `count` of the chunk at `start`; up to `end` the others are
/// zeros.
template <int kRows, class Ring, bool kStaged>
__device__ void begin_updates(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, int start, int count, int end, int head,
                              int warp, int lane) {
  constexpr int kPieces = kUpdatePieces<Ring>, kOfPiece = kColumns / kPieces, kAtOnce = 32 / kPieces;
  const Ring* updates = static_cast<const Ring*>(g.ring_u) + head * kDim + warp * kColumns + lane % kPieces * kOfPiece;
#pragma unroll 1
  for (int j = lane / kPieces; j < end; j += kAtOnce)
    copy_async(update_at(s, warp, j, lane % kPieces * kOfPiece), updates + ring_row(g, job, start, j) * (g.num_v_heads * kDim), j < count);
}
/// The updates that rows of a batch are summed over: those of earlier positions, then zeros up to a half or the whole of the chunk.
template <int kRows, class Ring, bool kStaged>
__device__ void begin_earlier_updates(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, const Batch& batch, int head,
                                      int warp, int lane) {
  const int end = batch.first + batch.rows > kChunk / 2 ? kChunk : kChunk / 2;
  if constexpr (kStaged) begin_updates(s, g, job, batch.start, batch.first, end, head, warp, lane);
  commit_copies();
}
/// Begins to copy the warp's columns of a head: of S, and of the updates of earlier positions.
template <int kRows, class Ring, bool kStaged>
__device__ void begin_copies(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, const Batch& batch, int head, int warp,
                             int lane) {
  const float* stored = g.state + ((job.slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim + 4 * lane;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) copy_async(&s.state[warp][c][4 * state_piece(c, lane)], stored + c * kDim);
  begin_earlier_updates(s, g, job, batch, head, warp, lane);
}

/// Where b and a of row r stand.
__device__ int gate_at(const GdnArgs& g, const Job& job, const Batch& batch, int head, int r) {
  return (job.first_row + batch.index - job.cursor + min(r, batch.rows - 1)) * g.num_v_heads + head;
}
/// The element at an odd or even place of the word that holds it.
__device__ float of_word(uint32_t word, bool upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); }
/// Begins to copy the warp's inputs of a head.
template <int kRows>
__device__ void begin_inputs(Inputs<kRows>& in, const GdnArgs& g, const Job& job, const Batch& batch, int head, int warp, int lane) {
  constexpr int kRaw = 2 * (kRows + 3), kZ = 2 * kRows, kTaps = 16;  // pieces of 16 bytes
  const int keys = g.num_k_heads * kDim, channels = 2 * keys + g.num_v_heads * kDim, column = head * kDim + warp * kColumns;
#pragma unroll 1
  for (int piece = lane; piece < kRaw + kZ + kTaps; piece += 32) {
    if (piece < kRaw) {
      const int index = max(batch.index - 3 + min(piece / 2, batch.rows + 2), 0);
      copy_async(&in.raw[piece / 2][piece % 2 * 8], job.columns(g, index, 2 * keys + column + piece % 2 * 8));
    } else if (piece < kRaw + kZ) {
      const int r = (piece - kRaw) / 2, row = job.first_row + batch.index - job.cursor + min(r, batch.rows - 1);
      copy_async(&in.z[r][piece % 2 * 8], static_cast<const __nv_bfloat16*>(g.z) + row * (g.num_v_heads * kDim) + column + piece % 2 * 8);
    } else if (piece < kRaw + kZ + kTaps) {
      const int i = piece - kRaw - kZ;
      copy_async(&in.taps[i / 4][i % 4 * 4], g.conv + i / 4 * channels + 2 * keys + column + i % 4 * 4);
    }
  }
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
  commit_copies();
}
/// Halves the values that a lane holds: of each pair one is added up here, the other in the lane at `distance`.
template <int kWidth, int kCount>
__device__ void halve(float (&values)[kCount], int lane, int distance) {
  const bool upper = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float given = upper ? values[i] : values[i + kWidth], kept = upper ? values[i + kWidth] : values[i];
    values[i] = kept + __shfl_xor_sync(kAllLanes, given, distance);
  }
}
/// Adds 8 values over 8 lanes; the sum of value i ends in lane i of the eight.
__device__ float transposed_sum(float (&values)[8], int lane) {
  halve<4>(values, lane, 4);
  halve<2>(values, lane, 2);
  halve<1>(values, lane, 1);
  return values[0];
}

/// Two values as pairs of bf16: the nearest, and of what is left the nearest.
struct SplitPair {
  uint32_t high, low;
};
__device__ SplitPair split(float x, float y) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(x, y), low = __floats2bfloat162_rn(x - __low2float(high), y - __high2float(high));
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns, by all warps of the block together: in shared memory, and where it is
/// given at `stored`. `sums`: G of the positions lane and lane + 32. Keys from position `own` on are the rows' own. The chunk's updates are
/// staged; the keys, which all warps need, take their place. Products are those of f32 to about 2^-17, factors being split in two bf16.
template <int kRows, class Ring>
__device__ void fold(Shared<kRows, Ring, true>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, int warp, int lane) {
  constexpr bool kSplitKeys = sizeof(Ring) == sizeof(float);
  constexpr int kTiles = kDim / 16, kSteps = kChunk / 16;  // of a matrix instruction: pairs of 8 places in a column; along positions
  constexpr uint32_t kPartBytes = kChunk * kDim * sizeof(__nv_bfloat16);
  static_assert(sizeof(s.updates) == (kSplitKeys ? 2 : 1) * kPartBytes);
  asm volatile("" : "+r"(start), "+r"(warp), "+r"(lane));  // what is made of them here takes no registers elsewhere
  float4 keys[kChunk / kWarps];
#pragma unroll
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const int j = warp + kWarps * i;
    keys[i] =
        j < own
            ? four_once(static_cast<const Ring*>(g.ring_k) + (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 4 * lane)
            : four(&s.k[j - own][4 * lane]);
  }
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
        updates[n][step][half] = split(first * widened(*update_at(s, warp, j, 8 * n + lane / 4)),
                                       second * widened(*update_at(s, warp, j + 1, 8 * n + lane / 4)));
    }
  __syncthreads();
  const uint32_t tile = shared_address(&s.updates);
#pragma unroll
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const SplitPair front = split(keys[i].x, keys[i].y), back = split(keys[i].z, keys[i].w);
    const uint32_t at = swizzled<kDim / 8>(warp + kWarps * i, lane / 2) + lane % 2 * 8;
    auto* to = reinterpret_cast<unsigned char*>(&s.updates) + at;
    *reinterpret_cast<uint2*>(to) = {front.high, back.high};
    if constexpr (kSplitKeys) *reinterpret_cast<uint2*>(to + kPartBytes) = {front.low, back.low};
  }
  __syncthreads();
#pragma unroll 1
  for (int tile_pair = 0; tile_pair < kTiles; ++tile_pair) {
    // Of two tiles of 8 places in a column: those of columns lane / 4 and 8 further, places 2 (lane % 4) and the next.
    float2* at[2][2];
    float sum[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = lane / 4 + 8 * half;
        at[n][half] =
            reinterpret_cast<float2*>(&s.state[warp][column][4 * state_piece(column, 4 * tile_pair + 2 * n + lane % 4 / 2) + lane % 2 * 2]);
        sum[n][2 * half] = decay * at[n][half]->x;
        sum[n][2 * half + 1] = decay * at[n][half]->y;
      }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t from = tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * tile_pair + lane / 16);
      uint32_t high[4], low[4];
      load_matrices_transposed(high, from);
      if constexpr (kSplitKeys) load_matrices_transposed(low, from + kPartBytes);
      const SplitPair &u0 = updates[0][step][0], &u1 = updates[1][step][0], &u2 = updates[0][step][1], &u3 = updates[1][step][1];
      const uint32_t u_high[4] = {u0.high, u1.high, u2.high, u3.high}, u_low[4] = {u0.low, u1.low, u2.low, u3.low};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_add(sum[n], u_high, high[2 * n], high[2 * n + 1]);
        multiply_add(sum[n], u_low, high[2 * n], high[2 * n + 1]);
        if constexpr (kSplitKeys) multiply_add(sum[n], u_high, low[2 * n], low[2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) *at[n][half] = {sum[n][2 * half], sum[n][2 * half + 1]};
  }
  __syncwarp();
  if (stored != nullptr)
#pragma unroll 4
    for (int c = 0; c < kColumns; ++c)
      *reinterpret_cast<float4*>(stored + c * kDim + 4 * lane) = four(&s.state[warp][c][4 * state_piece(c, lane)]);
  __syncthreads();  // before updates are copied there again
}

/// The same where updates and keys are read from memory, products in f32.
template <int kRows, class Ring>
__device__ void fold(Shared<kRows, Ring, false>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, int warp, int lane) {
  constexpr int kPart = 8, kAhead = 4;  // columns at a time; keys on their way
  asm volatile("" : "+r"(start), "+r"(warp), "+r"(lane));
  const float total = __shfl_sync(kAllLanes, sums[1], 31), decay = expf(total);
  const float factors[2] = {expf(total - sums[0]), expf(total - sums[1])};
  const Ring* ring_keys = static_cast<const Ring*>(g.ring_k) + job.k_head * kDim + 4 * lane;
  const Ring* ring_updates = static_cast<const Ring*>(g.ring_u) + head * kDim + warp * kColumns;
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
        const Ring* us = ring_updates + ring_row(g, job, start, j) * (g.num_v_heads * kDim) + part;
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

__device__ __nv_bfloat16* window_at(const GdnArgs& g, const Job& job, int index, int channel) {
  return static_cast<__nv_bfloat16*>(g.conv_window) + job.window_row(g, index) * ((2 * g.num_k_heads + g.num_v_heads) * kDim) + channel;
}
/// The raw columns of the job's channels, eight a thread: those before a boundary whose fold was stored, then the window.
__device__ void keep_columns(const GdnArgs& g, const Job& job) {
  const int channels = (2 * g.num_k_heads + g.num_v_heads) * kDim, keys = g.num_k_heads * kDim, window_length = 3 + g.k_max + 1;
  const int values = (job.end_head - job.head) * (kDim / 8), all = values + (job.keeps_keys ? 2 * (kDim / 8) : 0);
  const int new_boundary = (job.committed ? job.end : job.cursor) / kChunk * kChunk;
  for (int item = static_cast<int>(threadIdx.x); item < all; item += kThreads) {
    const int part = (item - values) / (kDim / 8);
    const int channel =
        item < values ? 2 * keys + job.head * kDim + 8 * item : part * keys + job.k_head * kDim + (item - values) % (kDim / 8) * 8;
    if (new_boundary > job.boundary)
#pragma unroll
      for (int c = 0; c < 3; ++c)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(g.boundary_columns) + (job.slot * 3 + c) * channels + channel) =
            *reinterpret_cast<const uint4*>(job.columns(g, new_boundary - 3 + c, channel));
    for (int index = max(job.cursor, job.end - window_length); index < job.end; ++index)
      *reinterpret_cast<uint4*>(window_at(g, job, index, channel)) = *reinterpret_cast<const uint4*>(job.columns(g, index, channel));
  }
}

/// kAlone: the block is alone on its multiprocessor, and has registers to spare.
template <int kRows, class Ring, bool kStaged, bool kAlone>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kRows, Ring, kStaged>;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const int jobs = jobs_of(g);
  int turn = 0, place = 0;  // of the head, of the job
  if (threadIdx.x == kFinder) s.numbers[0] = find_job<kRows>(g, static_cast<int>(blockIdx.x), s.jobs[0]);
  __syncthreads();
  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  if (s.numbers[0] < jobs)
    begin_copies(s, g, s.jobs[0], Batch::at<kRows>(g, s.jobs[0], s.jobs[0].cursor), s.jobs[0].head, static_cast<int>(threadIdx.x) / 32,
                 static_cast<int>(threadIdx.x) % 32);
  if (threadIdx.x == kFinder) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  release_successor();
  while (s.numbers[place] < jobs) {
    const int next = place == 2 ? 0 : place + 1;
    const Job& job = s.jobs[place];
    int boundary = job.boundary;
    // Columns that nobody reads any more are kept at once.
    const bool keeps_at_once = job.end - job.cursor <= g.k_max + 1 && (job.committed ? job.end : job.cursor) / kChunk * kChunk <= boundary;
    for (int index = job.cursor; index < job.end;) {
      int thread = static_cast<int>(threadIdx.x);
      asm volatile("" : "+r"(thread));  // addresses are made anew for each batch: kept, they would push what is loaded out of the registers
      const int warp = thread / 32, lane = thread % 32;
      // Eight lanes share a place: a column of S, a row of the ring. Of sums over them, lane `phase` keeps one.
      const int group = lane / 8, phase = lane % 8;
      const int my_column = 4 * group + phase / 2, column = warp * kColumns + my_column;  // whose sums the lane keeps:
      const bool has_q = phase % 2 == 1;                                                  // those with q, or those with k
      float* mine = &s.state[warp][0][0];
      Inputs<kRows>& in = s.inputs[warp];
      const int keys = g.num_k_heads * kDim, channels = 2 * keys + g.num_v_heads * kDim;
      const float q_scale = rsqrtf(static_cast<float>(kDim));
      const Batch batch = Batch::at<kRows>(g, job, index);
      const int first = batch.first, start = batch.start, rows = batch.rows;
      const bool ends_chunk = job.committed && first + rows == kChunk;
      const bool stores_fold = boundary + kChunk <= job.cursor;

      // Earlier keys: a lane has pieces of the rows warp + 8 group and 32 further.
      float4 earlier[2][4];
      const auto load_earlier = [&] {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 32 * half + 8 * group + warp;
          const Ring* at =
              static_cast<const Ring*>(g.ring_k) + (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 4 * phase;
#pragma unroll
          for (int m = 0; m < 4; ++m) earlier[half][m] = j < first ? four_once(at + 32 * m) : float4{0, 0, 0, 0};
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
            if (const int at = max(index + r_conv - 3 + tap, 0); (kRows == 1 ? tap == 3 : at >= job.cursor) == given)
              raw[tap] = __ldcg(reinterpret_cast<const uint2*>(job.columns(g, at, channel)));
      };
      const auto load_taps = [&] {
        if (r_conv < rows)
#pragma unroll
          for (int tap = 0; tap < 4; ++tap) taps[tap] = four(g.conv + tap * channels + channel);
      };
      if constexpr (kAlone) load_earlier();
      load_raw(false);
      await_predecessor();
      if constexpr (kAlone) {
        load_raw(true);
        load_taps();
      }
      begin_inputs(in, g, job, batch, job.head, warp, lane);
      if constexpr (!kAlone) {  // registers are few: what comes later is loaded later
        load_earlier();
        load_raw(true);
        load_taps();
      }
      if (r_conv < rows) {
        float4 y{0, 0, 0, 0};
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
          const float4 x = widened_four(index + r_conv - 3 + tap >= 0 ? raw[tap] : make_uint2(0, 0)), w = taps[tap];
          y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
        }
        y = {silu_as_bf16(y.x), silu_as_bf16(y.y), silu_as_bf16(y.z), silu_as_bf16(y.w)};
        const float factor = rsqrtf(warp_sum(dot(y, y, 0.0f)) + 1e-6f) * (is_key ? 1.0f : q_scale);
        y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
        if (is_key) y = {as_ring<Ring>(y.x), as_ring<Ring>(y.y), as_ring<Ring>(y.z), as_ring<Ring>(y.w)};
        *reinterpret_cast<float4*>(&(is_key ? s.k : s.q)[r_conv][4 * lane]) = y;
        if (keeps_at_once && job.keeps_keys) *reinterpret_cast<uint2*>(window_at(g, job, index + r_conv, channel)) = raw[3];
      }
      __syncthreads();

      // Along earlier keys and those of the rows themselves.
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (const int r = 32 * half + 8 * group + warp - first; r >= 0 && r < rows)
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

      const bool is_last = index + rows == job.end, may_go_on = s.numbers[place] + static_cast<int>(gridDim.x) < jobs;
      const int row = job.first_row + index - job.cursor;
      for (int head = job.head; head < job.end_head; ++head, turn ^= 1) {
        // The next job is looked for beside the first head, and known to all at the last one's end.
        if (is_last && head == job.head) {
          if (thread == kFinder) s.numbers[next] = find_job<kRows>(g, s.numbers[place] + static_cast<int>(gridDim.x), s.jobs[next]);
          if (job.end_head == head + 1 && may_go_on) __syncthreads();
        }
        float* stored = g.state + ((job.slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim;
        if (batch.base > boundary) {
          const int old_start = boundary % (kChunk + g.k_max + 1);
          float old_sums[2];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            old_sums[half] = g.ring_g[ring_row(g, job, old_start, lane + 32 * half) * g.num_v_heads + head];
          await_copies<0>();
          if constexpr (kStaged) begin_updates(s, g, job, old_start, kChunk, kChunk, head, warp, lane);  // in place of the new chunk's
          commit_copies();
          await_copies<0>();
          __syncwarp();
          fold(s, g, job, head, old_start, old_sums, kChunk, stores_fold ? stored : nullptr, warp, lane);
          begin_earlier_updates(s, g, job, batch, head, warp, lane);
        }
        if (head == job.head)
          await_copies<0>();
        else
          await_copies<1>();  // inputs come first
        __syncwarp();
        const float norm_weight = g.norm[column];
        const int my_row = min(lane, kRows - 1);
        const bool upper = gate_at(g, job, batch, head, my_row) % 2 == 1;
        const float my_beta = round_to(DType::kBF16, __fdividef(1.0f, 1.0f + expf(-of_word(in.gates[0][my_row], upper)))),
                    my_step = __fmul_rn(in.decay_rate, softplus(of_word(in.gates[1][my_row], upper) + in.dt_bias));  // of row `lane`
        float total = first > 0 ? in.sums[first - 1] : 0.0f, my_total = 0, y[kRows];
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
          const int position = first + r;
          float v = 0;
#pragma unroll
          for (int tap = 0; tap < 4; ++tap)
            v = fmaf(in.taps[tap][my_column], index + r - 3 + tap >= 0 ? __bfloat162float(in.raw[r + tap][my_column]) : 0.0f, v);
          v = silu_as_bf16(v);
          if (keeps_at_once && !has_q) *window_at(g, job, index + r, 2 * keys + head * kDim + column) = in.raw[r + 3][my_column];
          const float step = __shfl_sync(kAllLanes, my_step, r), beta = __shfl_sync(kAllLanes, my_beta, r);
          total = position > 0 ? __fadd_rn(total, step) : step;
          if (lane == r) my_total = total;
          const float decays[2] = {expf(total - in.sums[lane]), expf(total - in.sums[lane + 32])};  // where positions are earlier

          // Along the state.
          if (r == 0) {
            await_copies<0>();
            __syncwarp();
          }
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
          const float along_state = transposed_sum(along, lane);
          // Along the updates of earlier positions.
          float sums[8] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (32 * half >= position) continue;
#pragma unroll
            for (int m = 4 * half; m < 4 * half + 4; ++m) {
              const int j = phase + 8 * m;
              const float decay = __shfl_sync(kAllLanes, decays[half], phase + 8 * (m % 4));
              const float2 dots = s.dots[r][j];
              const float along_k = j < position ? decay * dots.x : 0.0f, along_q = j < position ? decay * dots.y : 0.0f;
              float4 u{0, 0, 0, 0};
              if constexpr (kStaged)
                u = four(update_at(s, warp, j, 4 * group));
              else if (j < position)
                u = four(static_cast<const Ring*>(g.ring_u) + (ring_row(g, job, start, j) * g.num_v_heads + head) * kDim + warp * kColumns +
                         4 * group);
              const float all[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[2 * i] = fmaf(along_k, all[i], sums[2 * i]);
                sums[2 * i + 1] = fmaf(along_q, all[i], sums[2 * i + 1]);
              }
            }
          }
          const float sum = fmaf(expf(total), along_state, transposed_sum(sums, lane)), other = __shfl_xor_sync(kAllLanes, sum, 1);
          const float u = as_ring<Ring>(beta * (v - (has_q ? other : sum)));
          const float o = fmaf(s.dots[r][position].y, u, has_q ? sum : other);
          if (!has_q) put(static_cast<Ring*>(g.ring_u) + (ring_row(g, job, start, position) * g.num_v_heads + head) * kDim + column, u);
          if (kStaged && !has_q) put(update_at(s, warp, position, my_column), u);  // for later rows and the fold
          if (kRows > 1 && lane == 0) in.sums[position] = total;
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            if (i == r) y[i] = o * norm_weight * fast_silu(__bfloat162float(in.z[r][my_column]));
          float square = __fmul_rn(o, o);
#pragma unroll
          for (int distance = 2; distance <= 16; distance *= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
          if (lane == 0) s.squares[turn][r][warp] = square;
          __syncwarp();
        }
        if (ends_chunk) {
          const float sums[2] = {in.sums[lane], kRows == 1 && lane == 31 ? total : in.sums[lane + 32]};
          fold(s, g, job, head, start, sums, first, stored, warp, lane);
        }
        if (head + 1 < job.end_head) {
          begin_inputs(in, g, job, batch, head + 1, warp, lane);
          begin_copies(s, g, job, batch, head + 1, warp, lane);
        } else if (is_last && may_go_on && s.numbers[next] < jobs) {
          begin_copies(s, g, s.jobs[next], Batch::at<kRows>(g, s.jobs[next], s.jobs[next].cursor), s.jobs[next].head, warp, lane);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) continue;
          float sum = 0;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += s.squares[turn][r][w];
          const float scale = rsqrtf(sum / static_cast<float>(kDim) + g.eps);
          if (has_q)
            static_cast<__nv_bfloat16*>(g.out)[((row + r) * g.num_v_heads + head) * kDim + column] = __float2bfloat16_rn(y[r] * scale);
        }
        if (thread < rows) g.ring_g[ring_row(g, job, start, first + thread) * g.num_v_heads + head] = my_total;
      }
      // No head reads what these overwrite any more.
      if (const int r = warp / 2; job.keeps_keys && warp % 2 == 0 && r < rows)
        put_four(static_cast<Ring*>(g.ring_k) + (ring_row(g, job, start, first + r) * g.num_k_heads + job.k_head) * kDim + 4 * lane,
                 four(&s.k[r][4 * lane]));
      if (batch.base > boundary && stores_fold) boundary = batch.base;
      if (ends_chunk) boundary = batch.base + kChunk;
      index += rows;
      if (kRows > 1 && index < job.end) {
        __threadfence();
        __syncthreads();
        const Batch begun = Batch::at<kRows>(g, job, index);
        begin_copies(s, g, job, begun, job.head, warp, lane);
      }
    }
    if (!keeps_at_once) keep_columns(g, job);
    place = next;
  }
  await_predecessor();
}

}  // namespace

static_assert(sizeof(Shared<4, float, true>) <= kGdnDecodeSharedBytesF32 &&
              sizeof(Shared<4, __nv_bfloat16, true>) <= kGdnDecodeSharedBytesBF16);
static_assert(sizeof(Shared<4, float, false>) <= kGdnDecodeSharedBytesUnstaged);

// Rows at a time, and the ring's dtype. Alone: the only block on its multiprocessor has registers to spare, and a spill is what takes long
// in a small launch.
#define QUERN_GDN_DECODE(name, blocks, rows, ring, staged)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks) name(const __grid_constant__ GdnArgs g) { \
    decode<rows, ring, staged, blocks == 1>(g);                                                            \
  }
QUERN_GDN_DECODE(gdn_decode_1_f32, 2, 1, float, true)
QUERN_GDN_DECODE(gdn_decode_4_f32, 2, 4, float, true)
QUERN_GDN_DECODE(gdn_decode_1_f32_alone, 1, 1, float, true)
QUERN_GDN_DECODE(gdn_decode_4_f32_alone, 1, 4, float, true)
QUERN_GDN_DECODE(gdn_decode_1_f32_unstaged, 1, 1, float, false)
QUERN_GDN_DECODE(gdn_decode_4_f32_unstaged, 1, 4, float, false)
QUERN_GDN_DECODE(gdn_decode_1_bf16, 2, 1, __nv_bfloat16, true)
QUERN_GDN_DECODE(gdn_decode_4_bf16, 2, 4, __nv_bfloat16, true)

}  // namespace quern::cuda
