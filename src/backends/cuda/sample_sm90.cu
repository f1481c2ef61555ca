#include <cooperative_groups.h>

#include "backends/cuda/async.cuh"
#include "backends/cuda/sample_block.cuh"

// A cluster of eight blocks a row of logits: each keeps an eighth of the row in shared memory, so that the row is read once. Every row of a
// step is drawn as if the others were not there, since a verify's rows are only reached by tokens that equal the drafts before them;
// sample_advance then walks through each run's draws. Clusters take row after row, and a thread asks for its part of the next row as it leaves
// that of the last one, so that memory is never idle.
//
// Most rows need no word between blocks: of a greedy row each block gives its best token, where every token may be drawn the one that wins
// the draw among its own, and with a small top-k the tokens that can be among the best of the row. sample_advance draws from these. In other
// rows the blocks look for the last token of top-k and of top-p together. Sums are over integers, or in the order of blocks and threads.
// Nothing is sorted: the token stands in a bin of a histogram over logits, which is made finer until few tokens are left in the bin.

namespace quern::cuda {

namespace {

constexpr int kCluster = kSampleCluster, kThreads = kSampleThreads, kWarps = kThreads / 32;
constexpr int kOwnBins = kBins / kCluster;
constexpr int kListed = 512;       // tokens of a bin that are compared with one another
constexpr float kBinsPerNat = 64;  // of the first histogram, in logits or, at temperatures above 1, in logits over the temperature
constexpr int kMaxGroups = (kMaxSampleSlice / 4 + kThreads - 1) / kThreads;  // of four tokens of a thread
constexpr int kMaxShortlist = ops::kMaxCandidates * 4 * kMaxGroups;
constexpr int kFinishers = kSampleFinishers, kMaxFinishing = kMaxSampleFinishing;
constexpr int kPieceBits = 16, kPieces = 3;  // of a weight, which has 45 bits; a block adds up to 2^16 of them
static_assert(kMaxSampleSlice <= 1 << (32 - kPieceBits));

/// What a block tells all others.
struct Part {
  uint64_t key, weight;
  double sum;
  uint32_t count, finite;
};
/// A bin, and what stands before it.
struct Place {
  uint64_t weight_before;
  uint32_t count_before, count;
  int bin;
};

/// What a cluster finds of a row.
enum class Takes {
  kToken,      // the token drawn: whatever needs more than one look at the whole row
  kBest,       // each block's best token
  kDrawn,      // each block's best score and its token
  kShortlist,  // each block's tokens that can be among the top_k best
};
/// Whether a draw has to wait for those before it.
__device__ bool draws_in_turn(const Draws& draws, const ops::SlotSampling& p) { return draws.synthetic >= 0 && draws.num_draws > 1 && has_penalties(p); }
__device__ Takes takes_of(const SampleArgs& args, const Draws& draws, const ops::SlotSampling& p) {
  if (p.num_logprobs >= 0 || p.num_logit_bias > 0 || draws_in_turn(draws, p)) return Takes::kToken;
  if (p.temperature < kGreedyBelow) return Takes::kBest;
  if (limits_k(args, p)) return p.top_k <= ops::kMaxCandidates ? Takes::kShortlist : Takes::kToken;
  return p.top_p < 1.0f || p.min_p > 0.0f ? Takes::kToken : Takes::kDrawn;
}

/// Whose draw a row of logits is, and what the draw needs. number -1: nobody's.
struct Claim {
  int32_t number, draw, slot, top_k;
  Takes takes;
  bool transformed, penalties;
  float temperature;
  uint64_t draw_key;
};

/// A block's eighth of a row. A thread has the same elements in every loop, and all lanes of a warp have equally many.
struct Slice {
  int begin, groups;      // its first id, and how many times four of them
  int first_id, end_id;   // of the row

  /// Transformed; -infinity: not allowed.
  __device__ static float* values() {
    extern __shared__ __align__(16) unsigned char memory[];
    return reinterpret_cast<float*>(memory + kSampleSharedBytes);
  }
  [[nodiscard]] __device__ int size() const { return max(min(begin + 4 * groups, end_id) - begin, 0); }
  template <class F>
  __device__ void each(F&& f) const {
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      const float4 four = reinterpret_cast<const float4*>(values())[group];
      f(four.x, begin + 4 * group);
      f(four.y, begin + 4 * group + 1);
      f(four.z, begin + 4 * group + 2);
      f(four.w, begin + 4 * group + 3);
    }
  }
  /// f of four ids from the given one on.
  template <class F>
  __device__ void change_fours(F&& f) const {
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      float4& four = reinterpret_cast<float4*>(values())[group];
      four = f(four, begin + 4 * group);
    }
  }
  template <class F>
  __device__ void change(F&& f) const {
    change_fours([&](const float4& x, int id) { return make_float4(f(x.x, id), f(x.y, id + 1), f(x.z, id + 2), f(x.w, id + 3)); });
  }
  /// Begins to copy; what stands behind the row's end is unknown.
  __device__ void fetch(const float* row) const {
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) fetch(row, group);
    commit_copies();
  }
  __device__ void fetch(const float* row, int group) const {
    const int id = begin + 4 * group;
    if ((end_id - first_id) % 4 == 0) {
      if (id < end_id) copy_async(values() + 4 * group, row + (id - first_id));
    } else {
      for (int i = 0; i < 4; ++i)
        if (id + i < end_id) values()[4 * group + i] = row[id + i - first_id];
    }
  }
  /// The last look at the row, at four ids from the given one on at a time: `next`, if there is one, is fetched into its place.
  template <class F>
  __device__ void leave(const float* next, F&& f) const {
#pragma unroll 1
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      const float4 four = reinterpret_cast<const float4*>(values())[group];
      const int id = begin + 4 * group;
      f(four, id);
      if (next != nullptr) fetch(next, group);
    }
    commit_copies();
  }
};

