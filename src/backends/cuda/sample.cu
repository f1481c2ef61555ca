#include "backends/cuda/numeric.cuh"
#include "backends/cuda/sample_args.h"
#include "ops/random.h"

// One block a run; its draws follow each other, since each sees the counts of those before. Every sum is over integers or in a fixed order. Nothing is sorted: the
// k-th token, and the last one of top-p, are found digit by digit of a key that orders tokens as (logit, lowest id).

namespace quern::cuda {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr float kGreedyBelow = 1e-5f;       // SamplingParams::greedy()
constexpr float kLogprobFloor = -9999.0f;   // JSON has no infinity
constexpr double kWeightUnit = 0x1p44;      // probabilities relative to the best token's are added as multiples of 2^-44

/// Larger keys are more likely tokens; of equal logits the lowest id has the largest.
__device__ uint64_t key_of(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{ordered} << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ int id_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }

struct Shared {
  uint64_t weights[256];  // of a digit
  uint32_t counts[256];
  uint64_t keys[kWarps];
  double sums[kWarps];
  uint64_t chosen;        // what one thread tells the others
  uint64_t rest;
  float saved[ops::kMaxLogitBias];
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
  for (int w = 0; w < kWarps; ++w) key = s.keys[w] > key ? s.keys[w] : key;
  return key;
}
__device__ double block_total(double x, Shared& s) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += s.sums[w];
  return sum;
}

/// The logits of one draw: penalties, mask and stop ids act when a logit is read, the bias was added in place.
struct Row {
  const float* logits;
  int num_tokens;
  const ops::SlotSampling* params;
  const int32_t* counts;
  const uint8_t* in_prompt;
  const uint32_t* mask;  // null: none
  bool penalties, too_early;

  /// -infinity: not allowed.
  __device__ float at(int id) const {
    float x = logits[id];
    if (penalties) {
      const int count = counts[id];
      if (count != 0 || in_prompt[id] != 0) {
        x = x > 0 ? __fdiv_rn(x, params->repetition_penalty) : __fmul_rn(x, params->repetition_penalty);
        if (count > 0) x = __fsub_rn(x, __fadd_rn(__fmul_rn(params->frequency_penalty, static_cast<float>(count)), params->presence_penalty));
      }
    }
    if (mask != nullptr && (mask[id / 32] >> (id % 32) & 1u) == 0) x = -INFINITY;
    if (too_early)
      for (int i = 0; i < params->num_stop_ids; ++i)
        if (params->stop_ids[i] == id) x = -INFINITY;
    return x;
  }
};

