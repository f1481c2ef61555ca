#include <type_traits>

#include "backends/cuda/gdn_runs.cuh"
#include "backends/cuda/mma.cuh"

// Decode and verify rows of heads of 128 x 128. A block takes a run and the value heads of a key head one after the other, or one of them
// alone while there are few. A warp has 16 of a head's 128 columns to itself: their 8 KB of S and the ring's updates are copied to shared
// memory while whatever comes before is computed, and as soon as it has been summed over either it asks for the next head's, so that loads
// are always under way. A spilled register waits for the L2 cache here, where little of L1 is left: what a job is stays in shared memory,
// not in registers. What the value heads have in common (q, k, and the products of earlier keys with both) is made once; a head
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

/// Rows that are taken at a time: those of a chunk whose boundary is `base`, at its positions [first, first + rows).
struct Batch {
  int index, base, first, rows;
  int start;        // place in the ring of the chunk's first row
  bool ends_chunk;  // and it is folded
};

/// The rows of a run, and the heads [head, end_head) of a key head.
struct Job {
  int slot, first_row, cursor, end;
  int boundary;       // of the stored state
  int window, start;  // where the rows of the cursor, and of its chunk's boundary, stand in conv window and ring
  int k_head, head, end_head;
  Batch begin;                 // the first rows that are taken
  bool committed, keeps_keys;  // keeps_keys: the key and the raw q and k columns too
  bool keeps_at_once;          // columns that nobody reads any more
  bool is_first;               // of the block

  /// Of an index that is less than a window's length from the cursor.
  __device__ int window_row(const GdnArgs& g, int index) const {
    const int length = 3 + g.k_max + 1, place = window + index - cursor;
    return slot * length + (place < 0 ? place + length : place >= length ? place - length : place);
  }
  /// The raw columns of an index that is not negative, from `channel` on: of the step's rows, or kept of those before them.
  __device__ const __nv_bfloat16* given_columns(const GdnArgs& g, int index, int channel) const {
    return static_cast<const __nv_bfloat16*>(g.qkv) + (first_row + index - cursor) * ((2 * g.num_k_heads + g.num_v_heads) * kDim) + channel;
  }
  __device__ const __nv_bfloat16* kept_columns(const GdnArgs& g, int index, int channel) const {
    return static_cast<const __nv_bfloat16*>(g.conv_window) + window_row(g, index) * ((2 * g.num_k_heads + g.num_v_heads) * kDim) + channel;
  }
  __device__ const __nv_bfloat16* columns(const GdnArgs& g, int index, int channel) const {
    return index >= cursor ? given_columns(g, index, channel) : kept_columns(g, index, channel);
  }
};

/// The rows of a job from `index` on.
template <int kRows>
__device__ Batch batch_at(const GdnArgs& g, const Job& job, int index) {
  const int base = index / kChunk * kChunk, passed = base - job.cursor / kChunk * kChunk;
  const int rows = kRows == 1 ? 1 : min(min(kRows, job.end - index), base + kChunk - index);
  return {index,
          base,
          index - base,
          rows,
          kRows == 1 || passed == 0 ? job.start : (job.start + passed) % (kChunk + g.k_max + 1),
          job.committed && index + rows == base + kChunk};
}
/// The row of the ring j after the one at `start`, of all slots' rows.
__device__ int ring_row(const GdnArgs& g, const Job& job, int start, int j) {
  const int length = kChunk + g.k_max + 1, place = start + j;
  return job.slot * length + (place < length ? place : place - length);
}

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

/// With kGdnDealt: jobs that no block has from the start go to who comes first, so that no block ends late because one of its jobs folds.
struct Deal {
  uint32_t busy[kThreads / 32], folding[kThreads / 32];  // runs that have rows, and those that fold a chunk, a bit each
  uint8_t order[kThreads];                               // of runs after the one that is begun from the start: those that fold come first
  int begin, end;                                        // of the numbers that are dealt; those of the runs in order stand behind that one
};