struct Shared {
  Part parts[2][kCluster];  // by rank; used in turn
  Part totals[kCluster];    // of the histogram's bins, by the rank that owns them
  Place place;
  uint32_t counts[kBins];
  union {
    uint32_t weights[kPieces][kBins];
    uint64_t shortlist[kMaxShortlist];  // of rows in which blocks do not speak to each other
  };
  uint32_t own_counts[kOwnBins];  // of all blocks, up to and with the bin
  uint64_t own_weights[kOwnBins];
  uint64_t listed[kListed];  // keys of this block's tokens in the bin
  uint64_t all[kListed];     // of all blocks'
  uint64_t all_weights[kListed];
  uint64_t keys[kWarps];
  double sums[kWarps];
  uint32_t warp_counts[kWarps];
  uint64_t answer, answer_weight;
  uint32_t num_listed;
  // Of rows in which blocks do not speak to each other; used in turn.
  uint64_t own_keys[2][kWarps];
  uint32_t num_short[3], reached[3];  // reached: as ordered_bits
  int32_t before[kMaxSampleDraws];
  Slice slice;
  Claim claims[kMaxSampleRows];
};
static_assert(sizeof(Shared) <= kSampleSharedBytes);

__device__ void meet() { cooperative_groups::this_cluster().sync(); }
template <class T>
__device__ T* at_rank(T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}

struct Cluster {
  Shared& s;
  int rank, parity = 0;

  /// All blocks' parts by rank; `mine` is given by thread 0 of each. They stand until the call after the next.
  __device__ const Part* gather(const Part& mine) {
    Part* parts = s.parts[parity];
    parity ^= 1;
    if (threadIdx.x == 0)
      for (int r = 0; r < kCluster; ++r) *at_rank(&parts[rank], r) = mine;
    meet();
    return parts;
  }
};

__device__ uint64_t largest(const Part* parts) {
  uint64_t key = 0;
  for (int r = 0; r < kCluster; ++r) key = parts[r].key > key ? parts[r].key : key;
  return key;
}

/// Fills the histogram of the whole row.
__device__ void count_bins(const Slice& slice, const Level& level, bool weighted, float temperature, Cluster& c) {
  Shared& s = c.s;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  __syncthreads();
  for (int i = thread; i < kBins; i += kThreads) {
    s.counts[i] = 0;
    for (int piece = 0; piece < kPieces; ++piece) s.weights[piece][i] = 0;
  }
  __syncthreads();
  slice.each([&](float x, int id) {
    if (x == -INFINITY) return;
    const int bin = level.bin(x, id);
    if (bin < 0) return;
    atomicAdd(&s.counts[bin], 1u);
    if (!weighted) return;
    const uint64_t weight = weight_of(x, level.best, temperature);
    for (int piece = 0; piece < kPieces; ++piece)
      if (const auto part = static_cast<uint32_t>(weight >> (piece * kPieceBits) & ((1u << kPieceBits) - 1)); part != 0)
        atomicAdd(&s.weights[piece][bin], part);
  });
  meet();
  // The bins that this block owns, added up over blocks and then over bins.
  uint32_t count = 0;
  uint64_t weight = 0;
  if (thread < kOwnBins) {
    const int bin = c.rank * kOwnBins + thread;
    for (int r = 0; r < kCluster; ++r) {
      count += *at_rank(&s.counts[bin], r);
      if (weighted)
        for (int piece = 0; piece < kPieces; ++piece) weight += uint64_t{*at_rank(&s.weights[piece][bin], r)} << (piece * kPieceBits);
    }
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other_count = __shfl_up_sync(kAllLanes, count, static_cast<unsigned>(distance));
    const uint64_t other_weight = __shfl_up_sync(kAllLanes, weight, static_cast<unsigned>(distance));
    if (lane >= distance) {
      count += other_count;
      weight += other_weight;
    }
  }
  if (lane == 31) {
    s.warp_counts[warp] = count;
    s.keys[warp] = weight;
  }
  __syncthreads();
  if (thread < kOwnBins) {
    for (int w = 0; w < warp; ++w) {
      count += s.warp_counts[w];
      weight += s.keys[w];
    }
    s.own_counts[thread] = count;
    s.own_weights[thread] = weight;
  }
  __syncthreads();
  Part mine{};
  mine.count = s.own_counts[kOwnBins - 1];
  mine.weight = s.own_weights[kOwnBins - 1];
  const Part* parts = c.gather(mine);
  if (thread < kCluster) s.totals[thread] = parts[thread];
  __syncthreads();
}

/// The bin in which the count, or the weight, of all bins up to and with it reaches `wanted` (from 1 on). False: there is none.
__device__ bool locate(bool by_weight, uint64_t wanted, Cluster& c, Place& place) {
  Shared& s = c.s;
  uint64_t count_before = 0, weight_before = 0;
  int owner = 0;
  for (; owner < kCluster; ++owner) {
    const Part& total = s.totals[owner];
    if ((by_weight ? weight_before + total.weight : count_before + total.count) >= wanted) break;
    count_before += total.count;
    weight_before += total.weight;
  }
  if (owner == kCluster) return false;
  const int thread = static_cast<int>(threadIdx.x);
  if (c.rank == owner && thread < kOwnBins) {
    const uint64_t earlier_count = thread > 0 ? s.own_counts[thread - 1] : 0, earlier_weight = thread > 0 ? s.own_weights[thread - 1] : 0;
    const uint64_t before = by_weight ? weight_before + earlier_weight : count_before + earlier_count;
    const uint64_t reached = by_weight ? weight_before + s.own_weights[thread] : count_before + s.own_counts[thread];
    if (before < wanted && reached >= wanted) {
      const Place found{weight_before + earlier_weight, static_cast<uint32_t>(count_before + earlier_count),
                        static_cast<uint32_t>(s.own_counts[thread] - earlier_count), c.rank * kOwnBins + thread};
      for (int r = 0; r < kCluster; ++r) *at_rank(&s.place, r) = found;
    }
  }
  meet();
  place = s.place;
  return true;
}