/// The smallest key of the `k` largest; 0 where no more than k tokens are allowed.
__device__ uint64_t kth_key(const Row& row, int64_t k, Shared& s) {
  uint64_t prefix = 0, known = 0;
  int64_t wanted = k;
  for (int shift = 56; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) s.counts[i] = 0;
    __syncthreads();
    for (int id = static_cast<int>(threadIdx.x); id < row.num_tokens; id += kThreads) {
      const float x = row.at(id);
      const uint64_t key = key_of(x, id);
      if (x != -INFINITY && (key & known) == prefix) atomicAdd(&s.counts[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t above = 0;
      int digit = 255;
      while (digit >= 0 && above + s.counts[digit] < wanted) above += s.counts[digit--];
      s.chosen = digit < 0 ? 256 : static_cast<uint64_t>(digit);
      s.rest = static_cast<uint64_t>(wanted - above);
    }
    __syncthreads();
    if (s.chosen == 256) return 0;
    prefix |= s.chosen << shift;
    known |= uint64_t{255} << shift;
    wanted = static_cast<int64_t>(s.rest);
    if (s.counts[s.chosen] == s.rest) break;  // the whole digit belongs to them
  }
  return prefix;
}

/// Probability relative to the best token's, in units of 2^-44.
__device__ uint64_t weight_of(float x, float best, float temperature) { return static_cast<uint64_t>(static_cast<double>(expf((x - best) / temperature)) * kWeightUnit); }

/// The smallest key of the shortest prefix, most likely first, of the keys from `lowest` on that holds top_p of their probability.
__device__ uint64_t top_p_key(const Row& row, uint64_t lowest, float best, Shared& s) {
  uint64_t prefix = 0, known = 0, wanted = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) {
      s.weights[i] = 0;
      s.counts[i] = 0;
    }
    __syncthreads();
    for (int id = static_cast<int>(threadIdx.x); id < row.num_tokens; id += kThreads) {
      const float x = row.at(id);
      const uint64_t key = key_of(x, id);
      if (x == -INFINITY || key < lowest || (key & known) != prefix) continue;
      const int digit = static_cast<int>(key >> shift & 255);
      atomicAdd(reinterpret_cast<unsigned long long*>(&s.weights[digit]), static_cast<unsigned long long>(weight_of(x, best, row.params->temperature)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (shift == 56) {
        uint64_t all = 0;
        for (int i = 0; i < 256; ++i) all += s.weights[i];
        const double part = ceil(static_cast<double>(row.params->top_p) * static_cast<double>(all));
        wanted = part < 1 ? 1 : static_cast<uint64_t>(part);
      }
      uint64_t above = 0;
      int digit = 255;
      while (digit > 0 && above + s.weights[digit] < wanted) above += s.weights[digit--];
      s.chosen = static_cast<uint64_t>(digit);
      s.rest = wanted - above;
    }
    __syncthreads();
    prefix |= s.chosen << shift;
    known |= uint64_t{255} << shift;
    wanted = s.rest;
  }
  return prefix;
}

/// The token drawn, in every thread; -1: none is allowed.
__device__ int draw_token(const Row& row, int64_t index, Shared& s) {
  const ops::SlotSampling& p = *row.params;
  uint64_t mine = 0;
  for (int id = static_cast<int>(threadIdx.x); id < row.num_tokens; id += kThreads) {
    const float x = row.at(id);
    const uint64_t key = key_of(x, id);
    if (x != -INFINITY && key > mine) mine = key;
  }
  const uint64_t first = block_max(mine, s);
  if (first == 0) return -1;
  if (p.temperature < kGreedyBelow) return id_of(first);

  const float best = row.at(id_of(first));
  uint64_t lowest_key = 0;
  if (p.top_k > 0 && p.top_k < row.num_tokens) lowest_key = kth_key(row, p.top_k, s);
  if (p.top_p < 1.0f) lowest_key = top_p_key(row, lowest_key, best, s);
  const float lowest = p.min_p > 0.0f ? __fadd_rn(best, __fmul_rn(p.temperature, static_cast<float>(log(static_cast<double>(p.min_p))))) : -INFINITY;

  const uint64_t key = ops::draw_key(p.seed, index);
  uint64_t mine_drawn = 0;
  float mine_best = -INFINITY;
  for (int id = static_cast<int>(threadIdx.x); id < row.num_tokens; id += kThreads) {
    const float x = row.at(id);
    if (x == -INFINITY || x < lowest || key_of(x, id) < lowest_key) continue;
    const float scaled = __fdiv_rn(x, p.temperature);
    const double u = ops::uniform(key, id);
    // The variate is at most -log(1 - u), and e^x <= (1 - x / 8)^-8 for x < 0: most tokens lose without a logarithm.
    const double ahead = static_cast<double>(mine_best) - static_cast<double>(scaled);
    if (ahead > 0) {
      double bound = 1.0 + ahead / 8;
      bound *= bound;
      bound *= bound;
      if ((1.0 - u) * bound * bound > 1.001) continue;
    }
    const float score = __fadd_rn(scaled, static_cast<float>(-log(-log(u))));
    mine_best = fmaxf(mine_best, score);
    const uint64_t scored = key_of(score, id);
    mine_drawn = scored > mine_drawn ? scored : mine_drawn;
  }
  const uint64_t drawn = block_max(mine_drawn, s);
  return drawn == 0 ? -1 : id_of(drawn);
}

/// Log-probabilities of the whole raw row: the chosen token's, then the most likely ones'.
__device__ void write_logprobs(const SampleArgs& args, const float* raw, int token, int num_top, int64_t entry, Shared& s) {
  const int n = args.vocab_size, thread = static_cast<int>(threadIdx.x);
  uint64_t mine = 0;
  for (int id = thread; id < n; id += kThreads) {
    const uint64_t key = key_of(raw[id], id);
    mine = key > mine ? key : mine;
  }
  uint64_t top = block_max(mine, s);
  const float best = raw[id_of(top)], chosen = raw[token];
  double weights = 0, before = 0;
  for (int id = thread; id < n; id += kThreads) {
    weights += static_cast<double>(expf(raw[id] - best));
    before += raw[id] > chosen || (raw[id] == chosen && id < token) ? 1.0 : 0.0;
  }
  const double log_sum = static_cast<double>(best) + log(block_total(weights, s));
  const double rank = 1.0 + block_total(before, s);
  const auto logprob = [&](float logit) { return fmaxf(static_cast<float>(static_cast<double>(logit) - log_sum), kLogprobFloor); };
  constexpr int kWidth = 1 + ops::kMaxLogprobs;
  float* values = args.logprobs + entry * kWidth;
  int32_t* ids = args.logprob_ids + entry * kWidth;
  if (thread == 0) {
    args.chosen_rank[entry] = static_cast<int32_t>(rank);
    values[0] = logprob(chosen);
    ids[0] = token;
  }
  const int count = num_top < ops::kMaxLogprobs ? num_top : ops::kMaxLogprobs;
  for (int i = 0; i < count && i < n; ++i) {
    if (thread == 0) {
      values[1 + i] = logprob(raw[id_of(top)]);
      ids[1 + i] = id_of(top);
    }
    mine = 0;
    for (int id = thread; id < n; id += kThreads) {  // the next smaller key
      const uint64_t key = key_of(raw[id], id);
      if (key < top && key > mine) mine = key;
    }
    top = block_max(mine, s);
  }
}

__device__ bool is_stop(const ops::SlotSampling& params, int token) {
  for (int i = 0; i < params.num_stop_ids; ++i)
    if (params.stop_ids[i] == token) return true;
  return false;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) sample(const __grid_constant__ SampleArgs args) {
  __shared__ Shared s;
  const int64_t number = blockIdx.x, vocab = args.vocab_size, per_run = args.k_max + 1;
  const int thread = static_cast<int>(threadIdx.x);
  const SampleRecord run = args.runs[number];
  if (run.slot < 0) {
    if (thread == 0) args.sampled[number] = args.non_finite[number] = 0;
    return;
  }
  ops::SlotSampling& params = args.params[run.slot];
  int32_t* counts = args.counts + run.slot * vocab;
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  const int32_t cursor = args.cursor[run.slot];
  const bool verify = run.first_logits_row >= 0 && run.verify != 0;
  const int num_draws = run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1;
  const int synthetic = run.verify - 2;  // ops::kSyntheticAcceptance: drafts that count as accepted; below 0: those that agree

  int num_tokens = 0;
  bool failed = false;
  for (int draw = 0; draw < num_draws; ++draw) {
    float* raw = args.logits + (run.first_logits_row + draw) * vocab;
    bool finite = true;
    for (int id = thread; id < vocab; id += kThreads) finite = finite && (__float_as_uint(raw[id]) & 0x7fffffffu) < 0x7f800000u;
    finite = __syncthreads_and(finite) != 0;
    int token = -1;
    if (finite) {
      if (thread == 0)
        for (int i = 0; i < params.num_logit_bias; ++i)
          if (params.bias_ids[i] >= 0 && params.bias_ids[i] < args.num_tokens) {
            s.saved[i] = raw[params.bias_ids[i]];
            raw[params.bias_ids[i]] = s.saved[i] + params.bias_values[i];
          }
      __syncthreads();
      Row row;
      row.logits = raw;
      row.num_tokens = args.num_tokens;
      row.params = &params;
      row.counts = counts;
      row.in_prompt = args.in_prompt + run.slot * vocab;
      row.mask = run.first_mask_row < 0 ? nullptr : args.masks + (run.first_mask_row + draw) * ((vocab + 31) / 32);
      row.penalties = params.presence_penalty != 0 || params.frequency_penalty != 0 || params.repetition_penalty != 1;
      row.too_early = params.num_generated < params.min_tokens && params.num_stop_ids > 0;
      token = draw_token(row, int64_t{cursor} + (verify ? draw + 1 : run.num_rows), s);
      __syncthreads();
      if (thread == 0)
        for (int i = params.num_logit_bias - 1; i >= 0; --i)  // backwards: an id may be named twice
          if (params.bias_ids[i] >= 0 && params.bias_ids[i] < args.num_tokens) raw[params.bias_ids[i]] = s.saved[i];
      __syncthreads();
    }
    if (token < 0) {
      failed = true;
      break;
    }
    if (params.num_logprobs >= 0) write_logprobs(args, raw, token, params.num_logprobs, number * per_run + draw, s);
    const bool ends = is_stop(params, token) || (draw + 1 < num_draws && (synthetic >= 0 ? draw >= synthetic : drafts[draw] != token));
    __syncthreads();
    if (thread == 0) {
      args.tokens[number * per_run + num_tokens] = token;
      ++counts[token];
      ++params.num_generated;
    }
    __syncthreads();
    ++num_tokens;
    if (ends) break;
  }
  if (thread != 0) return;
  if (failed) {  // what was drawn before the bad row is taken back: the request fails as a whole
    for (int i = 0; i < num_tokens; ++i) --counts[args.tokens[number * per_run + i]];
    params.num_generated -= num_tokens;
    num_tokens = 0;
  }
  args.sampled[number] = num_tokens;
  args.non_finite[number] = failed ? 1 : 0;
  if (num_tokens > 0) args.last_token[run.slot] = args.tokens[number * per_run + num_tokens - 1];
  constexpr int kBoundary = 64;  // ops::kGrid
  const int32_t after = cursor + (verify ? num_tokens : run.num_rows);
  args.boundary[run.slot] = (verify ? cursor : after) / kBoundary * kBoundary;  // where gdn_mix has left the state
  args.cursor[run.slot] = after;
}

/// A block a row.
extern "C" __global__ void __launch_bounds__(kThreads) argmax(const __grid_constant__ ArgmaxArgs args) {
  __shared__ Shared s;
  const float* row = args.logits + int64_t{blockIdx.x} * args.vocab_size;
  uint64_t mine = 0;
  for (int id = static_cast<int>(threadIdx.x); id < args.num_tokens; id += kThreads) {
    const uint64_t key = key_of(row[id], id);
    mine = key > mine ? key : mine;
  }
  const uint64_t first = block_max(mine, s);
  if (threadIdx.x == 0) args.ids[blockIdx.x] = id_of(first);
}

}  // namespace quern::cuda
