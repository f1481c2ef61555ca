#include "backends/cuda/async.cuh"
#include "backends/cuda/sample_block.cuh"

// A block a row of logits, for GPUs whose blocks cannot share one (sample_sm90.cu). A block reads its row from the L2 cache as often as it needs to. Every row of a step is drawn at the same time, since
// a verify's rows are only reached by tokens that equal the drafts before them; sample_rows_advance then walks through each run's draws. Sums are over integers, or in the order of threads. Nothing is
// sorted: the last token of top-k and of top-p stands in a bin of a histogram over logits, which is made finer until few tokens are left in the bin.

namespace quern::cuda {

namespace {

constexpr int kThreads = kSampleThreads, kWarps = kThreads / 32;
constexpr int kBinsEach = kBins / kThreads;
constexpr int kListed = 512;       // tokens of a bin that are compared with one another
constexpr float kBinsPerNat = 64;  // of the first histogram, in logits or, at temperatures above 1, in logits over the temperature
constexpr int kPieceBits = 12, kPieces = 4;  // of a weight, which has 45 bits; a block adds up to 2^20 of them
static_assert(kMaxSampleRowTokens <= 1 << (32 - kPieceBits));

/// A bin, and what stands before it.
struct Place {
  uint64_t weight_before;
  uint32_t count_before, count;
  int bin;
};

/// A row of logits, of ids [first_id, end_id). A thread has the same elements in every loop.
struct Row {
  const float* logits;
  int first_id, end_id, last;  // last: the first id that has no text, or end_id
  bool transformed;
  Transforms transforms;         // where it is transformed