/// The tokens that `chosen` names, in every block's s.all; at most kListed of the cluster. Returns how many they are.
template <class F>
__device__ int list(const Slice& slice, Cluster& c, F&& chosen) {
  Shared& s = c.s;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) s.num_listed = 0;
  __syncthreads();
  slice.each([&](float x, int id) {
    if (x != -INFINITY && chosen(x, id)) s.listed[atomicAdd(&s.num_listed, 1u)] = key_of(x, id);
  });
  meet();
  int total = 0;
  for (int r = 0; r < kCluster; ++r) {
    const int count = static_cast<int>(*at_rank(&s.num_listed, r));
    for (int i = thread; i < count; i += kThreads) s.all[total + i] = *at_rank(&s.listed[i], r);
    total += count;
  }
  __syncthreads();
  return total;
}

/// Of the tokens in the order of their keys, the one at which count or weight reaches `wanted`.
struct Selected {
  uint64_t key = 0;     // 0: all of them do not reach it
  uint64_t weight = 0;  // of all tokens up to and with it
  bool refilled = false;  // the histogram has been replaced
};
/// The histogram of Level{best, per_logit} has been filled.
__device__ __noinline__ Selected select(float best, float per_logit, bool by_weight, uint64_t wanted, bool weighted, float temperature, Cluster& c) {
  Shared& s = c.s;
  const Slice slice = s.slice;
  const int thread = static_cast<int>(threadIdx.x);
  Level level{best, per_logit};
  bool refilled = false;
  uint64_t weight_before = 0;
  Place place;
  for (;;) {
    if (!locate(by_weight, wanted, c, place)) return {0, 0, refilled};
    weight_before += place.weight_before;
    wanted -= by_weight ? place.weight_before : place.count_before;
    if (place.count <= kListed) break;
    level.descend(place.bin);
    count_bins(slice, level, weighted, temperature, c);
    refilled = true;
  }
  const int count = list(slice, c, [&](float x, int id) { return level.bin(x, id) == place.bin; });
  if (weighted && thread < count) s.all_weights[thread] = weight_of(logit_of(s.all[thread]), level.best, temperature);
  __syncthreads();
  answer_among(s.all, s.all_weights, count, by_weight, wanted, weighted, weight_before, s);
  __syncthreads();
  return {s.answer, s.answer_weight, refilled};
}