/// What look_at_runs saw of each run, so that a job is known without a load.
struct SeenRun {
  int slot, first_row, cursor;
  int boundary;  // and 1 if its rows are committed
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
  int place[kWarps];  // of the job, as each warp goes
  Deal deal;
  SeenRun seen[kRows == 1 ? kThreads : 0];
  uint8_t seen_window[kRows == 1 ? kThreads : 0], seen_start[kRows == 1 ? kThreads : 0];  // Job::window and start
};
static_assert(sizeof(Inputs<1>) % 16 == 0 && sizeof(Inputs<4>) % 16 == 0);
template <class Ring>
constexpr int kUpdatePieces = kColumns * sizeof(Ring) / 16;  // of a position
/// Where piece `i` of position j stands: lanes that read at the same time find different banks.
template <class Ring>
__device__ constexpr int update_piece(int j, int i) {
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
__device__ bool has_rows(const RunRecord& record) { return record.slot >= 0 && record.num_rows > 0 && (record.flags & kIsDecode) != 0; }

/// By all threads: thread i looks at run i.
template <int kRows, class Ring, bool kStaged>
__device__ void look_at_runs(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g) {
  Deal& deal = s.deal;
  const int run = static_cast<int>(threadIdx.x);
  bool busy = false, folds = false;
  if (run < g.step.num_runs)
    if (const RunRecord record = g.step.runs[run]; has_rows(record)) {
      const int cursor = g.step.cursor[record.slot], boundary = g.step.boundary[record.slot];
      const bool committed = (record.flags & kIsCommitted) != 0;
      busy = true;
      folds = boundary + kChunk <= cursor + (committed ? record.num_rows : 0);
      if constexpr (kRows == 1) {
        s.seen[run] = {record.slot, record.first_row, cursor, boundary | static_cast<int>(committed)};
        s.seen_window[run] = static_cast<uint8_t>(cursor % (3 + g.k_max + 1));
        s.seen_start[run] = static_cast<uint8_t>(cursor / kChunk * kChunk % (kChunk + g.k_max + 1));
      }
    }
  const uint32_t all_busy = __ballot_sync(kAllLanes, busy), folding = __ballot_sync(kAllLanes, folds);
  if (run % 32 == 0) {
    deal.busy[run / 32] = all_busy;
    deal.folding[run / 32] = folding;
  }
}
/// The bits from number `n` on.
__device__ uint32_t bits_from(int n) { return n <= 0 ? ~0u : n < 32 ? ~0u << n : 0u; }
/// By all threads, once all have looked: thread i puts run i in its place.
__device__ void put_in_order(Deal& deal, const GdnArgs& g) {
  const int run = static_cast<int>(threadIdx.x), grid = static_cast<int>(gridDim.x), split = grid / g.num_k_heads;
  int folding = 0, folding_before = 0, others = 0, others_before = 0;  // of the runs after `split`
#pragma unroll 1
  for (int word = 0; word < kThreads / 32; ++word) {
    const uint32_t after = bits_from(split + 1 - 32 * word), before = ~bits_from(run - 32 * word);
    const uint32_t folds = deal.folding[word] & after, rest = deal.busy[word] & ~deal.folding[word] & after;
    folding += __popc(folds);
    others += __popc(rest);
    folding_before += __popc(folds & before);
    others_before += __popc(rest & before);
  }
  const auto in = [run](const uint32_t(&words)[kThreads / 32]) { return (words[run / 32] >> run % 32 & 1) != 0; };
  if (run > split && in(deal.busy)) deal.order[in(deal.folding) ? folding_before : folding + others_before] = static_cast<uint8_t>(run);
  if (run == split) {
    deal.begin = in(deal.busy) ? grid : (split + 1) * g.num_k_heads;
    deal.end = (split + 1 + folding + others) * g.num_k_heads;
  }
}
/// How many jobs were dealt before this one. (Of atomicAdd the compiler makes a loop over lanes, and shuffles after it take twice as long.)
__device__ int deal_one(const GdnArgs& g) {
  int before;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(g.dealt) : "memory");
  return before;
}
/// The number of the job that is dealt after as many others, or one beyond them all.
__device__ int dealt_job(const Deal& deal, const GdnArgs& g, int before) {
  const int number = deal.begin + before, run = number / g.num_k_heads, split = static_cast<int>(gridDim.x) / g.num_k_heads;
  if (number >= deal.end) return jobs_of(g);
  return run <= split ? number : deal.order[run - split - 1] * g.num_k_heads + number % g.num_k_heads;
}
/// What follows of the job's rows.
template <int kRows>
__device__ void begin_at(const GdnArgs& g, Job& job) {
  job.begin = batch_at<kRows>(g, job, job.cursor);
  job.keeps_at_once = job.end - job.cursor <= g.k_max + 1 && (job.committed ? job.end : job.cursor) / kChunk * kChunk <= job.boundary;
}
/// The first job from `number` on that has rows to compute, in steps of `stride`; jobs_of(g) if there is none.
template <int kRows>
__device__ int find_job(const GdnArgs& g, int number, int stride, Job& job) {
  const int jobs = jobs_of(g);
  const bool apart = (g.phases & kGdnHeadsApart) != 0;
  const int parts = apart ? g.num_v_heads : g.num_k_heads;
  for (; number < jobs; number += stride) {
    const RunRecord record = g.step.runs[number / parts];
    if (!has_rows(record)) continue;
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
    begin_at<kRows>(g, job);
    if (job.head < job.end_head) return number;
  }
  return jobs;
}

