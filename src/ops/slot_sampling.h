#pragma once

#include <cstdint>

#include "ops/sampling.h"

namespace quern::ops {

/// SamplingParams of one slot as kernels read them.
struct SlotSampling {
  float temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  int32_t top_k, num_logprobs, min_tokens, num_generated, num_stop_ids, num_logit_bias;
  uint64_t seed;
  int32_t stop_ids[kMaxStopIds];
  int32_t bias_ids[kMaxLogitBias];
  float bias_values[kMaxLogitBias];
};
SlotSampling to_slot_sampling(const SamplingParams& params);

}  // namespace quern::ops
