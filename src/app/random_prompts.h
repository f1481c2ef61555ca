#pragma once

#include <cstdint>
#include <vector>

namespace quern::app {

/// `length` token ids, uniform in [0, min(vocab_size, 10000)): the convention of vLLM's latency benchmark. Equal seeds give equal prompts.
std::vector<int32_t> random_prompt(uint64_t seed, int32_t length, int32_t vocab_size);

/// A whole number, uniform in [base (1 - ratio), base (1 + ratio)], at least 1.
int32_t random_length(uint64_t seed, int32_t base, double range_ratio);

}  // namespace quern::app