/// The best token of a row that was fetched and is now transformed, in every thread of the cluster; 0: none is allowed.
struct Prepared {
  uint64_t first;
  bool finite;
};
__device__ Prepared prepare(const Slice& slice, const SampleArgs& args, const Transforms& transforms, Cluster& c) {
  const ops::SlotSampling& p = *transforms.params;
  const int thread = static_cast<int>(threadIdx.x), last = min(args.num_tokens, slice.end_id);
  await_copies<0>();
  bool finite = true;
  const auto check = [&](float x, int id) {
    finite = finite && (id >= slice.end_id || (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u);
  };
  const bool biased = p.num_logit_bias > 0;
  if (biased) {
    slice.each(check);
    __syncthreads();
    const int count = min(p.num_logit_bias, ops::kMaxLogitBias), end = min(slice.begin + 4 * slice.groups, last);
    for (int i = 0; i < count; ++i) {  // one thread an id, which may be named twice
      const int id = p.bias_ids[i];
      if (id >= slice.begin && id < end && id % kThreads == thread) slice.values()[id - slice.begin] += p.bias_values[i];
    }
    __syncthreads();
  }
  const bool any = transforms.any();
  Part mine{};
  slice.change([&](float x, int id) {
    if (!biased) check(x, id);
    if (id >= last) return -INFINITY;
    if (any) x = transforms.apply(x, id);
    const uint64_t key = key_of(x, id);
    if (x != -INFINITY && key > mine.key) mine.key = key;
    return x;
  });
  mine.finite = __syncthreads_and(finite) != 0 ? 1 : 0;
  mine.key = block_max(mine.key, c.s);
  const Part* parts = c.gather(mine);
  Prepared prepared{largest(parts), true};
  for (int r = 0; r < kCluster; ++r) prepared.finite = prepared.finite && parts[r].finite != 0;
  return prepared;
}

/// The best score and its token of those with the key `lowest_key`, and the logit `lowest`, or better; `first` is one of them.
__device__ uint64_t gumbel_key(const Slice& slice, const ops::SlotSampling& p, int64_t index, uint64_t first, uint64_t lowest_key, float lowest, Cluster& c) {
  GumbelDraw draw{ops::draw_key(p.seed, index), p.temperature};
  draw.offer(logit_of(first), id_of(first));  // most others have no chance against it
  slice.each([&](float x, int id) {
    if (x != -INFINITY && x >= lowest && key_of(x, id) >= lowest_key) draw.offer(x, id);
  });
  Part mine{};
  mine.key = block_max(draw.drawn, c.s);
  return largest(c.gather(mine));
}

/// The token drawn, in every thread of the cluster; -1: a logit is not finite, or no token is allowed.
__device__ int draw_token(const Slice& slice, const SampleArgs& args, int64_t index, const Transforms& transforms, Cluster& c) {
  const ops::SlotSampling& p = *transforms.params;
  const auto [first, finite] = prepare(slice, args, transforms, c);
  if (!finite || first == 0) return -1;
  if (p.temperature < kGreedyBelow) return id_of(first);

  const float best = logit_of(first);
  uint64_t lowest_key = 0;
  const bool limited_k = limits_k(args, p), limits_p = p.top_p < 1.0f;
  if (limited_k || limits_p) {
    const Level level{best, kBinsPerNat / fmaxf(1.0f, p.temperature)};
    count_bins(slice, level, limits_p, p.temperature, c);
    uint64_t all = 0;
    for (int r = 0; r < kCluster; ++r) all += c.s.totals[r].weight;
    bool refilled = false;
    if (limited_k) {
      const Selected last = select(best, level.per_logit, false, static_cast<uint64_t>(p.top_k), limits_p, p.temperature, c);
      refilled = last.refilled;
      lowest_key = last.key;
      if (last.key != 0) all = last.weight;
    }
    if (limits_p) {
      if (refilled) count_bins(slice, level, true, p.temperature, c);
      const Selected last = select(best, level.per_logit, true, wanted_weight(p.top_p, all), true, p.temperature, c);
      lowest_key = last.key > lowest_key ? last.key : lowest_key;
    }
  }
  return id_of(gumbel_key(slice, p, index, first, lowest_key, lowest_logit(p, best), c));
}

/// Log-probabilities of the whole raw row: the chosen token's, then the most likely ones'.
__device__ __noinline__ void write_logprobs(const Slice& slice, const SampleArgs& args, const float* raw, int token, int num_top,
                                            int64_t entry, Cluster& c) {
  Shared& s = c.s;
  const int thread = static_cast<int>(threadIdx.x);
  slice.fetch(raw);
  await_copies<0>();
  slice.change([&](float x, int id) { return id >= slice.end_id ? -INFINITY : x; });
  Part mine{};
  slice.each([&](float x, int id) {
    const uint64_t key = key_of(x, id);
    if (x != -INFINITY && key > mine.key) mine.key = key;
  });
  mine.key = block_max(mine.key, s);
  const float best = logit_of(largest(c.gather(mine))), chosen = raw[token];
  double weights = 0;
  uint32_t before = 0;
  slice.each([&](float x, int id) {
    if (x == -INFINITY) return;
    weights += static_cast<double>(expf(x - best));
    before += x > chosen || (x == chosen && id < token) ? 1 : 0;
  });
  mine.sum = block_total(weights, s);
  mine.count = static_cast<uint32_t>(block_total(before, s));
  const Part* parts = c.gather(mine);
  double sum = 0;
  uint32_t rank = 1;
  for (int r = 0; r < kCluster; ++r) {
    sum += parts[r].sum;
    rank += parts[r].count;
  }
  const double log_sum = static_cast<double>(best) + log(sum);
  const auto logprob = [&](float logit) { return fmaxf(static_cast<float>(static_cast<double>(logit) - log_sum), kLogprobFloor); };
  constexpr int kWidth = 1 + ops::kMaxLogprobs;
  float* values = args.logprobs + entry * kWidth;
  int32_t* ids = args.logprob_ids + entry * kWidth;
  if (c.rank == 0 && thread == 0) {
    args.chosen_rank[entry] = static_cast<int32_t>(rank);
    values[0] = logprob(chosen);
    ids[0] = token;
  }
  const int wanted = min(min(num_top, ops::kMaxLogprobs), args.vocab_size);
  if (wanted <= 0) return;
  const Level level{best, kBinsPerNat};
  count_bins(slice, level, false, 1.0f, c);
  const uint64_t last = select(best, kBinsPerNat, false, static_cast<uint64_t>(wanted), false, 1.0f, c).key;
  meet();  // all have read the list
  const int count = list(slice, c, [&](float x, int id) { return key_of(x, id) >= last; });
  if (c.rank == 0 && thread < count) {
    int larger = 0;
    for (int i = 0; i < count; ++i) larger += s.all[i] > s.all[thread] ? 1 : 0;
    values[1 + larger] = logprob(logit_of(s.all[thread]));
    ids[1 + larger] = id_of(s.all[thread]);
  }
}

__device__ Slice slice_of(int first_id, int end_id, int rank) {
  const int slice = ((end_id - first_id + kCluster - 1) / kCluster + kSampleUnit - 1) / kSampleUnit * kSampleUnit, groups = slice / 4;
  return {first_id + rank * 4 * groups, groups, first_id, end_id};
}

/// Fills s.claims for the rows of logits first, first + stride, ...
__device__ void claim_rows(const SampleArgs& args, int first, int stride, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMaxSampleRows) s.claims[thread].number = -1;
  __syncthreads();
  for (int number = thread; number < args.num_runs; number += kThreads) {
    const SampleRecord run = args.runs[number];
    if (run.slot < 0 || run.first_logits_row < 0) continue;
    const Draws draws = draws_of(run);
    for (int draw = run.first_logits_row >= first ? 0 : first - run.first_logits_row; draw < draws.num_draws; ++draw) {
      const int distance = run.first_logits_row + draw - first;
      if (distance % stride != 0 || distance / stride >= kMaxSampleRows) continue;
      const ops::SlotSampling& p = args.params[run.slot];
      s.claims[distance / stride] = {.number = number,
                                     .draw = draw,
                                     .slot = run.slot,
                                     .top_k = p.top_k,
                                     .takes = takes_of(args, draws, p),
                                     .transformed = transforms_of(args, run, draw, nullptr, draw).any(),
                                     .penalties = has_penalties(p),
                                     .temperature = p.temperature,
                                     .draw_key = ops::draw_key(p.seed, token_index(run, draws, args.cursor[run.slot], draw))};
    }
  }
  __syncthreads();
}
/// The whole block asks for `bytes`, a multiple of 16.
__device__ void ask_for(const void* from, int64_t bytes) {
  constexpr int64_t kPiece = 16 << 10;
  for (int64_t at = threadIdx.x * kPiece; at < bytes; at += kThreads * kPiece) prefetch_bytes(static_cast<const char*>(from) + at, min(kPiece, bytes - at));
}
/// Asks for what a row's penalties read.
__device__ __noinline__ void ask_for_penalties(const SampleArgs& args, const Claim& claim, Shared& s) {
  if (!claim.penalties || args.vocab_size % 16 != 0) return;
  const int64_t first = claim.slot * int64_t{args.vocab_size} + s.slice.begin;
  ask_for(args.counts + first, s.slice.size() * static_cast<int64_t>(sizeof(int32_t)));
  ask_for(args.in_prompt + first, s.slice.size());
}
/// Penalties, mask and stop ids of a row that is reached by the drafts before it alone.
__device__ Transforms transforms_of(const SampleArgs& args, const Claim& claim) {
  return transforms_of(args, args.runs[claim.number], claim.draw, args.drafts + int64_t{claim.slot} * args.drafts_stride, claim.draw);
}

