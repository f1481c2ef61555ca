#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace quern::ops {

// What the sampler's tables hold for a sequence; a request for more is refused.
inline constexpr int32_t kMaxLogprobs = 20;
inline constexpr int32_t kMaxLogitBias = 1024;
inline constexpr int32_t kMaxStopIds = 64;
/// A rank with a part of the vocabulary gives so many candidates of a row, or one (ops/sample.h).
inline constexpr int32_t kMaxCandidates = 64;

/// How tokens of one sequence are chosen. Transforms are applied in one order: logit bias, penalties, grammar mask, temperature, top-k, top-p, min-p.
struct SamplingParams {
  float temperature = 1.0f;          // 0 (or below 1e-5): greedy
  int32_t top_k = 0;                 // 0 and -1: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float presence_penalty = 0.0f;     // OpenAI's: subtracted once for a token that occurs in the output
  float frequency_penalty = 0.0f;    // subtracted per occurrence in the output
  float repetition_penalty = 1.0f;   // divides positive and multiplies negative logits of tokens in prompt or output
  uint64_t seed = 0;                 // the token at sequence index i is drawn by RNG(seed, i, token id)
  std::vector<std::pair<int32_t, float>> logit_bias;
  int32_t num_logprobs = -1;         // -1: none; n: the chosen token's and the n most likely ones'
  int32_t min_tokens = 0;            // stop ids are masked until so many tokens were generated
  std::vector<int32_t> stop_ids;     // end of sequence for this request (eos ids unless ignored, stop_token_ids)

  [[nodiscard]] bool greedy() const { return temperature < 1e-5f; }
  [[nodiscard]] bool has_penalties() const { return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1; }
};

/// Log-probabilities of one sampled position, of the raw distribution.
struct TokenLogprobs {
  float chosen = 0;
  int32_t chosen_rank = 0;                             // 1: most likely
  std::vector<std::pair<int32_t, float>> top;          // most likely first
};

}  // namespace quern::ops
