#include "server/answer.h"
#include "server/chat_format.h"
#include "server/chat_prompt.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/generation_plan.h"

namespace quern::server {

HttpAnswer chat_completions(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  const auto parsed = parse_chat_request(*body, service->context.sampling_defaults, service->limits());
  if (!parsed) return error_response(parsed.error());
  const ChatRequest& request = *parsed;
  const GenerationFields& fields = request.generation;
  if (!service->knows_model(fields.model)) return unknown_model(*service, fields.model);
  auto prompt = render_chat(*service, request.conversation);
  if (!prompt) return error_response(prompt.error());
  const size_t prompt_tokens = prompt->ids.size();
  if (const auto error = check_window(*service, "messages", prompt_tokens, request.max_tokens.value_or(1))) {
    return error_response(*error, "context_length_exceeded");
  }

  GenerationPlan plan;
  plan.request_id = new_request_id("chatcmpl-");
  plan.max_tokens = request.max_tokens.value_or(service->window() - static_cast<int32_t>(prompt_tokens));
  plan.num_logprobs = request.logprobs ? request.top_logprobs : -1;
  plan.split_reasoning = true;
  plan.tools = request.tools;
  plan.parallel_tool_calls = request.parallel_tool_calls;
  ResponseHeader header = response_header(*service, fields, plan.request_id);
  header.logprobs = request.logprobs;
  header.num_top_logprobs = request.top_logprobs;
  auto format = std::make_unique<ChatFormat>(header, service->context.tokenizer, header.token_ids ? prompt->ids : std::vector<int32_t>{});

  std::vector<ChoiceRequest> choices;
  add_choices(*service, fields, plan, std::move(*prompt), choices);
  auto generation = Generation::submit(*service->context.engine, service->metrics, std::move(choices), fields.n);
  if (!generation) return error_response(generation.error());
  return make_answer(service, std::move(*generation), std::move(format), fields.stream);
}

}  // namespace quern::server