  /// f(logit as it stands, id), for ids without text too.
  template <class F>
  __device__ void each_raw(F&& f) const {
    const int width = end_id - first_id, groups = (width + 3) / 4;
    const bool aligned = width % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const auto read = [&](int group) {
      if (group >= groups) return make_float4(0, 0, 0, 0);
      if (aligned) return reinterpret_cast<const float4*>(logits)[group];
      const auto at = [&](int i) { return i < width ? logits[i] : 0.0f; };
      return make_float4(at(4 * group), at(4 * group + 1), at(4 * group + 2), at(4 * group + 3));
    };
    constexpr int kAhead = 2;  // reads of a thread that are under way
    float4 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = read(static_cast<int>(threadIdx.x) + i * kThreads);
#pragma unroll 1
    for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
      const float4 four = ahead[0];
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = read(group + kAhead * kThreads);
      const int id = first_id + 4 * group;
      const float x[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (id + i < end_id) f(x[i], id + i);
    }
  }
  __device__ float seen(float x, int id) const { return transformed ? transforms.apply(x, id) : x; }
  /// f(logit, id) of the tokens that may be drawn.
  template <class F>
  __device__ void each(F&& f) const {
    each_raw([&](float x, int id) {
      if (id >= last) return;
      x = seen(x, id);
      if (x != -INFINITY) f(x, id);
    });
  }
};

struct Shared {
  Row row;  // that the block looks at
  uint32_t counts[kBins];  // of tokens, at last up to and with the bin
  union {
    uint32_t pieces[kPieces][kBins];  // of weights
    uint64_t weights[kBins];          // up to and with the bin
  };
  uint64_t listed[kListed], listed_weights[kListed];
  uint64_t keys[kWarps];
  double sums[kWarps];
  uint32_t warp_counts[kWarps];
  Place place;
  uint64_t answer, answer_weight;
  uint32_t num_listed;
  int32_t depth;         // of the histogram
  int32_t number, draw;  // of the row's run, and of the row in it
  int32_t before[kMaxSampleDraws];
  float unbiased[ops::kMaxLogitBias];
};
static_assert(sizeof(Shared) <= kSampleRowsSharedBytes);

/// Fills the histogram of the row.
__device__ __noinline__ void count_bins(Level level, bool weighted, float temperature, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  __syncthreads();
  for (int i = thread; i < kBins; i += kThreads) {
    s.counts[i] = 0;
    for (auto& piece : s.pieces) piece[i] = 0;
  }
  __syncthreads();
  s.row.each([&](float x, int id) {
    const int bin = level.bin(x, id);
    if (bin < 0) return;
    atomicAdd(&s.counts[bin], 1u);
    if (!weighted) return;
    const uint64_t weight = weight_of(x, level.best, temperature);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (const auto part = static_cast<uint32_t>(weight >> (piece * kPieceBits) & ((1u << kPieceBits) - 1)); part != 0) atomicAdd(&s.pieces[piece][bin], part);
  });
  __syncthreads();
  // Added up over bins: those of a thread, of a warp, of the warps before it.
  uint32_t counts[kBinsEach], count = 0;
  uint64_t weights[kBinsEach], weight = 0;
#pragma unroll
  for (int i = 0; i < kBinsEach; ++i) {
    const int bin = thread * kBinsEach + i;
    count += s.counts[bin];
    for (int piece = 0; piece < kPieces; ++piece) weight += uint64_t{s.pieces[piece][bin]} << (piece * kPieceBits);
    counts[i] = count;
    weights[i] = weight;
  }
  const uint32_t own_count = count;
  const uint64_t own_weight = weight;
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
  uint32_t count_before = count - own_count;
  uint64_t weight_before = weight - own_weight;
  for (int w = 0; w < warp; ++w) {
    count_before += s.warp_counts[w];
    weight_before += s.keys[w];
  }
#pragma unroll
  for (int i = 0; i < kBinsEach; ++i) {
    s.counts[thread * kBinsEach + i] = count_before + counts[i];
    s.weights[thread * kBinsEach + i] = weight_before + weights[i];
  }
  if (thread == 0) s.depth = level.depth;
  __syncthreads();
}

/// The bin in which the count, or the weight, of all bins up to and with it reaches `wanted` (from 1 on). False: there is none.
__device__ bool locate(bool by_weight, uint64_t wanted, Shared& s, Place& place) {
  if ((by_weight ? s.weights[kBins - 1] : s.counts[kBins - 1]) < wanted) return false;
  __syncthreads();
  for (int i = 0; i < kBinsEach; ++i) {
    const int bin = static_cast<int>(threadIdx.x) * kBinsEach + i;
    const uint32_t count_before = bin > 0 ? s.counts[bin - 1] : 0;
    const uint64_t weight_before = bin > 0 ? s.weights[bin - 1] : 0;
    if ((by_weight ? weight_before : count_before) < wanted && (by_weight ? s.weights[bin] : s.counts[bin]) >= wanted)
      s.place = {weight_before, count_before, s.counts[bin] - count_before, bin};
  }
  __syncthreads();
  place = s.place;
  return true;
}

/// The tokens that `chosen` names, at most kListed, in s.listed. Returns how many they are.
template <class F>
__device__ int list(Shared& s, F&& chosen) {
  __syncthreads();
  if (threadIdx.x == 0) s.num_listed = 0;
  __syncthreads();
  s.row.each([&](float x, int id) {
    if (chosen(x, id)) s.listed[atomicAdd(&s.num_listed, 1u)] = key_of(x, id);
  });
  __syncthreads();
  return static_cast<int>(s.num_listed);
}

/// Of the tokens in the order of their keys, the one at which count or weight reaches `wanted`.
struct Selected {
  uint64_t key = 0;     // 0: all of them do not reach it
  uint64_t weight = 0;  // of all tokens up to and with it
};
/// The histogram of `level` has been filled; it is replaced where its bins are too full.
__device__ __noinline__ Selected select(Level level, bool by_weight, uint64_t wanted, bool weighted, float temperature, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t weight_before = 0;
  Place place;
  for (;;) {
    if (!locate(by_weight, wanted, s, place)) return {};
    weight_before += place.weight_before;
    wanted -= by_weight ? place.weight_before : place.count_before;
    if (place.count <= kListed) break;
    level.descend(place.bin);
    count_bins(level, weighted, temperature, s);
  }
  const int count = list(s, [&](float x, int id) { return level.bin(x, id) == place.bin; });
  if (weighted && thread < count) s.listed_weights[thread] = weight_of(logit_of(s.listed[thread]), level.best, temperature);
  __syncthreads();
  answer_among(s.listed, s.listed_weights, count, by_weight, wanted, weighted, weight_before, s);
  __syncthreads();
  return {s.answer, s.answer_weight};
}

/// Adds the bias to a row's logits while it lives.
struct Bias {
  float* logits;
  const ops::SlotSampling& p;
  int first_id, last;
  Shared& s;
  __device__ Bias(float* logits, const ops::SlotSampling& p, int first_id, int last, Shared& s) : logits(logits), p(p), first_id(first_id), last(last), s(s) {
    if (p.num_logit_bias <= 0) return;
    each(0, 1, [&](int i, float& x) {
      s.unbiased[i] = x;
      x += p.bias_values[i];
    });
    __syncthreads();
  }
  __device__ void remove() const {
    if (p.num_logit_bias <= 0) return;
    __syncthreads();
    each(p.num_logit_bias - 1, -1, [&](int i, float& x) { x = s.unbiased[i]; });  // backwards: an id may be named twice
    __syncthreads();
  }
  /// One thread an id.
  template <class F>
  __device__ void each(int from, int step, F&& f) const {
    for (int i = from; i >= 0 && i < p.num_logit_bias; i += step)
      if (const int id = p.bias_ids[i]; id >= first_id && id < last && id % kThreads == static_cast<int>(threadIdx.x)) f(i, logits[id - first_id]);
  }
};

/// Begins to look at a row.
__device__ void turn_to(const Row& row, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.row = row;
  __syncthreads();
}

__device__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }
/// Whether all logits are finite.
__device__ __noinline__ bool is_finite(Shared& s) {
  bool finite = true;
  s.row.each_raw([&](float x, int) { finite = finite && is_finite(x); });
  return __syncthreads_and(finite) != 0;
}
/// The best token, in every thread; 0: none is allowed. Where it `checks`, also if a logit is not finite.
__device__ __noinline__ uint64_t first_key(bool checks, Shared& s) {
  bool finite = true;
  uint64_t mine = 0;
  s.row.each_raw([&](float x, int id) {
    finite = finite && is_finite(x);
    if (id >= s.row.last) return;
    x = s.row.seen(x, id);
    const uint64_t key = key_of(x, id);
    if (x != -INFINITY && key > mine) mine = key;
  });
  finite = __syncthreads_and(finite || !checks) != 0;
  const uint64_t first = block_max(mine, s);
  return finite ? first : 0;
}

/// The best score and its token of those with the key `lowest_key`, and the logit `lowest`, or better; `first` is one of them.
__device__ __noinline__ uint64_t gumbel_key(const ops::SlotSampling& p, int64_t index, uint64_t first, uint64_t lowest_key, float lowest, Shared& s) {
  GumbelDraw draw{ops::draw_key(p.seed, index), p.temperature};
  draw.offer(logit_of(first), id_of(first));  // most others have no chance against it
  s.row.each([&](float x, int id) {
    if (x >= lowest && key_of(x, id) >= lowest_key) draw.offer(x, id);
  });
  return block_max(draw.drawn, s);
}

/// Of the `k` best tokens, all of which are listed: the token drawn, in every thread.
__device__ __noinline__ int draw_listed(int num_listed, int k, const ops::SlotSampling& p, int64_t index, float best, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const uint64_t mine = thread < num_listed ? s.listed[thread] : 0;
  int larger = 0;
  for (int i = 0; i < num_listed; ++i) larger += s.listed[i] > mine ? 1 : 0;
  __syncthreads();
  if (thread < num_listed) s.listed[larger] = mine;
  int kept = min(k, num_listed);
  __syncthreads();
  if (p.top_p < 1.0f) {
    if (thread < kept) s.listed_weights[thread] = weight_of(logit_of(s.listed[thread]), best, p.temperature);
    __syncthreads();
    if (thread == 0) {
      uint64_t all = 0, held = 0;
      for (int i = 0; i < kept; ++i) all += s.listed_weights[i];
      const uint64_t wanted = wanted_weight(p.top_p, all);
      uint32_t enough = 0;
      while (static_cast<int>(enough) < kept && held < wanted) held += s.listed_weights[enough++];
      s.num_listed = enough;
    }
    __syncthreads();
    kept = static_cast<int>(s.num_listed);
  }
  GumbelDraw draw{ops::draw_key(p.seed, index), p.temperature};
  if (thread < kept)
    if (const float x = logit_of(s.listed[thread]); x >= lowest_logit(p, best)) draw.offer(x, id_of(s.listed[thread]));
  return id_of(block_max(draw.drawn, s));
}

/// The token drawn, in every thread; -1: a logit is not finite, or no token is allowed.
__device__ int draw_token(const SampleArgs& args, const ops::SlotSampling& p, int64_t index, Shared& s) {
  const uint64_t first = first_key(p.num_logit_bias <= 0, s);
  if (first == 0) return -1;
  if (p.temperature < kGreedyBelow) return id_of(first);

  const float best = logit_of(first);
  uint64_t lowest_key = 0;
  const bool limited_k = limits_k(args, p), limits_p = p.top_p < 1.0f;
  if (limited_k || limits_p) {
    const Level level{best, kBinsPerNat / fmaxf(1.0f, p.temperature)};
    if (limited_k && p.top_k <= kListed) {
      count_bins(level, false, p.temperature, s);
      Place place;
      const int last_bin = locate(false, static_cast<uint64_t>(p.top_k), s, place) ? place.bin : kBins - 1;
      if (s.counts[last_bin] <= kListed) return draw_listed(list(s, [&](float x, int id) { return level.bin(x, id) <= last_bin; }), p.top_k, p, index, best, s);
    }
    count_bins(level, limits_p, p.temperature, s);
    uint64_t all = s.weights[kBins - 1];
    if (limited_k) {
      const Selected last = select(level, false, static_cast<uint64_t>(p.top_k), limits_p, p.temperature, s);
      lowest_key = last.key;
      if (last.key != 0) all = last.weight;
    }
    if (limits_p) {
      if (s.depth != level.depth) count_bins(level, true, p.temperature, s);  // a finer one has taken its place
      const Selected last = select(level, true, wanted_weight(p.top_p, all), true, p.temperature, s);
      lowest_key = last.key > lowest_key ? last.key : lowest_key;
    }
  }
  return id_of(gumbel_key(p, index, first, lowest_key, lowest_logit(p, best), s));
}

/// Log-probabilities of the whole raw row: the chosen token's, then the most likely ones'.
__device__ __noinline__ void write_logprobs(const SampleArgs& args, const float* raw, int token, int num_top, int64_t entry, Shared& s) {
  turn_to({raw, 0, args.vocab_size, args.vocab_size, false, {}}, s);
  const int thread = static_cast<int>(threadIdx.x);
  const float best = logit_of(first_key(false, s)), chosen = raw[token];
  double weights = 0;
  uint32_t before = 0;
  s.row.each([&](float x, int id) {
    weights += static_cast<double>(expf(x - best));
    before += x > chosen || (x == chosen && id < token) ? 1 : 0;
  });
  const double log_sum = static_cast<double>(best) + log(block_total(weights, s));
  const auto rank = static_cast<int32_t>(block_total(before, s));
  const auto logprob = [&](float logit) { return fmaxf(static_cast<float>(static_cast<double>(logit) - log_sum), kLogprobFloor); };
  constexpr int kWidth = 1 + ops::kMaxLogprobs;
  float* values = args.logprobs + entry * kWidth;
  int32_t* ids = args.logprob_ids + entry * kWidth;
  if (thread == 0) {
    args.chosen_rank[entry] = 1 + rank;
    values[0] = logprob(chosen);
    ids[0] = token;
  }
  const int wanted = min(min(num_top, ops::kMaxLogprobs), args.vocab_size);
  if (wanted <= 0) return;
  const Level level{best, kBinsPerNat};
  count_bins(level, false, 1.0f, s);
  const uint64_t last = select(level, false, static_cast<uint64_t>(wanted), false, 1.0f, s).key;
  const int count = list(s, [&](float x, int id) { return key_of(x, id) >= last; });
  if (thread < count) {
    int larger = 0;
    for (int i = 0; i < count; ++i) larger += s.listed[i] > s.listed[thread] ? 1 : 0;
    values[1 + larger] = logprob(logit_of(s.listed[thread]));
    ids[1 + larger] = id_of(s.listed[thread]);
  }
}

/// Finds whose draw the block's row is: s.number and s.draw. False: nobody's.
__device__ bool find_row(const SampleArgs& args, Shared& s) {
  const int row = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) s.number = -1;
  __syncthreads();
  for (int number = static_cast<int>(threadIdx.x); number < args.num_runs; number += kThreads) {
    const SampleRecord run = args.runs[number];
    if (run.slot < 0 || run.first_logits_row < 0) continue;
    const int draw = row - run.first_logits_row;
    if (draw < 0 || draw >= draws_of(run).num_draws) continue;
    s.number = number;
    s.draw = draw;
  }
  __syncthreads();
  return s.number >= 0;
}

}  // namespace

