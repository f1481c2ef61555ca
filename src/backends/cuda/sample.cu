#include "backends/cuda/sample.cuh"

// One block a run; its draws follow each other, since each sees the counts of those before. Every sum is over integers or in a fixed order. Nothing is sorted: the
// k-th token, and the last one of top-p, are found digit by digit of a key that orders tokens as (logit, lowest id).

namespace quern::cuda {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
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

/// The logits of one draw. The bias was added in place; the rest acts when a logit is read.
struct Row {
  const float* logits;
  int num_tokens;
  Transforms transforms;
  __device__ float at(int id) const { return transforms.apply(logits[id], id); }
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
      atomicAdd(reinterpret_cast<unsigned long long*>(&s.weights[digit]),
                static_cast<unsigned long long>(weight_of(x, best, row.transforms.params->temperature)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (shift == 56) {
        uint64_t all = 0;
        for (int i = 0; i < 256; ++i) all += s.weights[i];
        wanted = wanted_weight(row.transforms.params->top_p, all);
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
  const ops::SlotSampling& p = *row.transforms.params;
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
  const float lowest = lowest_logit(p, best);

  GumbelDraw draw{ops::draw_key(p.seed, index), p.temperature};
  for (int id = static_cast<int>(threadIdx.x); id < row.num_tokens; id += kThreads) {
    const float x = row.at(id);
    if (x != -INFINITY && x >= lowest && key_of(x, id) >= lowest_key) draw.offer(x, id);
  }
  const uint64_t drawn = block_max(draw.drawn, s);
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
  const Draws draws = draws_of(run);

  int num_tokens = 0;
  bool failed = false;
  for (int draw = 0; draw < draws.num_draws; ++draw) {
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
      const Row row{raw, args.num_tokens, transforms_of(args, run, draw, nullptr, 0)};
      token = draw_token(row, token_index(run, draws, cursor, draw), s);
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
    const bool ends =
        is_stop(params, token) || (draw + 1 < draws.num_draws && (draws.synthetic >= 0 ? draw >= draws.synthetic : drafts[draw] != token));
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
  advance_cursor(args, run, draws, num_tokens);
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
