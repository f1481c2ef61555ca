#include "server/completion_request.h"

namespace quern::server {
namespace {

std::optional<std::vector<int32_t>> token_ids(const Json& list, const RequestLimits& limits, JsonFields& fields) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& value : list) {
    const auto id = json_integer(value, 0, limits.vocab_size - 1);
    if (!id) {
      fields.fail("prompt", "expected token ids below {}, found {} at index {}", limits.vocab_size,
                  value.is_number() ? dump_json(value) : std::string(json_kind(value)), ids.size());
      return std::nullopt;
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

std::vector<PromptInput> read_prompts(JsonFields& fields, const RequestLimits& limits) {
  constexpr std::string_view kExpected = "expected a string, a list of strings, a list of token ids or a list of such lists";
  const Json* prompt = fields.find("prompt");
  if (prompt == nullptr) {
    fields.fail("prompt", "is required");
    return {};
  }
  if (prompt->is_string()) return {PromptInput(prompt->get<std::string>())};
  if (!prompt->is_array()) {
    fields.fail("prompt", "{}, found {}", kExpected, json_kind(*prompt));
    return {};
  }
  if (prompt->empty()) {
    fields.fail("prompt", "the list is empty");
    return {};
  }
  std::vector<PromptInput> prompts;
  if (prompt->front().is_number()) {
    if (auto ids = token_ids(*prompt, limits, fields)) prompts.emplace_back(std::move(*ids));
    return prompts;
  }
  if (prompt->size() > kMaxPrompts) {
    fields.fail("prompt", "{} prompts, at most {} are allowed", prompt->size(), kMaxPrompts);
    return {};
  }
  for (const Json& one : *prompt) {
    if (one.is_string()) {
      prompts.emplace_back(one.get<std::string>());
    } else if (one.is_array()) {
      auto ids = token_ids(one, limits, fields);
      if (!ids) return {};
      prompts.emplace_back(std::move(*ids));
    } else {
      fields.fail("prompt", "{}, found {} in the list", kExpected, json_kind(one));
      return {};
    }
  }
  return prompts;
}

}  // namespace

Result<CompletionRequest> parse_completion_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  CompletionRequest request;
  request.prompts = read_prompts(fields, limits);
  request.generation = read_generation_fields(fields, defaults, limits);
  request.max_tokens = static_cast<int32_t>(fields.integer("max_tokens", 0, INT32_MAX).value_or(16));
  request.logprobs = static_cast<int32_t>(fields.integer("logprobs", 0, kMaxLogprobs).value_or(-1));
  request.echo = fields.boolean("echo").value_or(false);
  if (request.generation.sampling.min_tokens > request.max_tokens) {
    fields.fail("min_tokens", "{} is more than max_tokens, {}", request.generation.sampling.min_tokens, request.max_tokens);
  }
  RETURN_IF_ERROR(fields.status());
  return request;
}

}  // namespace quern::server