/// blockIdx: row of logits. The token of each, -1 where it failed, goes to args.drawn.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_rows_draw(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (!find_row(args, s)) return;
  const int number = s.number, draw = s.draw;
  const SampleRecord run = args.runs[number];
  const Draws draws = draws_of(run);
  const ops::SlotSampling& p = args.params[run.slot];
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  // Where drafts count as accepted whatever was drawn, a penalty needs to know what was: the first row's block takes all rows.
  const bool in_turn = draws.synthetic >= 0 && draws.num_draws > 1 && transforms_of(args, run, 0, nullptr, 0).penalties;
  if (in_turn && draw > 0) return;
  for (int now = draw; now <= (in_turn ? draws.num_draws - 1 : draw); ++now) {
    float* raw = args.logits + (int64_t{run.first_logits_row} + now) * args.vocab_size;
    const Transforms transforms = transforms_of(args, run, now, in_turn ? s.before : drafts, now);
    turn_to({raw, 0, args.vocab_size, args.num_tokens, transforms.any(), transforms}, s);
    int token = -1;
    if (p.num_logit_bias <= 0 || is_finite(s)) {
      const Bias bias(raw, p, 0, args.num_tokens, s);
      token = draw_token(args, p, token_index(run, draws, args.cursor[run.slot], now), s);
      bias.remove();
    }
    if (threadIdx.x == 0) args.drawn[run.first_logits_row + now] = token;
    if (token < 0) break;
    if (p.num_logprobs >= 0) write_logprobs(args, raw, token, p.num_logprobs, int64_t{number} * (args.k_max + 1) + now, s);
    if (in_turn && threadIdx.x == 0) s.before[now] = token;
    __syncthreads();
  }
}

