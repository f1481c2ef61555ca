#include "ops/sample.h"

#include "base/check.h"

namespace quern::ops {

SlotSampling to_slot_sampling(const SamplingParams& params) {
  CHECK(params.stop_ids.size() <= kMaxStopIds);
  CHECK(params.logit_bias.size() <= kMaxLogitBias);
  SlotSampling slot{};
  slot.temperature = params.temperature;
  slot.top_p = params.top_p;
  slot.min_p = params.min_p;
  slot.presence_penalty = params.presence_penalty;
  slot.frequency_penalty = params.frequency_penalty;
  slot.repetition_penalty = params.repetition_penalty;
  slot.top_k = params.top_k;
  slot.num_logprobs = params.num_logprobs;
  slot.min_tokens = params.min_tokens;
  slot.seed = params.seed;
  slot.num_stop_ids = static_cast<int32_t>(params.stop_ids.size());
  std::copy(params.stop_ids.begin(), params.stop_ids.end(), slot.stop_ids);
  slot.num_logit_bias = static_cast<int32_t>(params.logit_bias.size());
  for (size_t i = 0; i < params.logit_bias.size(); ++i) {
    slot.bias_ids[i] = params.logit_bias[i].first;
    slot.bias_values[i] = params.logit_bias[i].second;
  }
  return slot;
}

int32_t candidates_needed(const SamplingParams& params, int64_t num_tokens, bool synthetic) {
  if (params.num_logprobs >= 0) return 0;                // they count the whole distribution
  if (synthetic && params.has_penalties()) return 0;     // a row depends on what is drawn before it, and not on drafts
  if (params.greedy()) return 1;
  const bool limits_k = params.top_k > 0 && params.top_k < num_tokens;
  if (limits_k) return params.top_k <= kMaxCandidates ? kMaxCandidates : 0;
  return params.top_p >= 1.0f && params.min_p <= 0.0f ? 1 : 0;
}

}  // namespace quern::ops
