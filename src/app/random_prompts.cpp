#include "app/random_prompts.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"

namespace quern::app {

std::vector<int32_t> random_prompt(uint64_t seed, int32_t length, int32_t vocab_size) {
  SplitMix64 random(mix64(seed + 1));
  const auto range = static_cast<uint64_t>(std::min(vocab_size, 10000));
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.next() % range);
  return tokens;
}

int32_t random_length(uint64_t seed, int32_t base, double range_ratio) {
  const auto lowest = std::max<int64_t>(1, std::llround(std::floor(base * (1 - range_ratio))));
  const auto highest = std::max<int64_t>(lowest, std::llround(std::ceil(base * (1 + range_ratio))));
  const auto span = static_cast<uint64_t>(highest - lowest + 1);
  return static_cast<int32_t>(lowest + static_cast<int64_t>(mix64(seed + 0x51ed27) % span));
}

}  // namespace quern::app