/// The job that is dealt after `before` others; its number is negative if there is none.
template <int kRows, class Ring, bool kStaged>
__device__ void take_job(Shared<kRows, Ring, kStaged>& s, Job& job, int& number, const GdnArgs& g, int before, bool is_first) {
  int found = dealt_job(s.deal, g, before);
  if constexpr (kRows == 1) {
    if (found < jobs_of(g)) {
      const int run = found / g.num_k_heads;
      const SeenRun seen = s.seen[run];
      job.slot = seen.slot;
      job.first_row = seen.first_row;
      job.cursor = seen.cursor;
      job.end = seen.cursor + 1;
      job.boundary = seen.boundary & ~1;
      job.window = s.seen_window[run];
      job.start = s.seen_start[run];
      job.k_head = found % g.num_k_heads;
      job.head = g.first_head[job.k_head];
      job.end_head = g.first_head[job.k_head + 1];
      job.committed = (seen.boundary & 1) != 0;
      job.keeps_keys = true;
      begin_at<kRows>(g, job);
    }
  } else {
    found = find_job<kRows>(g, found, jobs_of(g), job);
  }
  job.is_first = is_first;
  number = found < jobs_of(g) ? found : -1;
}
/// The first job from `from` on, in steps of the grid, or with kGdnDealt that one alone; its number is negative if there is none.
template <int kRows>
__device__ void find_next(Job& job, int& number, const GdnArgs& g, int from, bool is_first) {
  const int jobs = jobs_of(g), found = find_job<kRows>(g, from, (g.phases & kGdnDealt) != 0 ? jobs : static_cast<int>(gridDim.x), job);
  number = found < jobs ? found : -1;
  job.is_first = is_first;
}

