#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/endpoints.h"
#include "server/generation.h"
#include "server/generation_fields.h"
#include "server/output_format.h"
#include "server/request_id.h"
#include "text/token_grammar.h"

namespace quern::server {

/// One prompt, ready for the engine.
struct PreparedPrompt {
  std::vector<int32_t> ids;
  std::vector<int32_t> cut_hints;    // see engine::GenerationRequest
  bool starts_in_reasoning = false;  // the output begins inside a <think> that the prompt opened
  std::string opening;               // the beginning of the output, which the prompt ends with
};

/// What differs between the dialects.
struct GenerationPlan {
  std::string request_id;
  int32_t max_tokens = 0;
  int32_t num_logprobs = -1;
  int32_t prompt_logprobs = -1;
  bool split_reasoning = false;
  std::shared_ptr<const text::ToolSchemas> tools;
  bool parallel_tool_calls = true;
  std::shared_ptr<const text::TokenGrammar> grammar;  // that the output is held to; null: none
};

/// What the ids of the answers to a request are made from: the client's X-Request-Id, else its "request_id", else 32 random digits.
std::string base_request_id(const HttpRequest& http, const GenerationFields& fields);

/// What all answers to this request say of themselves.
ResponseHeader response_header(const Service& service, const GenerationFields& fields, std::string request_id);

/// The error of a prompt and an output that do not fit the window together; it names all three numbers. max_tokens: at least this many.
std::optional<Error> check_window(const Service& service, std::string_view prompt_field, size_t prompt_tokens, int32_t max_tokens);

/// Leaves the last truncate_prompt_tokens of the prompt; for -1 as many as fit beside `max_tokens`.
void truncate_prompt(const Service& service, const GenerationFields& fields, int32_t max_tokens, PreparedPrompt& prompt);

/// {"prompt", "prompt_token_ids", "count"}: a prompt as the render endpoints show it; without a tokenizer the text is null.
Json rendered_prompt_json(const Service& service, const std::vector<int32_t>& ids);

/// n choices of `prompt`, whose seeds follow from the request's.
void add_choices(Service& service, const GenerationFields& fields, const GenerationPlan& plan, PreparedPrompt prompt,
                 std::vector<ChoiceRequest>& choices);

}  // namespace quern::server