/// The largest of the threads' keys, to `part`.
__device__ void tell_best(bool finite, uint64_t key, uint64_t* part, int turn, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  if (thread % 32 == 0) s.own_keys[turn % 2][thread / 32] = key;
  finite = __syncthreads_and(finite) != 0;
  if (thread >= 32) return;
  key = s.own_keys[turn % 2][thread];
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  if (thread == 0) {
    part[0] = finite ? 1 + (key != 0 ? 1 : 0) : 0;
    part[1] = key;
  }
}

__device__ uint32_t ordered_bits(float x) { return static_cast<uint32_t>(key_of(x, 0) >> 32); }
__device__ float from_ordered(uint32_t bits) { return logit_of(uint64_t{bits} << 32); }

/// Four tokens as their row's transforms leave them; -infinity: not allowed.
template <bool kTransformed>
struct Look {
  Transforms transforms;
  int last, end_id;     // the first id without text, and of none
  bool fours = false;   // the tables of penalties can be read by four
  float bad = 0;        // a number that is no zero: a logit was not finite

  __device__ Look(const SampleArgs& args, const Claim& claim) : last(min(args.num_tokens, args.end_id)), end_id(args.end_id) {
    if constexpr (kTransformed) {
      transforms = transforms_of(args, claim);
      fours = claim.penalties && args.vocab_size % 16 == 0;
    }
  }
  __device__ float4 operator()(const float4& four, int id) {
    const bool whole = id + 4 <= last;
    float x[4] = {four.x, four.y, four.z, four.w};
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bad = __fmaf_rn(x[i], 0.0f, bad);
      if constexpr (kTransformed) {
        if (fours) {
          const int4 counts = *reinterpret_cast<const int4*>(transforms.counts + id);
          const uchar4 in_prompt = *reinterpret_cast<const uchar4*>(transforms.in_prompt + id);
          x[0] = transforms.penalised(x[0], id, counts.x, in_prompt.x);
          x[1] = transforms.penalised(x[1], id + 1, counts.y, in_prompt.y);
          x[2] = transforms.penalised(x[2], id + 2, counts.z, in_prompt.z);
          x[3] = transforms.penalised(x[3], id + 3, counts.w, in_prompt.w);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = transforms.allowed(x[i], id + i);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = transforms.apply(x[i], id + i);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (id + i < end_id) bad = __fmaf_rn(x[i], 0.0f, bad);
        if (id + i >= last) x[i] = -INFINITY;
        else if constexpr (kTransformed) x[i] = transforms.apply(x[i], id + i);
      }
    }
    return make_float4(x[0], x[1], x[2], x[3]);
  }
};
__device__ float largest(const float4& four) { return fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)); }

/// A thread's best token, which it meets in the order of ids.
struct Best {
  float value = -INFINITY;
  int id = -1;
  __device__ void offer(const float4& four, int first_id) {
    if (!(largest(four) > value)) return;
    value = largest(four);
    id = first_id + (four.x == value ? 0 : four.y == value ? 1 : four.z == value ? 2 : 3);
  }
  [[nodiscard]] __device__ uint64_t key() const { return id < 0 ? 0 : key_of(value, id); }
};

/// A greedy row.
template <bool kTransformed>
__device__ __noinline__ void find_best(const SampleArgs& args, const Claim& claim, const float* next, uint64_t* part, int turn, Shared& s) {
  const Slice slice = s.slice;
  Look<kTransformed> look(args, claim);
  Best best;
  slice.leave(next, [&](const float4& four, int id) { best.offer(look(four, id), id); });
  tell_best(look.bad == 0, best.key(), part, turn, s);
}

/// A row of which every token may be drawn.
template <bool kTransformed>
__device__ __noinline__ void find_drawn(const SampleArgs& args, const Claim& claim, const float* next, uint64_t* part, int turn, Shared& s) {
  const Slice slice = s.slice;
  Look<kTransformed> look(args, claim);
  GumbelDraw draw{claim.draw_key, claim.temperature};
  const GumbelBounds bounds(draw.temperature);
  // One token of each thread says what a score has to be, so that few need to be known exactly.
  if (static_cast<int>(threadIdx.x) < slice.groups) {
    const int id = slice.begin + 4 * static_cast<int>(threadIdx.x);
    Best likely;
    likely.offer(look(reinterpret_cast<const float4*>(slice.values())[threadIdx.x], id), id);
    if (likely.id >= 0) draw.best = bounds.least(likely.value, ops::uniform_bits(draw.key, likely.id));
    const uint32_t best = __reduce_max_sync(kAllLanes, ordered_bits(draw.best));  // a warp has whole groups
    if (threadIdx.x % 32 == 0) atomicMax(&s.reached[turn % 3], best);
  }
  __syncthreads();
  slice.leave(next, [&](const float4& four, int id) {
    const float4 x = look(four, id);
    uint64_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __builtin_assume(static_cast<uint32_t>(id + i) < 1u << 30);  // two operations of a hash are known
      bits[i] = ops::uniform_bits(draw.key, id + i);
    }
    const uint32_t reached = *static_cast<volatile uint32_t*>(&s.reached[turn % 3]);
    draw.best = fmaxf(draw.best, from_ordered(reached));
    if (!(largest(make_float4(bounds.most(x.x, bits[0]), bounds.most(x.y, bits[1]), bounds.most(x.z, bits[2]), bounds.most(x.w, bits[3]))) < draw.best)) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i)
        if (const float value = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; value != -INFINITY) draw.offer(value, id + i);
      if (ordered_bits(draw.best) > reached) atomicMax(&s.reached[turn % 3], ordered_bits(draw.best));
    }
  });
  tell_best(look.bad == 0, draw.drawn, part, turn, s);
}