/// blockIdx: row of logits. Candidates of a part of the vocabulary.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_rows_candidates(const __grid_constant__ SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (!find_row(args, s)) return;
  const int thread = static_cast<int>(threadIdx.x), last = max(args.first_id, min(args.num_tokens, args.end_id));
  const SampleRecord run = args.runs[s.number];
  const ops::SlotSampling& p = args.params[run.slot];
  float* raw = args.logits + int64_t{blockIdx.x} * (args.end_id - args.first_id);
  // The row is reached by the drafts before it alone.
  const Transforms transforms = transforms_of(args, run, s.draw, args.drafts + int64_t{run.slot} * args.drafts_stride, s.draw);
  turn_to({raw, args.first_id, args.end_id, last, transforms.any(), transforms}, s);
  const bool finite = is_finite(s);
  const Bias bias(raw, p, args.first_id, last, s);
  const uint64_t first = finite ? first_key(false, s) : 0;
  uint64_t* out = args.candidates + int64_t{blockIdx.x} * (1 + args.num_candidates);
  int count = first != 0 ? 1 : 0;
  uint64_t only = first;
  if (first != 0 && p.temperature >= kGreedyBelow) {
    if (limits_k(args, p)) {
      const Level level{logit_of(first), kBinsPerNat / fmaxf(1.0f, p.temperature)};
      count_bins(level, false, p.temperature, s);
      const uint64_t lowest = select(level, false, static_cast<uint64_t>(p.top_k), false, p.temperature, s).key;
      count = list(s, [&](float x, int id) { return key_of(x, id) >= lowest; });
      only = 0;
    } else {
      only = gumbel_key(p, token_index(run, draws_of(run), args.cursor[run.slot], s.draw), first, 0, -INFINITY, s);
    }
  }
  bias.remove();
  if (thread == 0) out[0] = finite ? 1 : 0;
  if (thread >= count && thread < args.num_candidates) out[1 + thread] = 0;
  if (thread < count) {
    const uint64_t key = only != 0 ? only : s.listed[thread];
    int larger = 0;
    for (int i = 0; i < count && only == 0; ++i) larger += s.listed[i] > key ? 1 : 0;
    out[1 + larger] = key;
  }
}

/// A thread a run.
extern "C" __global__ void sample_rows_advance(const __grid_constant__ SampleArgs args) {
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
    if (is_stop(params, token) || (draw + 1 < draws.num_draws && (draws.synthetic >= 0 ? draw >= draws.synthetic : drafts[draw] != token))) break;
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

/// blockIdx: row.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_rows_argmax(const __grid_constant__ ArgmaxArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Row row{args.logits + int64_t{blockIdx.x} * args.width, args.first_id, args.first_id + args.width, args.first_id + args.num_tokens, false, {}};
  uint64_t mine = 0;
  row.each_raw([&](float x, int id) {
    if (const uint64_t key = key_of(x, id); id < row.last && key > mine) mine = key;
  });
  const uint64_t best = block_max(mine, s);
  if (threadIdx.x == 0) give_best(args, blockIdx.x, best);
}

}  // namespace quern::cuda
