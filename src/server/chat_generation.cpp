#include "server/chat_generation.h"

#include <utility>

#include "server/chat_prompt.h"

namespace quern::server {

Result<PreparedPrompt> prepare_chat(const Service& service, const ChatRequest& request) {
  ASSIGN_OR_RETURN(PreparedPrompt prompt, render_chat(service, request.conversation));
  truncate_prompt(service, request.generation, request.max_tokens.value_or(1), prompt);
  return prompt;
}

std::optional<Error> check_chat_window(const Service& service, const ChatRequest& request, std::string_view prompt_field, size_t prompt_tokens) {
  return check_window(service, prompt_field, prompt_tokens, request.max_tokens.value_or(1));
}

Result<std::unique_ptr<Generation>> submit_chat(Service& service, const ChatRequest& request, std::string request_id, PreparedPrompt prompt) {
  GenerationPlan plan;
  plan.request_id = std::move(request_id);
  plan.max_tokens = request.max_tokens.value_or(service.window() - static_cast<int32_t>(prompt.ids.size()));
  plan.num_logprobs = request.logprobs ? request.top_logprobs : -1;
  plan.split_reasoning = true;
  plan.tools = request.tools;
  plan.parallel_tool_calls = request.parallel_tool_calls;
  std::vector<ChoiceRequest> choices;
  add_choices(service, request.generation, plan, std::move(prompt), choices);
  return Generation::submit(*service.context.engine, service.metrics, std::move(choices), request.generation.n);
}

}  // namespace quern::server