/// A row of which the top_k best tokens may be drawn: the block's top_k best, or a few more, up to kMaxCandidates.
template <bool kTransformed>
__device__ __noinline__ void find_shortlist(const SampleArgs& args, const Claim& claim, const float* next, uint64_t* part, int turn, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x), k = claim.top_k;
  const Slice slice = s.slice;
  Look<kTransformed> look(args, claim);
  if (next != nullptr && args.vocab_size % 4 == 0) ask_for(next + slice.begin, slice.size() * static_cast<int64_t>(sizeof(float)));  // its place is needed for a while
  Best best;
  slice.change_fours([&](const float4& four, int id) {
    const float4 x = look(four, id);
    best.offer(x, id);
    return x;
  });
  const bool finite = __syncthreads_and(look.bad == 0) != 0;
  // The k-th best of the threads' best tokens is not better than the k-th best of all. Its key, bit by bit, until it is that of few enough threads.
  const uint64_t mine = best.key();
  uint64_t lowest = 0;
  for (int bit = 63; bit >= 0 && finite; --bit) {
    const uint64_t tried = lowest | uint64_t{1} << bit;
    const int count = __syncthreads_count(mine >= tried);
    if (count < k) continue;
    lowest = tried;
    if (count <= ops::kMaxCandidates) break;
  }
  const bool has_some = finite && mine >= lowest && mine != 0;
  slice.leave(next, [&](const float4& four, int id) {
    if (!has_some) return;
    const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const uint64_t key = key_of(values[i], id + i); key >= lowest && values[i] != -INFINITY) s.shortlist[atomicAdd(&s.num_short[turn % 3], 1u)] = key;
  });
  __syncthreads();
  const int count = static_cast<int>(s.num_short[turn % 3]);
  if (thread == 0) part[0] = finite ? 1 + static_cast<uint64_t>(count <= ops::kMaxCandidates ? count : k) : 0;
  if (count <= ops::kMaxCandidates) {
    if (thread < count) part[1 + thread] = s.shortlist[thread];
  } else {
    for (int i = thread; i < count; i += kThreads) {
      int larger = 0;
      for (int other = 0; other < count; ++other) larger += s.shortlist[other] > s.shortlist[i] ? 1 : 0;
      if (larger < k) part[1 + larger] = s.shortlist[i];
    }
  }
}

/// A row that all blocks of the cluster look at together, more than once.
__device__ void draw_whole(const Slice& slice, const SampleArgs& args, const Claim& claim, Cluster& c) {
  const int number = claim.number, draw = claim.draw;
  Shared& s = c.s;
  const SampleRecord run = args.runs[number];
  const Draws draws = draws_of(run);
  const ops::SlotSampling& p = args.params[run.slot];
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  const int thread = static_cast<int>(threadIdx.x);
  // Where drafts count as accepted whatever was drawn, a penalty needs to know what was: the first row's cluster takes all rows.
  const bool in_turn = draws_in_turn(draws, p);
  if (in_turn && draw > 0) return;
  for (int now = draw; now <= (in_turn ? draws.num_draws - 1 : draw); ++now) {
    const float* raw = args.logits + (int64_t{run.first_logits_row} + now) * args.vocab_size;
    if (now > draw) slice.fetch(raw);
    const Transforms transforms = transforms_of(args, run, now, in_turn ? s.before : drafts, now);
    const int token = draw_token(slice, args, token_index(run, draws, args.cursor[run.slot], now), transforms, c);
    if (c.rank == 0 && thread == 0) args.drawn[run.first_logits_row + now] = token;
    if (token < 0) break;
    if (p.num_logprobs >= 0) write_logprobs(slice, args, raw, token, p.num_logprobs, int64_t{number} * (args.k_max + 1) + now, c);
    if (in_turn && thread == 0) s.before[now] = token;
    __syncthreads();
  }
}

}  // namespace

