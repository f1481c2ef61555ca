#include "worker/logprobs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace quern::worker {

ops::TokenLogprobs token_logprobs(std::span<const float> logits, int32_t token, int32_t num_top) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float v : logits) sum += std::exp(static_cast<double>(v) - largest);
  const double log_sum = largest + std::log(sum);
  const auto logprob = [&](int32_t id) { return static_cast<float>(logits[static_cast<size_t>(id)] - log_sum); };

  ops::TokenLogprobs result;
  result.chosen = logprob(token);
  const float chosen = logits[static_cast<size_t>(token)];
  result.chosen_rank = 1 + static_cast<int32_t>(std::count_if(logits.begin(), logits.end(), [&](float v) { return v > chosen; }));
  if (num_top <= 0) return result;
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = std::min<size_t>(static_cast<size_t>(num_top), ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<int64_t>(count), ids.end(), [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  for (size_t i = 0; i < count; ++i) result.top.emplace_back(ids[i], logprob(ids[i]));
  return result;
}

}  // namespace quern::worker
