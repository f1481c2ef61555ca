#include <cooperative_groups.h>

#include "backends/cuda/async.cuh"
#include "backends/cuda/sample.cuh"

// A cluster of eight blocks a row of logits: each keeps an eighth of the row in shared memory, so that the row is read once. Every row of a
// step is drawn at the same time, since a verify's rows are only reached by tokens that equal the drafts before them; sample_advance then
// walks through each run's draws. Sums are over integers, or in the order of blocks and threads. Nothing is sorted: the last token of top-k
// and of top-p stands in a bin of a histogram over logits, which is made finer until few tokens are left in the bin.

namespace quern::cuda {

namespace {

constexpr int kCluster = kSampleCluster, kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 2048, kOwnBins = kBins / kCluster;
constexpr int kListed = 512;       // tokens of a bin that are compared with one another
constexpr float kBinsPerNat = 64;  // of the first histogram, in logits or, at temperatures above 1, in logits over the temperature
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

struct Shared {
  Part parts[2][kCluster];  // by rank; used in turn
  Part totals[kCluster];    // of the histogram's bins, by the rank that owns them
  Place place;
  uint32_t counts[kBins];
  uint32_t weights[kPieces][kBins];
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
  int32_t number, draw;  // of the row's run, and of the row in it
  int32_t before[kMaxSampleDraws];
};
static_assert(sizeof(Shared) <= kSampleSharedBytes);

__device__ void meet() { cooperative_groups::this_cluster().sync(); }
template <class T>
__device__ T* at_rank(T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}

/// A block's eighth of a row. A thread has the same elements in every loop.
struct Slice {
  float* values;  // transformed; -infinity: not allowed
  int begin, groups;      // its first id, and how many times four of them
  int first_id, end_id;   // of the row

  template <class F>
  __device__ void each(F&& f) const {
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      const float4 four = reinterpret_cast<const float4*>(values)[group];
      f(four.x, begin + 4 * group);
      f(four.y, begin + 4 * group + 1);
      f(four.z, begin + 4 * group + 2);
      f(four.w, begin + 4 * group + 3);
    }
  }
  template <class F>
  __device__ void change(F&& f) const {
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      float4& four = reinterpret_cast<float4*>(values)[group];
      const float4 x = four;
      const int id = begin + 4 * group;
      four = make_float4(f(x.x, id), f(x.y, id + 1), f(x.z, id + 2), f(x.w, id + 3));
    }
  }
  /// Begins to copy; what stands behind the row's end is unknown.
  __device__ void fetch(const float* row) const {
    const bool aligned = (end_id - first_id) % 4 == 0;
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      const int id = begin + 4 * group;
      if (aligned) {
        if (id < end_id) copy_async(values + 4 * group, row + (id - first_id));
      } else {
        for (int i = 0; i < 4; ++i)
          if (id + i < end_id) values[4 * group + i] = row[id + i - first_id];
      }
    }
    commit_copies();
  }
};

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

/// The largest key of the block, in every thread; 0 where there is none.
__device__ uint64_t block_max(uint64_t key, Shared& s) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.keys[threadIdx.x / 32] = key;
  __syncthreads();
  key = s.keys[threadIdx.x % 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  return key;
}
__device__ double block_total(double x, Shared& s) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = s.sums[threadIdx.x % 32];
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}
__device__ uint64_t largest(const Part* parts) {
  uint64_t key = 0;
  for (int r = 0; r < kCluster; ++r) key = parts[r].key > key ? parts[r].key : key;
  return key;
}

/// How a histogram sorts tokens, the most likely ones to bin 0: by their distance to the best one, then the tokens of one bin by their
/// place in it, then, if they are still too many, by the digits of their keys.
struct Level {
  float best, per_logit;
  int depth = 0;
  int chosen[2] = {};
  uint64_t known = 0, prefix = 0;

