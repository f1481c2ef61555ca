#pragma once

#include <cstdint>
#include <span>

#include "ops/sampling.h"

namespace quern::worker {

/// Log-probability and rank of `token` under raw logits [vocab_size], and the `num_top` most likely tokens.
ops::TokenLogprobs token_logprobs(std::span<const float> logits, int32_t token, int32_t num_top);

}  // namespace quern::worker