/// blockIdx: (rank in the cluster, cluster). What becomes of each row of logits goes to args.parts, or its token, -1 where it failed, to args.drawn (takes_of).
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_draw(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), first_row = static_cast<int>(blockIdx.y), stride = static_cast<int>(gridDim.y);
  Cluster c{s, static_cast<int>(blockIdx.x) % kCluster};
  const Slice slice = slice_of(args.first_id, args.end_id, c.rank);
  const auto logits_of = [&](int i) { return args.logits + (first_row + int64_t{i} * stride) * args.vocab_size; };
  release_successor();
  meet();  // from here on all blocks of the cluster are there
  await_predecessor();
  slice.fetch(logits_of(0));
  if (thread < 3) s.num_short[thread] = s.reached[thread] = 0;
  if (thread == 0) s.slice = slice;
  claim_rows(args, first_row, stride, s);
  const int count = (args.num_rows - first_row + stride - 1) / stride;
  const auto from = [&](int i, bool whole) {  // the next row of either kind
    while (i < count && (s.claims[i].number < 0 || (s.claims[i].takes == Takes::kToken) != whole)) ++i;
    return i;
  };
  int fetched = 0;
  const auto make_sure_of = [&](int i) {
    if (i == fetched || i >= count) return;
    await_copies<0>();
    slice.fetch(logits_of(i));
    fetched = i;
  };
  int i = from(0, false);
  make_sure_of(i);
  if (i < count) ask_for_penalties(args, s.claims[i], s);
  for (int turn = 0; i < count; ++turn) {
    const Claim& claim = s.claims[i];
    uint64_t* part = args.parts + ((first_row + int64_t{i} * stride) * kCluster + c.rank) * kSamplePartWords;
    const int following = from(i + 1, false);
    const float* next = following < count ? logits_of(following) : nullptr;
    if (following < count) ask_for_penalties(args, s.claims[following], s);
    await_copies<0>();
    if (thread == 0) s.num_short[(turn + 1) % 3] = s.reached[(turn + 1) % 3] = 0;  // used in the row before the last one, which all have left
    if (claim.takes == Takes::kBest) {
      if (claim.transformed) find_best<true>(args, claim, next, part, turn, s);
      else find_best<false>(args, claim, next, part, turn, s);
    } else if (claim.takes == Takes::kDrawn) {
      if (claim.transformed) find_drawn<true>(args, claim, next, part, turn, s);
      else find_drawn<false>(args, claim, next, part, turn, s);
    } else {
      if (claim.transformed) find_shortlist<true>(args, claim, next, part, turn, s);
      else find_shortlist<false>(args, claim, next, part, turn, s);
    }
    i = fetched = following;
  }
  for (i = from(0, true); i < count; i = from(i + 1, true)) {
    __syncthreads();  // all have left the row before it
    make_sure_of(i);
    draw_whole(slice, args, s.claims[i], c);
  }
  await_copies<0>();
  meet();  // nobody's memory is read any more
}

/// blockIdx: (rank in the cluster, row of logits). Candidates of a part of the vocabulary.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_candidates_sm90(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  Cluster c{s, static_cast<int>(blockIdx.x) % kCluster};
  const Slice slice = slice_of(args.first_id, args.end_id, c.rank);
  const int row = static_cast<int>(blockIdx.y);
  release_successor();
  meet();  // from here on all blocks of the cluster are there
  await_predecessor();
  slice.fetch(args.logits + int64_t{row} * (args.end_id - args.first_id));
  if (thread == 0) s.slice = slice;
  claim_rows(args, row, static_cast<int>(gridDim.y), s);
  const int number = s.claims[0].number, draw = s.claims[0].draw;
  if (number < 0) {
    await_copies<0>();
    return;
  }
  const SampleRecord run = args.runs[number];
  const Transforms transforms = transforms_of(args, s.claims[0]);
  const ops::SlotSampling& p = *transforms.params;
  const Prepared prepared = prepare(slice, args, transforms, c);
  const uint64_t first = prepared.finite ? prepared.first : 0;
  uint64_t* out = args.candidates + int64_t{blockIdx.y} * (1 + args.num_candidates);
  int count = first != 0 ? 1 : 0;
  uint64_t only = first;
  if (first != 0 && p.temperature >= kGreedyBelow) {
    if (limits_k(args, p)) {
      const Level level{logit_of(first), kBinsPerNat / fmaxf(1.0f, p.temperature)};
      count_bins(slice, level, false, p.temperature, c);
      const uint64_t lowest = select(level.best, level.per_logit, false, static_cast<uint64_t>(p.top_k), false, p.temperature, c).key;
      meet();  // all have read the list
      count = list(slice, c, [&](float x, int id) { return key_of(x, id) >= lowest; });
      only = 0;
    } else {
      only = gumbel_key(slice, p, token_index(run, draws_of(run), args.cursor[run.slot], draw), first, 0, -INFINITY, c);
    }
  }
  if (c.rank == 0) {
    if (thread == 0) out[0] = prepared.finite ? 1 : 0;
    if (thread >= count && thread < args.num_candidates) out[1 + thread] = 0;
    if (thread < count) {
      const uint64_t key = only != 0 ? only : s.all[thread];
      int larger = 0;
      for (int i = 0; i < count && only == 0; ++i) larger += s.all[i] > key ? 1 : 0;
      out[1 + larger] = key;
    }
  }
  meet();  // nobody's memory is read any more
}

namespace {

/// Of the threads of sample_advance that finish a row.
struct Finish {
  uint64_t keys[kCluster * ops::kMaxCandidates];
  uint64_t sorted[ops::kMaxCandidates], weights[ops::kMaxCandidates], scores[2], heads[kCluster];
};

/// The token of a row from the best tokens of each block, in each of kFinishers threads; -1 where it failed.
__device__ int draw_from_shortlists(const uint64_t* parts, const ops::SlotSampling& p, int64_t index, Finish& s) {
  const int thread = static_cast<int>(threadIdx.x) % kFinishers;
  const auto meet_finishers = [] { asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / kFinishers), "n"(kFinishers) : "memory"); };
  static_assert(kFinishers == 32 * kCluster && ops::kMaxCandidates == 2 * 32);  // a warp takes the tokens of a block
  const uint64_t* part = parts + thread / 32 * kSamplePartWords;
  const int lane = thread % 32;
  const uint64_t head = part[0], keys[2] = {part[1 + lane], part[33 + lane]};  // of which only the first ones mean anything
  if (lane == 0) s.heads[thread / 32] = head;
  meet_finishers();
  int count = 0, begin = 0;
  bool finite = true;
  for (int r = 0; r < kCluster; ++r) {
    const int own = s.heads[r] != 0 ? static_cast<int>(s.heads[r] - 1) : 0;
    finite = finite && s.heads[r] != 0;
    begin += r < thread / 32 ? own : 0;
    count += own;
  }
  if (!finite || count == 0) return -1;
  for (int i = 0; i < 2; ++i)
    if (32 * i + lane < static_cast<int>(head - 1)) s.keys[begin + 32 * i + lane] = keys[i];
  meet_finishers();
  for (int i = thread; i < count; i += kFinishers) {
    const uint64_t key = s.keys[i];
    int larger = 0;
    for (int other = 0; other < count; ++other) larger += s.keys[other] > key ? 1 : 0;
    if (larger < p.top_k) s.sorted[larger] = key;
  }
  meet_finishers();
  const int num_kept = min(count, p.top_k);
  const uint64_t key = thread < num_kept ? s.sorted[thread] : 0;
  const float x = logit_of(key), best = logit_of(s.sorted[0]);
  bool kept = thread < num_kept;
  if (p.top_p < 1.0f) {
    if (kept) s.weights[thread] = weight_of(x, best, p.temperature);
    meet_finishers();
    uint64_t all = 0, before = 0;
    for (int i = 0; i < num_kept; ++i) {
      before += i < thread ? s.weights[i] : 0;
      all += s.weights[i];
    }
    kept = kept && before < wanted_weight(p.top_p, all);
  }
  GumbelDraw chance{ops::draw_key(p.seed, index), p.temperature};
  if (kept && x >= lowest_logit(p, best)) chance.offer(x, id_of(key));
  uint64_t drawn = chance.drawn;
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, drawn, distance);
    drawn = other > drawn ? other : drawn;
  }
  if (thread == 0 || thread == 32) s.scores[thread / 32] = drawn;
  meet_finishers();
  return id_of(s.scores[0] > s.scores[1] ? s.scores[0] : s.scores[1]);
}

}  // namespace

