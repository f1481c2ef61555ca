#include "server/generation_plan.h"

#include <ctime>
#include <random>
#include <utility>

#include "base/hash.h"

namespace quern::server {

std::string new_request_id(std::string_view prefix) {
  thread_local SplitMix64 generator = [] {
    std::random_device device;
    return SplitMix64((uint64_t{device()} << 32) | device());
  }();
  const uint64_t high = generator.next(), low = generator.next();
  return fmt::format("{}{:016x}{:016x}", prefix, high, low);
}

ResponseHeader response_header(const Service& service, const GenerationFields& fields, std::string request_id) {
  ResponseHeader header;
  header.id = std::move(request_id);
  header.created = std::time(nullptr);
  header.model = fields.model.empty() ? service.context.model_names.front() : fields.model;
  header.tokens_as_ids = fields.return_tokens_as_token_ids;
  header.token_ids = fields.return_token_ids || service.context.tokenizer == nullptr;
  header.include_usage = fields.include_usage;
  header.continuous_usage = fields.include_usage && fields.continuous_usage_stats;
  return header;
}

std::optional<Error> check_window(const Service& service, std::string_view prompt_field, size_t prompt_tokens, int32_t max_tokens) {
  const auto window = static_cast<size_t>(service.window());
  if (prompt_tokens + static_cast<size_t>(max_tokens) <= window) return std::nullopt;
  Error error = invalid_argument(
      "This model's maximum context length is {} tokens. However, you requested {} tokens: {} in the prompt and {} for the completion. "
      "Please shorten the prompt or ask for fewer tokens.",
      window, prompt_tokens + static_cast<size_t>(max_tokens), prompt_tokens, max_tokens);
  error.field = prompt_tokens >= window ? prompt_field : "max_tokens";
  return error;
}

void add_choices(Service& service, const GenerationFields& fields, const GenerationPlan& plan, PreparedPrompt prompt,
                 std::vector<ChoiceRequest>& choices) {
  const uint64_t seed = service.seed_for(fields.seed);
  for (int32_t i = 0; i < fields.n; ++i) {
    ChoiceRequest choice;
    engine::GenerationRequest& request = choice.request;
    request.id = fields.n == 1 ? plan.request_id : fmt::format("{}-{}", plan.request_id, i);
    request.prompt = prompt.ids;
    request.sampling = fields.sampling;
    // The first choice is the one that n = 1 gives.
    request.sampling.seed = i == 0 ? seed : hash_combine(seed, static_cast<uint64_t>(i));
    request.sampling.num_logprobs = plan.num_logprobs;
    if (!fields.ignore_eos) request.sampling.stop_ids = service.context.eos_ids;
    for (const int32_t id : fields.stop_token_ids) request.sampling.stop_ids.push_back(id);
    request.max_tokens = plan.max_tokens;
    request.prompt_logprobs = plan.prompt_logprobs;
    request.priority = fields.priority;
    request.cache_salt = fields.cache_salt;
    request.cut_hints = prompt.cut_hints;

    OutputOptions& output = choice.output;
    output.tokenizer = service.context.tokenizer;
    output.prompt_tokens = static_cast<int32_t>(prompt.ids.size());
    output.split_reasoning = plan.split_reasoning;
    output.starts_in_reasoning = prompt.starts_in_reasoning;
    output.opening = prompt.opening;
    output.tools = plan.tools;
    output.parallel_tool_calls = plan.parallel_tool_calls;
    output.skip_special_tokens = fields.skip_special_tokens;
    output.stop = fields.stop;
    output.include_stop = fields.include_stop_str_in_output;
    output.stop_ids = request.sampling.stop_ids;
    output.named_stop_ids = fields.stop_token_ids;
    choices.push_back(std::move(choice));
  }
}

}  // namespace quern::server
