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
  const float* logits;  // of ids [begin, end)
  int begin, end;
  Transforms transforms;
  __device__ float at(int id) const { return transforms.apply(logits[id - begin], id); }
};

/// The smallest key of the `k` largest; 0 where no more than k tokens are allowed.
__device__ uint64_t kth_key(const Row& row, int64_t k, Shared& s) {
  uint64_t prefix = 0, known = 0;
  int64_t wanted = k;
  for (int shift = 56; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) s.counts[i] = 0;
    __syncthreads();
    for (int id = row.begin + static_cast<int>(threadIdx.x); id < row.end; id += kThreads) {
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
    for (int id = row.begin + static_cast<int>(threadIdx.x); id < row.end; id += kThreads) {
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

/// The best token, in every thread; 0: none is allowed.
__device__ uint64_t first_key(const Row& row, Shared& s) {
  uint64_t mine = 0;
  for (int id = row.begin + static_cast<int>(threadIdx.x); id < row.end; id += kThreads) {
    const float x = row.at(id);
    const uint64_t key = key_of(x, id);
    if (x != -INFINITY && key > mine) mine = key;
  }
  return block_max(mine, s);
}

/// The best score and its token of those with the key `lowest_key`, and the logit `lowest`, or better.
__device__ uint64_t gumbel_key(const Row& row, uint64_t lowest_key, float lowest, int64_t index, Shared& s) {
  const ops::SlotSampling& p = *row.transforms.params;
  GumbelDraw draw{ops::draw_key(p.seed, index), p.temperature};
  for (int id = row.begin + static_cast<int>(threadIdx.x); id < row.end; id += kThreads) {
    const float x = row.at(id);
    if (x != -INFINITY && x >= lowest && key_of(x, id) >= lowest_key) draw.offer(x, id);
  }
  return block_max(draw.drawn, s);
}

/// The token drawn, in every thread; -1: none is allowed.
__device__ int draw_token(const Row& row, int64_t index, Shared& s) {
  const ops::SlotSampling& p = *row.transforms.params;
  const uint64_t first = first_key(row, s);
  if (first == 0) return -1;
  if (p.temperature < kGreedyBelow) return id_of(first);

  const float best = row.at(id_of(first));
  uint64_t lowest_key = 0;
  if (p.top_k > 0 && p.top_k < row.end) lowest_key = kth_key(row, p.top_k, s);
  if (p.top_p < 1.0f) lowest_key = top_p_key(row, lowest_key, best, s);
  const float lowest = lowest_logit(p, best);

  const uint64_t drawn = gumbel_key(row, lowest_key, lowest, index, s);
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

/// One draw of a run after the other, as long as drafts agree: token_of(draw, the token's index in the sequence), the same in every thread, -1 where it fails. Then the run has advanced.
template <class TokenOf>
__device__ void walk(const SampleArgs& args, const SampleRecord& run, const Draws& draws, const TokenOf& token_of) {
  const int64_t number = blockIdx.x, per_run = args.k_max + 1;
  const int thread = static_cast<int>(threadIdx.x);
  ops::SlotSampling& params = args.params[run.slot];
  int32_t* counts = args.counts + run.slot * int64_t{args.vocab_size};
  const int32_t* drafts = args.drafts + int64_t{run.slot} * args.drafts_stride;
  const int32_t cursor = args.cursor[run.slot];
  int num_tokens = 0;
  bool failed = false;
  for (int draw = 0; draw < draws.num_draws; ++draw) {
    const int token = token_of(draw, token_index(run, draws, cursor, draw));
    if (token < 0) {
      failed = true;
      break;
    }
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

/// Whether all logits of a row, of ids [first_id, end_id), are finite.
__device__ bool is_finite(const SampleArgs& args, const float* raw) {
  bool finite = true;
  for (int i = static_cast<int>(threadIdx.x); i < args.end_id - args.first_id; i += kThreads) finite = finite && (__float_as_uint(raw[i]) & 0x7fffffffu) < 0x7f800000u;
  return __syncthreads_and(finite) != 0;
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
  const ops::SlotSampling& params = args.params[run.slot];
  walk(args, run, draws_of(run), [&](int draw, int64_t index) {
    float* raw = args.logits + (run.first_logits_row + draw) * vocab;
    if (!is_finite(args, raw)) return -1;
    if (thread == 0)
      for (int i = 0; i < params.num_logit_bias; ++i)
        if (params.bias_ids[i] >= 0 && params.bias_ids[i] < args.num_tokens) {
          s.saved[i] = raw[params.bias_ids[i]];
          raw[params.bias_ids[i]] = s.saved[i] + params.bias_values[i];
        }
    __syncthreads();
    const Row row{raw, 0, args.num_tokens, transforms_of(args, run, draw, nullptr, 0)};
    const int token = draw_token(row, index, s);
    __syncthreads();
    if (thread == 0)
      for (int i = params.num_logit_bias - 1; i >= 0; --i)  // backwards: an id may be named twice
        if (params.bias_ids[i] >= 0 && params.bias_ids[i] < args.num_tokens) raw[params.bias_ids[i]] = s.saved[i];
    __syncthreads();
    if (token >= 0 && params.num_logprobs >= 0) write_logprobs(args, raw, token, params.num_logprobs, number * per_run + draw, s);
    return token;
  });
}

/// blockIdx: (run, draw). Candidates of a part of the vocabulary.
extern "C" __global__ void __launch_bounds__(kThreads) sample_candidates(const __grid_constant__ SampleArgs args) {
  __shared__ Shared s;
  __shared__ uint64_t listed[ops::kMaxCandidates];
  __shared__ uint32_t num_listed;
  const int thread = static_cast<int>(threadIdx.x), draw = static_cast<int>(blockIdx.y);
  const SampleRecord run = args.runs[blockIdx.x];
  if (run.slot < 0) return;
  const Draws draws = draws_of(run);
  if (draw >= draws.num_draws) return;
  const ops::SlotSampling& p = args.params[run.slot];
  const int64_t row_number = int64_t{run.first_logits_row} + draw;
  float* raw = args.logits + row_number * (args.end_id - args.first_id);
  uint64_t* out = args.candidates + row_number * (1 + args.num_candidates);
  const int end = min(args.end_id, args.num_tokens);
  const bool finite = is_finite(args, raw);
  if (thread == 0) {
    num_listed = 0;
    for (int i = 0; i < p.num_logit_bias; ++i)
      if (const int id = p.bias_ids[i]; id >= args.first_id && id < end) raw[id - args.first_id] += p.bias_values[i];
  }
  __syncthreads();
  // The row is reached by the drafts before it alone.
  const Row row{raw, args.first_id, finite ? end : args.first_id, transforms_of(args, run, draw, args.drafts + int64_t{run.slot} * args.drafts_stride, draw)};
  uint64_t only = 0;
  if (p.temperature < kGreedyBelow) {
    only = first_key(row, s);
  } else if (!limits_k(args, p)) {
    only = gumbel_key(row, 0, -INFINITY, token_index(run, draws, args.cursor[run.slot], draw), s);
  } else {
    const uint64_t lowest = kth_key(row, p.top_k, s);
    for (int id = row.begin + thread; id < row.end; id += kThreads) {
      const float x = row.at(id);
      if (const uint64_t key = key_of(x, id); x != -INFINITY && key >= lowest) listed[atomicAdd(&num_listed, 1u)] = key;
    }
  }
  if (thread == 0 && only != 0) listed[num_listed++] = only;
  __syncthreads();
  const int count = static_cast<int>(num_listed);
  if (thread == 0) out[0] = finite ? 1 : 0;
  if (thread >= count && thread < args.num_candidates) out[1 + thread] = 0;
  if (thread < count) {
    int larger = 0;
    for (int i = 0; i < count; ++i) larger += listed[i] > listed[thread] ? 1 : 0;
    out[1 + larger] = listed[thread];
  }
}

/// A block a run, from the candidates of all parts.
extern "C" __global__ void __launch_bounds__(kThreads) sample_drawing(const __grid_constant__ SampleArgs args) {
  __shared__ Shared s;
  __shared__ uint64_t sorted[ops::kMaxCandidates], weights[ops::kMaxCandidates];
  __shared__ int num_kept;
  const int thread = static_cast<int>(threadIdx.x), per_part = 1 + args.num_candidates, num_keys = args.num_parts * args.num_candidates;
  const SampleRecord run = args.runs[blockIdx.x];
  if (run.slot < 0) {
    if (thread == 0) args.sampled[blockIdx.x] = args.non_finite[blockIdx.x] = 0;
    return;
  }
  const ops::SlotSampling& p = args.params[run.slot];
  walk(args, run, draws_of(run), [&](int draw, int64_t index) {
    const uint64_t* words = args.gathered + (int64_t{run.first_logits_row} + draw) * args.num_parts * per_part;
    const auto key_at = [&](int i) { return words[i / args.num_candidates * per_part + 1 + i % args.num_candidates]; };
    for (int part = 0; part < args.num_parts; ++part)
      if (words[part * per_part] == 0) return -1;
    uint64_t mine = 0;
    for (int i = thread; i < num_keys; i += kThreads) mine = key_at(i) > mine ? key_at(i) : mine;
    const uint64_t first = block_max(mine, s);
    if (first == 0) return -1;
    if (p.temperature < kGreedyBelow || !limits_k(args, p)) return id_of(first);

    const float best = logit_of(first);
    if (thread < ops::kMaxCandidates) sorted[thread] = 0;
    if (thread == 0) num_kept = 0;
    __syncthreads();
    for (int i = thread; i < num_keys; i += kThreads) {
      const uint64_t key = key_at(i);
      if (key == 0) continue;
      int larger = 0;
      for (int other = 0; other < num_keys; ++other) larger += key_at(other) > key ? 1 : 0;
      if (larger >= p.top_k) continue;
      sorted[larger] = key;
      atomicAdd(&num_kept, 1);
    }
    __syncthreads();
    if (p.top_p < 1.0f) {
      if (thread < num_kept) weights[thread] = weight_of(logit_of(sorted[thread]), best, p.temperature);
      __syncthreads();
      if (thread == 0) {
        uint64_t all = 0, held = 0;
        for (int i = 0; i < num_kept; ++i) all += weights[i];
        const uint64_t wanted = wanted_weight(p.top_p, all);
        int kept = 0;
        while (kept < num_kept && held < wanted) held += weights[kept++];
        num_kept = kept;
      }
      __syncthreads();
    }
    GumbelDraw chance{ops::draw_key(p.seed, index), p.temperature};
    if (thread < num_kept)
      if (const float x = logit_of(sorted[thread]); x >= lowest_logit(p, best)) chance.offer(x, id_of(sorted[thread]));
    const uint64_t drawn = block_max(chance.drawn, s);
    return drawn == 0 ? -1 : id_of(drawn);
  });
}

/// A block a row.
extern "C" __global__ void __launch_bounds__(kThreads) argmax(const __grid_constant__ ArgmaxArgs args) {
  __shared__ Shared s;
  const float* row = args.logits + int64_t{blockIdx.x} * args.width;
  uint64_t mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_tokens; i += kThreads) {
    const uint64_t key = key_of(row[i], args.first_id + i);
    mine = key > mine ? key : mine;
  }
  const uint64_t first = block_max(mine, s);
  if (threadIdx.x == 0) give_best(args, blockIdx.x, first);
}

/// A thread a row.
extern "C" __global__ void argmax_of(const __grid_constant__ ArgmaxOfArgs args) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= args.num_rows) return;
  uint64_t best = 0;
  for (int part = 0; part < args.num_parts; ++part) {
    const uint64_t key = args.gathered[int64_t{row} * args.num_parts + part];
    best = key > best ? key : best;
  }
  args.ids[row] = id_of(best);
}

}  // namespace quern::cuda
