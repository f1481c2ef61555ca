#include "engine/fake_model.h"

#include <algorithm>

#include "base/check.h"

namespace quern::engine::testing {

int32_t FakeModel::next(uint64_t state, const Context& context, const std::function<bool(int32_t)>& allowed) const {
  const SamplingParams& sampling = context.sampling;
  uint64_t key = hash_combine(state, sampling.seed);
  if (sampling.has_penalties()) {
    uint64_t counts = 0;
    for (const int32_t token : context.output) counts += mix64(static_cast<uint64_t>(token) + 1);
    for (const int32_t token : context.prompt_ids) counts += mix64(static_cast<uint64_t>(token) + 1000001);
    key = hash_combine(key, counts);
  }
  const bool may_stop = static_cast<int32_t>(context.output.size()) >= sampling.min_tokens;
  for (uint64_t attempt = 0; attempt < 100000; ++attempt) {
    const auto token = static_cast<int32_t>(mix64(key + attempt) % static_cast<uint64_t>(vocab_size_));
    if (!may_stop && std::count(sampling.stop_ids.begin(), sampling.stop_ids.end(), token) > 0) continue;
    if (allowed(token)) return token;
  }
  check_failed("a token is allowed", "", __FILE__, __LINE__);
}

TokenLogprobs FakeModel::logprobs(uint64_t state, int32_t token, int32_t num_top) const {
  TokenLogprobs logprobs;
  const uint64_t hash = hash_combine(state, static_cast<uint64_t>(token));
  logprobs.chosen = -static_cast<float>(hash % 1000) / 100.0f;
  logprobs.chosen_rank = 1 + static_cast<int32_t>(hash % 7);
  for (int32_t i = 0; i < num_top; ++i)
    logprobs.top.emplace_back(static_cast<int32_t>((hash + static_cast<uint64_t>(i)) % 50), -static_cast<float>(i));
  return logprobs;
}

std::vector<int32_t> FakeModel::output(const std::vector<int32_t>& prompt, const SamplingParams& sampling, int32_t max_tokens) const {
  uint64_t state = kEmptyState;
  for (const int32_t token : prompt) state = grow(state, token);
  std::vector<int32_t> prompt_ids = sampling.has_penalties() ? prompt : std::vector<int32_t>{};
  std::vector<int32_t> output;
  while (static_cast<int32_t>(output.size()) < max_tokens) {
    const int32_t token = next(state, {sampling, prompt_ids, output}, [](int32_t) { return true; });
    output.push_back(token);
    if (std::count(sampling.stop_ids.begin(), sampling.stop_ids.end(), token) > 0) break;
    state = grow(state, token);
  }
  return output;
}

}  // namespace quern::engine::testing