/// Begins to copy the warp's columns of a head's updates at the first `count` positions of the chunk at `start`.
template <int kRows, class Ring, bool kStaged>
__device__ void begin_updates(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, int start, int count, int head, int warp,
                              int lane) {
  constexpr int kPieces = kUpdatePieces<Ring>, kOfPiece = kColumns / kPieces, kAtOnce = 32 / kPieces;
  static_assert(update_piece<Ring>(kAtOnce, 0) == 0);  // a lane's pieces are at the same place of each row
  if constexpr (!kStaged) return;
  const int length = kChunk + g.k_max + 1, stride = g.num_v_heads * kDim, column = lane % kPieces * kOfPiece;
  const Ring* updates = static_cast<const Ring*>(g.ring_u) + job.slot * length * stride + head * kDim + warp * kColumns + column;
  Ring* to = update_at(s, warp, lane / kPieces, column);
  int row = start + lane / kPieces;
#pragma unroll 1
  for (int left = count - lane / kPieces; left > 0; left -= kAtOnce) {
    if (row >= length) row -= length;
    copy_async(to, updates + row * stride);
    row += kAtOnce;
    to += kAtOnce * kColumns;
  }
}
template <int kRows, class Ring, bool kStaged>
__device__ void begin_updates(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, const Batch& batch, int head, int warp,
                              int lane) {
  begin_updates(s, g, job, batch.start, batch.first, head, warp, lane);
}
/// The warp's columns of a head's stored S.
__device__ float* state_of(const GdnArgs& g, const Job& job, int head, int warp) {
  return g.state + ((job.slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim;
}
template <int kRows, class Ring, bool kStaged>
__device__ void begin_state(Shared<kRows, Ring, kStaged>& s, const GdnArgs& g, const Job& job, int head, int warp, int lane) {
  const float* stored = state_of(g, job, head, warp) + 4 * lane;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) copy_async(&s.state[warp][c][4 * state_piece(c, lane)], stored + c * kDim);
}
/// Where b and a of row r stand.
__device__ int gate_at(const GdnArgs& g, const Job& job, const Batch& batch, int head, int r) {
  return (job.first_row + batch.index - job.cursor + min(r, batch.rows - 1)) * g.num_v_heads + head;
}
/// The element at an odd or even place of the word that holds it.
__device__ float of_word(uint32_t word, bool upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); }
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

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns, by all warps of the block together: where `stored` is given there, and
/// in shared memory if it is read again; if not, the columns at `refill`, where given, are asked for in its place as soon as it is read.
/// `sums`: G of the positions lane and lane + 32. Keys from position `own` on are the rows' own. The chunk's updates are staged; the keys,
/// which all warps need, take their place. Products are those of f32 to about 2^-17, factors being split in two bf16.
template <int kRows, class Ring>
__device__ void fold(Shared<kRows, Ring, true>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, const float* refill, bool is_read, int warp, int lane) {
  constexpr bool kSplitKeys = sizeof(Ring) == sizeof(float);
  constexpr int kTiles = kDim / 16, kSteps = kChunk / 16;  // of a matrix instruction: pairs of 8 places in a column; along positions
  constexpr uint32_t kPartBytes = kChunk * kDim * sizeof(__nv_bfloat16);
  static_assert(sizeof(s.updates) == (kSplitKeys ? 2 : 1) * kPartBytes);
  asm volatile("" : "+r"(start), "+r"(warp), "+r"(lane));  // what is made of them here takes no registers elsewhere
  float4 keys[kChunk / kWarps];
  const auto load_keys = [&](int half) {
#pragma unroll
    for (int i = half * kChunk / kWarps / 2; i < (half + 1) * kChunk / kWarps / 2; ++i) {
      const int j = warp + kWarps * i;
      keys[i] =
          j < own
              ? four_once(static_cast<const Ring*>(g.ring_k) + (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 4 * lane)
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
        updates[n][step][half] = split(first * widened(*update_at(s, warp, j, 8 * n + lane / 4)),
                                       second * widened(*update_at(s, warp, j + 1, 8 * n + lane / 4)));
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
    if constexpr (kSplitKeys) *reinterpret_cast<uint2*>(to + kPartBytes) = {front.low, back.low};
  }
  __syncthreads();
  constexpr int kAtOnce = 2;  // pairs of tiles: four chains of products hide each other's latency
#pragma unroll 1
  for (int first_pair = 0; first_pair < kTiles; first_pair += kAtOnce) {
    // Of two tiles of 8 places in a column: those of columns lane / 4 and 8 further, places 2 (lane % 4) and the next.
    float sum[kAtOnce][2][4];
    const auto at = [&](int pair, int n, int half) {
      const int column = lane / 4 + 8 * half;
      return reinterpret_cast<float2*>(
          &s.state[warp][column][4 * state_piece(column, 4 * (first_pair + pair) + 2 * n + lane % 4 / 2) + lane % 2 * 2]);
    };
#pragma unroll
    for (int pair = 0; pair < kAtOnce; ++pair)
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
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int column = lane / 4 + i % 2 * 8, piece = 4 * (first_pair + i / 2) + lane % 4;
        copy_async(&s.state[warp][column][4 * state_piece(column, piece)], refill + column * kDim + 4 * piece);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const SplitPair &u0 = updates[0][step][0], &u1 = updates[1][step][0], &u2 = updates[0][step][1], &u3 = updates[1][step][1];
      const uint32_t u_high[4] = {u0.high, u1.high, u2.high, u3.high}, u_low[4] = {u0.low, u1.low, u2.low, u3.low};
#pragma unroll
      for (int pair = 0; pair < kAtOnce; ++pair) {
        const uint32_t from = tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * (first_pair + pair) + lane / 16);
        uint32_t high[4], low[4];
        load_matrices_transposed(high, from);
        if constexpr (kSplitKeys) load_matrices_transposed(low, from + kPartBytes);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_add(sum[pair][n], u_high, high[2 * n], high[2 * n + 1]);
          multiply_add(sum[pair][n], u_low, high[2 * n], high[2 * n + 1]);
          if constexpr (kSplitKeys) multiply_add(sum[pair][n], u_high, low[2 * n], low[2 * n + 1]);
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < kAtOnce; ++pair)
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
  __syncthreads();  // before updates are copied there again
}

/// The same where updates and keys are read from memory, products in f32, without a refill.
template <int kRows, class Ring>
__device__ void fold(Shared<kRows, Ring, false>& s, const GdnArgs& g, const Job& job, int head, int start, const float (&sums)[2], int own,
                     float* stored, const float* /*refill*/, bool /*is_read*/, int warp, int lane) {
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
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(g.conv_window) + (job.slot * window_length + index % window_length) * channels +
                                channel) = *reinterpret_cast<const uint4*>(job.given_columns(g, index, channel));
  }
}

