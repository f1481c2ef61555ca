#pragma once

#include "backends/cuda/numeric.cuh"
#include "backends/cuda/sample_args.h"
#include "ops/random.h"

// The rules of the sampler that its kernels share, a token at a time. Device code only.

namespace quern::cuda {

constexpr float kGreedyBelow = 1e-5f;      // SamplingParams::greedy()
constexpr float kLogprobFloor = -9999.0f;  // JSON has no infinity
constexpr double kWeightUnit = 0x1p44;     // probabilities relative to the best token's are added as multiples of 2^-44

/// Larger keys are more likely tokens; of equal logits the lowest id has the largest.
__device__ inline uint64_t key_of(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{ordered} << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline int id_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }
__device__ inline float logit_of(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered);
}

/// Probability relative to the best token's, in units of 2^-44.
__device__ inline uint64_t weight_of(float x, float best, float temperature) {
  return static_cast<uint64_t>(static_cast<double>(expf((x - best) / temperature)) * kWeightUnit);
}
/// What a nucleus has to hold, of the weights of all.
__device__ inline uint64_t wanted_weight(float top_p, uint64_t all) {
  const double part = ceil(static_cast<double>(top_p) * static_cast<double>(all));
  return part < 1 ? 1 : static_cast<uint64_t>(part);
}
/// Whether top-k leaves out any token.
__device__ inline bool limits_k(const SampleArgs& args, const ops::SlotSampling& p) { return p.top_k > 0 && p.top_k < args.num_tokens; }
__device__ inline void give_best(const ArgmaxArgs& args, unsigned row, uint64_t best) {
  if (args.ids != nullptr) args.ids[row] = id_of(best);
  if (args.keys != nullptr) args.keys[row] = best;
}
/// Below this logit min-p drops a token.
__device__ inline float lowest_logit(const ops::SlotSampling& p, float best) {
  return p.min_p > 0.0f ? __fadd_rn(best, __fmul_rn(p.temperature, static_cast<float>(log(static_cast<double>(p.min_p))))) : -INFINITY;
}
__device__ inline bool is_stop(const ops::SlotSampling& params, int token) {
  for (int i = 0; i < params.num_stop_ids; ++i)
    if (params.stop_ids[i] == token) return true;
  return false;
}

__device__ inline bool has_penalties(const ops::SlotSampling& p) { return p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1; }

/// Penalties, mask and stop ids of one draw; the bias was added before.
struct Transforms {
  const ops::SlotSampling* params;
  const int32_t* counts;
  const uint8_t* in_prompt;
  const uint32_t* mask;   // null: none
  const int32_t* before;  // [num_before]: tokens of the step that `counts` does not hold yet
  int num_before;
  bool penalties, too_early;

  /// -infinity: not allowed.
  __device__ float apply(float x, int id) const { return allowed(penalties ? penalised(x, id, counts[id], in_prompt[id]) : x, id); }
  /// `count` and `prompt` are what the tables say of the id.
  __device__ float penalised(float x, int id, int count, uint8_t prompt) const {
    for (int i = 0; i < num_before; ++i) count += before[i] == id ? 1 : 0;
    if (count != 0 || prompt != 0) {
      x = x > 0 ? __fdiv_rn(x, params->repetition_penalty) : __fmul_rn(x, params->repetition_penalty);
      if (count > 0) x = __fsub_rn(x, __fadd_rn(__fmul_rn(params->frequency_penalty, static_cast<float>(count)), params->presence_penalty));
    }
    return x;
  }
  __device__ float allowed(float x, int id) const {
    if (mask != nullptr && (mask[id / 32] >> (id % 32) & 1u) == 0) x = -INFINITY;
    if (too_early)
      for (int i = 0; i < params->num_stop_ids; ++i)
        if (params->stop_ids[i] == id) x = -INFINITY;
    return x;
  }
  __device__ bool any() const { return penalties || mask != nullptr || too_early; }
};
/// `draw` tokens of the step come before the one that is drawn.
__device__ inline Transforms transforms_of(const SampleArgs& args, const SampleRecord& run, int draw, const int32_t* before,
                                           int num_before) {
  const ops::SlotSampling& p = args.params[run.slot];
  const int64_t vocab = args.vocab_size;
  Transforms t;
  t.params = &p;
  t.counts = args.counts + run.slot * vocab;
  t.in_prompt = args.in_prompt + run.slot * vocab;
  t.mask = run.first_mask_row < 0 ? nullptr : args.masks + (run.first_mask_row + draw) * ((vocab + 31) / 32);
  t.before = before;
  t.num_before = num_before;
  t.penalties = has_penalties(p);
  t.too_early = p.num_generated + num_before < p.min_tokens && p.num_stop_ids > 0;
  return t;
}

