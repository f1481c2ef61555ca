#include "engine/check_request.h"

#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "engine/sequence.h"

namespace quern::engine {
namespace {

template <class... Args>
Error wrong(std::string_view field, fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...), std::string(field)};
}

Result<void> check_sampling(const SamplingParams& sampling, int32_t vocab_size) {
  const std::pair<std::string_view, float> numbers[] = {{"temperature", sampling.temperature},
                                                        {"top_p", sampling.top_p},
                                                        {"min_p", sampling.min_p},
                                                        {"presence_penalty", sampling.presence_penalty},
                                                        {"frequency_penalty", sampling.frequency_penalty},
                                                        {"repetition_penalty", sampling.repetition_penalty}};
  for (const auto& [field, value] : numbers)
    if (!std::isfinite(value)) return wrong(field, "{} must be a finite number, not {}", field, value);
  if (sampling.temperature < 0) return wrong("temperature", "temperature must be at least 0, not {}", sampling.temperature);
  if (sampling.top_k < -1) return wrong("top_k", "top_k must be at least 1, or 0 or -1 for no limit, not {}", sampling.top_k);
  if (sampling.top_p <= 0 || sampling.top_p > 1) return wrong("top_p", "top_p must be above 0 and at most 1, not {}", sampling.top_p);
  if (sampling.min_p < 0 || sampling.min_p > 1) return wrong("min_p", "min_p must be between 0 and 1, not {}", sampling.min_p);
  if (sampling.repetition_penalty <= 0)
    return wrong("repetition_penalty", "repetition_penalty must be above 0, not {}", sampling.repetition_penalty);
  if (sampling.num_logprobs < -1 || sampling.num_logprobs > kMaxLogprobs)
    return wrong("logprobs", "at most {} log-probabilities are returned for a token, not {}", kMaxLogprobs, sampling.num_logprobs);
  if (sampling.min_tokens < 0) return wrong("min_tokens", "min_tokens must be at least 0, not {}", sampling.min_tokens);
  if (std::ssize(sampling.stop_ids) > kMaxStopIds)
    return wrong("stop_token_ids", "at most {} token ids can end a request, not {}", kMaxStopIds, sampling.stop_ids.size());
  if (std::ssize(sampling.logit_bias) > kMaxLogitBias)
    return wrong("logit_bias", "logit_bias names at most {} tokens, not {}", kMaxLogitBias, sampling.logit_bias.size());
  for (const auto& [token, bias] : sampling.logit_bias) {
    if (token < 0 || token >= vocab_size)
      return wrong("logit_bias", "logit_bias names token {}, but the vocabulary ends at {}", token, vocab_size - 1);
    if (!std::isfinite(bias)) return wrong("logit_bias", "logit_bias of token {} must be a finite number, not {}", token, bias);
  }
  return {};
}

}  // namespace

Result<void> check_request(const GenerationRequest& request, const worker::WorkerLimits& limits) {
  if (request.prompt.empty()) return wrong("prompt", "the prompt is empty; at least one token is needed");
  for (size_t i = 0; i < request.prompt.size(); ++i)
    if (request.prompt[i] < 0 || request.prompt[i] >= limits.vocab_size)
      return wrong("prompt", "token {} of the prompt is {}, but the vocabulary ends at {}", i, request.prompt[i], limits.vocab_size - 1);
  if (request.max_tokens < 0) return wrong("max_tokens", "max_tokens must be at least 0, not {}", request.max_tokens);
  RETURN_IF_ERROR(check_sampling(request.sampling, limits.vocab_size));
  if (request.prompt_logprobs < -1 || request.prompt_logprobs > kMaxLogprobs)
    return wrong("prompt_logprobs", "at most {} log-probabilities are returned for a token, not {}", kMaxLogprobs, request.prompt_logprobs);

  const int64_t prompt = static_cast<int64_t>(request.prompt.size()), total = prompt + request.max_tokens;
  const std::string_view too_long = prompt > limits.max_model_len || request.max_tokens == 0 ? "prompt" : "max_tokens";
  if (total > limits.max_model_len)
    return wrong(
        too_long,
        "This model's maximum context length is {} tokens. However, you requested {} tokens: {} in the prompt and {} for the completion. "
        "Please shorten the prompt or ask for fewer tokens.",
        limits.max_model_len, total, prompt, request.max_tokens);
  if (const int64_t blocks = num_blocks_for(num_rows_at_most(prompt, request.max_tokens)); blocks > limits.num_blocks)
    return wrong(too_long,
                 "{} tokens in the prompt and {} for the completion need {} KV blocks of {} tokens, and the device has {} of them (context "
                 "length {} "
                 "of {}). Please shorten the prompt or ask for fewer tokens.",
                 prompt, request.max_tokens, blocks, kBlockSize, limits.num_blocks, int64_t{limits.num_blocks} * kBlockSize,
                 limits.max_model_len);
  return {};
}

}  // namespace quern::engine