  __device__ int shift() const { return depth == 7 ? 0 : 53 - 11 * (depth - 2); }
  /// -1: the histogram is not about this token.
  __device__ int bin(float x, int id) const {
    const float distance = __fmul_rn(__fsub_rn(best, x), per_logit);
    const int first = min(kBins - 1, __float2int_rz(distance));
    if (depth == 0) return first;
    if (first != chosen[0]) return -1;
    const int second = min(kBins - 1, __float2int_rz(__fmul_rn(__fsub_rn(distance, static_cast<float>(first)), static_cast<float>(kBins))));
    if (depth == 1) return second;
    if (second != chosen[1]) return -1;
    const uint64_t key = key_of(x, id);
    return (key & known) == prefix ? kBins - 1 - static_cast<int>(key >> shift() & (kBins - 1)) : -1;
  }
  __device__ void descend(int bin) {
    if (depth < 2) {
      chosen[depth] = bin;
    } else {
      prefix |= static_cast<uint64_t>(kBins - 1 - bin) << shift();
      known |= static_cast<uint64_t>(kBins - 1) << shift();
    }
    ++depth;
  }
};

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
};
/// The histogram of `first` has been filled; `refilled` says that it has been replaced.
__device__ __noinline__ Selected select(const Slice& slice, const Level& first, bool by_weight, uint64_t wanted, bool weighted,
                                        float temperature, Cluster& c, bool& refilled) {
  Shared& s = c.s;
  const int thread = static_cast<int>(threadIdx.x);
  Level level = first;
  uint64_t weight_before = 0;
  Place place;
  for (;;) {
    if (!locate(by_weight, wanted, c, place)) return {};
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
  if (thread < count) {
    const uint64_t mine = s.all[thread], own_weight = weighted ? s.all_weights[thread] : 0;
    uint64_t larger = 0, larger_weight = 0;
    for (int i = 0; i < count; ++i)
      if (s.all[i] > mine) {
        ++larger;
        if (weighted) larger_weight += s.all_weights[i];
      }
    if (by_weight ? larger_weight < wanted && larger_weight + own_weight >= wanted : larger + 1 == wanted) {
      s.answer = mine;
      s.answer_weight = weight_before + larger_weight + own_weight;
    }
  }
  __syncthreads();
  return {s.answer, s.answer_weight};
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
      if (id >= slice.begin && id < end && id % kThreads == thread) slice.values[id - slice.begin] += p.bias_values[i];
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
      const Selected last = select(slice, level, false, static_cast<uint64_t>(p.top_k), limits_p, p.temperature, c, refilled);
      lowest_key = last.key;
      if (last.key != 0) all = last.weight;
    }
    if (limits_p) {
      if (refilled) count_bins(slice, level, true, p.temperature, c);
      const Selected last = select(slice, level, true, wanted_weight(p.top_p, all), true, p.temperature, c, refilled);
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
  bool refilled = false;
  count_bins(slice, level, false, 1.0f, c);
  const uint64_t last = select(slice, level, false, static_cast<uint64_t>(wanted), false, 1.0f, c, refilled).key;
  meet();  // all have read the list
  const int count = list(slice, c, [&](float x, int id) { return key_of(x, id) >= last; });
  if (c.rank == 0 && thread < count) {
    int larger = 0;
    for (int i = 0; i < count; ++i) larger += s.all[i] > s.all[thread] ? 1 : 0;
    values[1 + larger] = logprob(logit_of(s.all[thread]));
    ids[1 + larger] = id_of(s.all[thread]);
  }
}

__device__ Slice slice_of(float* memory, int first_id, int end_id, int rank) {
  const int groups = ((end_id - first_id + kCluster - 1) / kCluster + 3) / 4;
  return {memory, first_id + rank * 4 * groups, groups, first_id, end_id};
}

/// Begins to fetch the cluster's row, and finds whose draw it is: s.number and s.draw. False: nobody's.
__device__ bool find_row(const SampleArgs& args, const Slice& slice, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.y);
  release_successor();
  if (thread == 0) s.number = -1;
  meet();  // from here on all blocks of the cluster are there
  await_predecessor();
  slice.fetch(args.logits + int64_t{row} * (slice.end_id - slice.first_id));
  for (int number = thread; number < args.num_runs; number += kThreads) {
    const SampleRecord run = args.runs[number];
    if (run.slot < 0 || run.first_logits_row < 0) continue;
    const int draw = row - run.first_logits_row;
    if (draw < 0 || draw >= draws_of(run).num_draws) continue;
    s.number = number;
    s.draw = draw;
  }
  __syncthreads();
  if (s.number >= 0) return true;
  await_copies<0>();
  return false;
}

}  // namespace