/// What a run draws.
struct Draws {
  bool verify;
  int num_draws;
  int synthetic;  // drafts that count as accepted; below 0: those that agree
};
__device__ inline Draws draws_of(const SampleRecord& run) {
  const bool verify = run.first_logits_row >= 0 && run.verify != 0;
  return {verify, run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1, run.verify - 2};  // ops::kSyntheticAcceptance
}
/// The sequence index of a draw's token.
__device__ inline int64_t token_index(const SampleRecord& run, const Draws& draws, int32_t cursor, int draw) {
  return int64_t{cursor} + (draws.verify ? draw + 1 : run.num_rows);
}
/// Where the run stands after `num_tokens` were drawn.
__device__ inline void advance_cursor(const SampleArgs& args, const SampleRecord& run, const Draws& draws, int num_tokens) {
  constexpr int kBoundary = 64;  // ops::kGrid
  const int32_t cursor = args.cursor[run.slot], after = cursor + (draws.verify ? num_tokens : run.num_rows);
  args.boundary[run.slot] = (draws.verify ? cursor : after) / kBoundary * kBoundary;  // where gdn_mix has left the state
  args.cursor[run.slot] = after;
}

/// To 22 bits; -infinity of 0.
__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Bounds of a token's Gumbel variate, -log(-log u), without logarithms of 53 bits: of 1 - u <= -log u <= (1 - u) / u, with u to 23 bits. 2^-8 of a binary logarithm is far above what rounding can change.
constexpr float kLog2 = 0.693147182f;
__device__ inline float rest_of(uint64_t bits) { return __uint_as_float(0x3f800000u | (~static_cast<uint32_t>(bits >> 41) & 0x7fffffu)) - 1.0f; }  // 1 - u, at most 2^-23 too small
__device__ inline float most_variate(uint64_t bits) { return -kLog2 * (log2_of(rest_of(bits)) - 0x1p-8f); }
__device__ inline float least_variate(uint64_t bits) {
  const float rest = rest_of(bits) + 0x1p-23f;
  return kLog2 * (log2_of(1.0f - rest) - log2_of(rest) - 0x1p-8f);
}
/// Bounds of the scores of GumbelDraw.
struct GumbelBounds {
  float high, low;  // of the temperature's inverse
  __device__ explicit GumbelBounds(float temperature) : high((1.0f + 0x1p-20f) / temperature), low((1.0f - 0x1p-20f) / temperature) {}
  __device__ float most(float x, uint64_t bits) const { return fmaxf(x * high, x * low) + most_variate(bits); }
  __device__ float least(float x, uint64_t bits) const { return fminf(x * high, x * low) + least_variate(bits); }
};
__device__ __noinline__ inline float gumbel_score(float scaled, uint64_t bits) { return __fadd_rn(scaled, static_cast<float>(-log(-log(ops::uniform(bits))))); }

/// Gumbel-max over the tokens that one thread offers.
struct GumbelDraw {
  uint64_t key;
  float temperature, best = -INFINITY;  // some token of the row has this score or a better one
  uint64_t drawn = 0;                   // the best score and its token

  __device__ void offer(float x, int id) {
    const float scaled = temperature == 1.0f ? x : __fdiv_rn(x, temperature);
    const uint64_t bits = ops::uniform_bits(key, id);
    if (scaled + most_variate(bits) < best) return;
    const float score = gumbel_score(scaled, bits);
    best = fmaxf(best, score);
    const uint64_t scored = key_of(score, id);
    drawn = scored > drawn ? scored : drawn;
  }
};

}  // namespace quern::cuda
