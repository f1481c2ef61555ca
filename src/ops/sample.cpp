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

}  // namespace quern::ops
