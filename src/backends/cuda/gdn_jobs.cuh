#pragma once

#include "backends/cuda/gdn_runs.cuh"
#include "backends/cuda/mma.cuh"

// What blocks of decode and verify rows of heads of 128 x 128 do one after the other, and how they find it; shared by the kernels for
// either dtype of the ring. Device code only.
//
// Places are counted in 32 bits: 2^31 elements of a layer's states would be 8 GiB.

namespace quern::cuda {

inline constexpr int kDim = 128;  // d_k and d_v
inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kColumns = kDim / kWarps;  // of a warp
inline constexpr int kChunk = static_cast<int>(kGrid);
inline constexpr int kFinder = kThreads - 32;  // the thread that looks for the next job: its warp has least to do for a single row

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
__device__ inline int ring_row(const GdnArgs& g, const Job& job, int start, int j) {
  const int length = kChunk + g.k_max + 1, place = start + j;
  return job.slot * length + (place < length ? place : place - length);
}

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

/// What a block knows of its jobs, in shared memory.
template <int kRows>
struct JobsOfBlock {
  Job jobs[3];  // this one, the next, and the one before, which some warp may not have left
  int numbers[3];
  int place[kWarps];  // of the job, as each warp goes
  Deal deal;
  SeenRun seen[kRows == 1 ? kThreads : 0];
  uint8_t seen_window[kRows == 1 ? kThreads : 0], seen_start[kRows == 1 ? kThreads : 0];  // Job::window and start
};

__device__ inline int jobs_of(const GdnArgs& g) {
  return g.step.num_runs * ((g.phases & kGdnHeadsApart) != 0 ? g.num_v_heads : g.num_k_heads);
}
__device__ inline bool has_rows(const RunRecord& record) {
  return record.slot >= 0 && record.num_rows > 0 && (record.flags & kIsDecode) != 0;
}

/// By all threads: thread i looks at run i.
template <int kRows>
__device__ void look_at_runs(JobsOfBlock<kRows>& s, const GdnArgs& g) {
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
__device__ inline uint32_t bits_from(int n) { return n <= 0 ? ~0u : n < 32 ? ~0u << n : 0u; }
/// By all threads, once all have looked: thread i puts run i in its place.
__device__ inline void put_in_order(Deal& deal, const GdnArgs& g) {
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
__device__ inline int deal_one(const GdnArgs& g) {
  int before;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(g.dealt) : "memory");
  return before;
}
/// The number of the job that is dealt after as many others, or one beyond them all.
__device__ inline int dealt_job(const Deal& deal, const GdnArgs& g, int before) {
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
template <int kRows>
__device__ void take_job(JobsOfBlock<kRows>& s, Job& job, int& number, const GdnArgs& g, int before, bool is_first) {
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

/// By all threads: the block's first job; its number is negative if there is none.
template <int kRows, bool kDeals>
__device__ void find_first(JobsOfBlock<kRows>& s, const GdnArgs& g) {
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
/// By all threads, at the block's end: the last block to end leaves both counts as they were.
template <bool kDeals>
__device__ void leave_counts(const GdnArgs& g) {
  if (kDeals && (g.phases & kGdnDealt) != 0 && threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(g.dealt + 1, 1) + 1 == static_cast<int>(gridDim.x)) g.dealt[0] = g.dealt[1] = 0;
  }
}

/// Where b and a of row r stand.
__device__ inline int gate_at(const GdnArgs& g, const Job& job, const Batch& batch, int head, int r) {
  return (job.first_row + batch.index - job.cursor + min(r, batch.rows - 1)) * g.num_v_heads + head;
}
/// The element at an odd or even place of the word that holds it.
__device__ inline float of_word(uint32_t word, bool upper) { return __uint_as_float(upper ? word & 0xffff0000u : word << 16); }
__device__ inline __nv_bfloat16* window_at(const GdnArgs& g, const Job& job, int index, int channel) {
  return static_cast<__nv_bfloat16*>(g.conv_window) + job.window_row(g, index) * ((2 * g.num_k_heads + g.num_v_heads) * kDim) + channel;
}
/// The raw columns of the job's channels, eight a thread: those before a boundary whose fold was stored, then the window.
__device__ inline void keep_columns(const GdnArgs& g, const Job& job) {
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

__device__ inline float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline float4 widened_four(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ inline float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
/// As far as bf16 and the sums of f32 can tell; without the branches of an exact quotient.
__device__ inline float fast_silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
__device__ inline float silu_as_bf16(float x) { return round_to(DType::kBF16, fast_silu(x)); }

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

/// Two values as pairs of bf16: the nearest, and of what is left the nearest.
struct SplitPair {
  uint32_t high, low;
};
__device__ inline SplitPair split(float x, float y) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(x, y), low = __floats2bfloat162_rn(x - __low2float(high), y - __high2float(high));
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

}  // namespace quern::cuda