/// kAlone: the block is alone on its multiprocessor, and has registers to spare.
template <int kRows, class Ring, bool kStaged, bool kAlone>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kRows, Ring, kStaged>;
  extern __shared__ __align__(16) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  constexpr bool kDeals = !kAlone, kStays = kRows == 1 && !kAlone;
  {
    const bool dealt = kDeals && (g.phases & kGdnDealt) != 0;
    bool searches = true;
#pragma unroll 1
    for (int attempt = 0; attempt < 2 && searches; ++attempt) {  // where a block's own job has no rows it is dealt another one
      if (attempt == 1) await_predecessor();
      if (threadIdx.x == kFinder) {
        if (attempt == 0) {
          s.numbers[1] = s.numbers[2] = -1;
          find_next<kRows>(s.jobs[0], s.numbers[0], g, static_cast<int>(blockIdx.x), true);
        } else {
          take_job(s, s.jobs[0], s.numbers[0], g, deal_one(g), true);
        }
      }
      if (dealt && attempt == 0) look_at_runs(s, g);
      __syncthreads();
      if (dealt && attempt == 0) put_in_order(s.deal, g);
      searches = dealt && s.numbers[0] < 0;
      if (searches) __syncthreads();
    }
  }
  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  if (s.numbers[0] >= 0) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    begin_state(s, g, s.jobs[0], s.jobs[0].head, warp, lane);
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
          const Ring* at =
              static_cast<const Ring*>(g.ring_k) + (ring_row(g, job, batch.start, j) * g.num_k_heads + job.k_head) * kDim + 4 * phase;
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
        if (is_key) y = {as_ring<Ring>(y.x), as_ring<Ring>(y.y), as_ring<Ring>(y.z), as_ring<Ring>(y.w)};
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
        if (looks && !dealt)
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
            if (copies_next && !batch.ends_chunk) begin_state(s, g, next_job, next_head, warp, lane);
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
                  u = four(static_cast<const Ring*>(g.ring_u) + (ring_row(g, job, batch.start, j) * g.num_v_heads + head) * kDim +
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
          const float u = as_ring<Ring>(beta * (v - (has_q ? other : sum)));
          const float o = fmaf(s.dots[r][position].y, u, has_q ? sum : other);
          if (!has_q)
            put(static_cast<Ring*>(g.ring_u) + (ring_row(g, job, batch.start, position) * g.num_v_heads + head) * kDim + column, u);
          if (kStaged && !has_q) put(update_at(s, warp, position, my_column), u);  // for later rows and the fold
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
          if (!kStaged && copies_next) begin_state(s, g, next_job, next_head, warp, lane);
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
        put_four(
            static_cast<Ring*>(g.ring_k) + (ring_row(g, job, batch.start, batch.first + r) * g.num_k_heads + job.k_head) * kDim + 4 * lane,
            four(&s.k[r][4 * lane]));
      if constexpr (kRows > 1) {
        if (batch.base > boundary_now && stores_fold()) boundary_now = batch.base;
        if (batch.ends_chunk) boundary_now = batch.base + kChunk;
        index += rows;
        if (index < job.end) {
          __threadfence();
          __syncthreads();
          begin_state(s, g, job, job.head, warp, lane);
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
  if (kDeals && (g.phases & kGdnDealt) != 0 && threadIdx.x == 0) {  // the last block to end leaves both counts as they were
    __threadfence();
    if (atomicAdd(g.dealt + 1, 1) + 1 == static_cast<int>(gridDim.x)) g.dealt[0] = g.dealt[1] = 0;
  }
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