/// blockIdx: (rank in the cluster, row of logits). The token of each row, -1 where it failed, goes to args.drawn.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_draw(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  Cluster c{s, static_cast<int>(blockIdx.x) % kCluster};
  const Slice slice = slice_of(reinterpret_cast<float*>(memory + kSampleSharedBytes), args.first_id, args.end_id, c.rank);
  if (!find_row(args, slice, s)) return;
  const int number = s.number, draw = s.draw;
  const SampleRecord run = args.runs[number];
  const Draws draws = draws_of(run);
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  // Where drafts count as accepted whatever was drawn, a penalty needs to know what was: the first row's cluster takes all rows.
  const bool in_turn = draws.synthetic >= 0 && draws.num_draws > 1 && transforms_of(args, run, 0, nullptr, 0).penalties;
  if (in_turn && draw > 0) {
    await_copies<0>();
    return;
  }
  for (int now = draw; now <= (in_turn ? draws.num_draws - 1 : draw); ++now) {
    const float* raw = args.logits + (int64_t{run.first_logits_row} + now) * args.vocab_size;
    if (now > draw) slice.fetch(raw);
    const Transforms transforms = transforms_of(args, run, now, in_turn ? s.before : drafts, now);
    const int token = draw_token(slice, args, token_index(run, draws, args.cursor[run.slot], now), transforms, c);
    if (c.rank == 0 && thread == 0) args.drawn[run.first_logits_row + now] = token;
    if (token < 0) break;
    if (transforms.params->num_logprobs >= 0)
      write_logprobs(slice, args, raw, token, transforms.params->num_logprobs, int64_t{number} * (args.k_max + 1) + now, c);
    if (in_turn && thread == 0) s.before[now] = token;
    __syncthreads();
  }
  meet();  // nobody's memory is read any more
}

/// blockIdx: (rank in the cluster, row of logits). Candidates of a part of the vocabulary.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_candidates_sm90(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  Cluster c{s, static_cast<int>(blockIdx.x) % kCluster};
  const Slice slice = slice_of(reinterpret_cast<float*>(memory + kSampleSharedBytes), args.first_id, args.end_id, c.rank);
  if (!find_row(args, slice, s)) return;
  const SampleRecord run = args.runs[s.number];
  // The row is reached by the drafts before it alone.
  const Transforms transforms = transforms_of(args, run, s.draw, args.drafts + int64_t{run.slot} * args.drafts_stride, s.draw);
  const ops::SlotSampling& p = *transforms.params;
  const Prepared prepared = prepare(slice, args, transforms, c);
  const uint64_t first = prepared.finite ? prepared.first : 0;
  uint64_t* out = args.candidates + int64_t{blockIdx.y} * (1 + args.num_candidates);
  int count = first != 0 ? 1 : 0;
  uint64_t only = first;
  if (first != 0 && p.temperature >= kGreedyBelow) {
    if (limits_k(args, p)) {
      const Level level{logit_of(first), kBinsPerNat / fmaxf(1.0f, p.temperature)};
      bool refilled = false;
      count_bins(slice, level, false, p.temperature, c);
      const uint64_t lowest = select(slice, level, false, static_cast<uint64_t>(p.top_k), false, p.temperature, c, refilled).key;
      meet();  // all have read the list
      count = list(slice, c, [&](float x, int id) { return key_of(x, id) >= lowest; });
      only = 0;
    } else {
      only = gumbel_key(slice, p, token_index(run, draws_of(run), args.cursor[run.slot], s.draw), first, 0, -INFINITY, c);
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

/// A thread a run.
extern "C" __global__ void sample_advance(const __grid_constant__ SampleArgs args) {
  release_successor();
  await_predecessor();
  const int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (number >= args.num_runs) return;
  const SampleRecord run = args.runs[number];
  if (run.slot < 0) {
    args.sampled[number] = args.non_finite[number] = 0;
    return;
  }
  ops::SlotSampling& params = args.params[run.slot];
  const Draws draws = draws_of(run);
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  int num_tokens = 0;
  bool failed = false;
  for (int draw = 0; draw < draws.num_draws; ++draw) {
    const int token = args.drawn[run.first_logits_row + draw];
    failed = token < 0;
    if (failed) break;
    args.tokens[int64_t{number} * (args.k_max + 1) + num_tokens++] = token;
    if (is_stop(params, token) || (draw + 1 < draws.num_draws && (draws.synthetic >= 0 ? draw >= draws.synthetic : drafts[draw] != token)))
      break;
  }
  if (failed) num_tokens = 0;  // the request fails as a whole
  int32_t* counts = args.counts + int64_t{run.slot} * args.vocab_size;
  for (int i = 0; i < num_tokens; ++i) {
    const int token = args.tokens[int64_t{number} * (args.k_max + 1) + i];
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
  const Slice slice = slice_of(nullptr, 0, args.num_tokens, rank);
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