/// A block a run, of kFinishers threads for each of up to kMaxFinishing rows that are finished at a time.
extern "C" __global__ void __launch_bounds__(kFinishers * kMaxFinishing) sample_advance(const __grid_constant__ SampleArgs args) {
  __shared__ Finish finish[kMaxFinishing];
  __shared__ int32_t tokens[kMaxSampleDraws];  // of the run's rows; -1: failed
  const int number = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  release_successor();
  await_predecessor();
  const SampleRecord run = args.runs[number];
  if (run.slot < 0) {
    if (thread == 0) args.sampled[number] = args.non_finite[number] = 0;
    return;
  }
  ops::SlotSampling& params = args.params[run.slot];
  const Draws draws = draws_of(run);
  const Takes takes = takes_of(args, draws, params);
  const uint64_t* parts = args.parts + int64_t{run.first_logits_row} * kCluster * kSamplePartWords;
  if (takes == Takes::kShortlist) {
    for (int draw = thread / kFinishers; draw < draws.num_draws; draw += static_cast<int>(blockDim.x) / kFinishers) {
      const int token = draw_from_shortlists(parts + int64_t{draw} * kCluster * kSamplePartWords, params, token_index(run, draws, args.cursor[run.slot], draw), finish[thread / kFinishers]);
      if (thread % kFinishers == 0) tokens[draw] = token;
      if (token < 0) break;  // nobody asks for later ones
    }
  } else if (thread < draws.num_draws) {
    if (takes == Takes::kToken) {
      tokens[thread] = args.drawn[run.first_logits_row + thread];
    } else {
      bool finite = true;
      uint64_t best = 0;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) {
        const uint64_t* part = parts + (int64_t{thread} * kCluster + r) * kSamplePartWords;
        finite = finite && part[0] != 0;
        best = part[1] > best ? part[1] : best;
      }
      tokens[thread] = finite && best != 0 ? id_of(best) : -1;
    }
  }
  __syncthreads();
  if (thread != 0) return;
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  int num_tokens = 0;
  bool failed = false;
  for (int draw = 0; draw < draws.num_draws; ++draw) {
    const int token = tokens[draw];
    failed = token < 0;
    if (failed) break;
    ++num_tokens;
    if (is_stop(params, token) || (draw + 1 < draws.num_draws && (draws.synthetic >= 0 ? draw >= draws.synthetic : drafts[draw] != token)))
      break;
  }
  if (failed) num_tokens = 0;  // the request fails as a whole
  int32_t* counts = args.counts + int64_t{run.slot} * args.vocab_size;
  for (int i = 0; i < num_tokens; ++i) {
    const int token = tokens[i];
    args.tokens[int64_t{number} * (args.k_max + 1) + i] = token;
    ++counts[token];
    if (i + 1 == num_tokens) args.last_token[run.slot] = token;
  }
  params.num_generated += num_tokens;
  args.sampled[number] = num_tokens;
  args.non_finite[number] = failed ? 1 : 0;
  advance_cursor(args, run, draws, num_tokens);
}

/// blockIdx: (rank in the cluster, row).
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_argmax(const __grid_constant__ ArgmaxArgs args) {
  __shared__ uint64_t keys[kWarps], all[kCluster];
  const int thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.x) % kCluster;
  release_successor();
  meet();  // from here on all blocks of the cluster are there
  await_predecessor();
  const float* row = args.logits + int64_t{blockIdx.y} * args.width;
  const Slice slice = slice_of(0, args.num_tokens, rank);
  uint64_t mine = 0;
#pragma unroll 8
  for (int i = slice.begin + thread; i < min(slice.begin + 4 * slice.groups, args.num_tokens); i += kThreads) {
    const uint64_t key = key_of(row[i], args.first_id + i);
    mine = key > mine ? key : mine;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, mine, distance);
    mine = other > mine ? other : mine;
  }
  if (thread % 32 == 0) keys[thread / 32] = mine;
  __syncthreads();
  if (thread < 32) {
    mine = keys[thread];
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, mine, distance);
      mine = other > mine ? other : mine;
    }
    if (thread == 0) *at_rank(&all[rank], 0) = mine;
  }
  meet();
  if (rank != 0 || thread != 0) return;
  for (int r = 0; r < kCluster; ++r) mine = all[r] > mine ? all[r] : mine;
  give_best(args, blockIdx.y, mine);
}

}  // namespace quern::cuda
