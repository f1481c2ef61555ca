#include "server/generation_plan.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/hash.h"

namespace quern::server {

std::string base_request_id(const HttpRequest& http, const GenerationFields& fields) {
  if (const std::string_view given = client_request_id(http); !given.empty()) return std::string(given);
  return fields.request_id.empty() ? new_request_id("") : fields.request_id;
}

ResponseHeader response_header(const Service& service, const GenerationFields& fields, std::string request_id) {
  ResponseHeader header;
  header.id = std::move(request_id);
  header.created = std::time(nullptr);
  header.model = fields.model.empty() ? service.context.model_names.front() : fields.model;
  header.tokens_as_ids = fields.return_tokens_as_token_ids;
  header.token_ids = fields.return_token_ids || service.context.tokenizer == nullptr;
  header.prompt_logprobs = fields.prompt_logprobs >= 0;
  header.num_prompt_logprobs = fields.prompt_logprobs;
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

void truncate_prompt(const Service& service, const GenerationFields& fields, int32_t max_tokens, PreparedPrompt& prompt) {
  if (!fields.truncate_prompt_tokens) return;
  const int32_t most = *fields.truncate_prompt_tokens > 0 ? *fields.truncate_prompt_tokens : std::max(service.window() - max_tokens, 1);
  const int32_t dropped = static_cast<int32_t>(prompt.ids.size()) - most;
  if (dropped <= 0) return;
  prompt.ids.erase(prompt.ids.begin(), prompt.ids.begin() + dropped);
  for (int32_t& hint : prompt.cut_hints) hint -= dropped;
  std::erase_if(prompt.cut_hints, [](int32_t hint) { return hint <= 0; });
}

Json rendered_prompt_json(const Service& service, const std::vector<int32_t>& ids) {
  Json json;
  json["prompt"] = service.context.tokenizer == nullptr ? Json() : Json(service.context.tokenizer->decode(ids, false));
  json["prompt_token_ids"] = ids;
  json["count"] = ids.size();
  return json;
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
    request.prompt_logprobs = std::max(plan.prompt_logprobs, fields.prompt_logprobs);
    request.priority = fields.priority;
    request.cache_salt = fields.cache_salt;
    request.cut_hints = prompt.cut_hints;
    if (plan.grammar != nullptr) {
      std::vector<int32_t> end_ids = request.sampling.stop_ids;
      end_ids.insert(end_ids.end(), service.context.eos_ids.begin(), service.context.eos_ids.end());
      request.constraint = std::make_unique<GrammarConstraint>(plan.grammar, std::move(end_ids));
    }

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
