#include "server/chat_generation.h"

#include <utility>

#include "server/chat_prompt.h"
#include "text/output_grammar.h"

namespace quern::server {
namespace {

/// What the whole output has to look like, from where the prompt ends.
text::OutputShape output_shape(const ChatRequest& request, const PreparedPrompt& prompt) {
  const Conversation& conversation = request.conversation;
  text::OutputShape shape;
  shape.starts_in_reasoning = prompt.starts_in_reasoning;
  shape.content = request.generation.content_format;
  shape.parallel_calls = request.parallel_tool_calls;
  if (request.tools == nullptr) return shape;
  for (size_t i = 0; i < conversation.tools.size(); ++i) {
    const Json& function = conversation.tools[i]["function"];
    text::CallableFunction callable;
    callable.name = function["name"].get<std::string>();
    if (const auto parameters = function.find("parameters"); parameters != function.end()) callable.parameters = *parameters;
    const auto strict = function.find("strict");
    callable.strict = strict != function.end() && *strict == true;
    callable.field = fmt::format("tools[{}].function.parameters", i);
    if (!conversation.forced_call || conversation.forced_call->empty() || *conversation.forced_call == callable.name)
      shape.functions.push_back(std::move(callable));
  }
  if (conversation.forced_call) {
    shape.content.reset();  // the answer is a call
    shape.calls = conversation.forced_call->empty() ? text::OutputShape::Calls::kForced : text::OutputShape::Calls::kNamed;
  }
  return shape;
}

}  // namespace

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
  ASSIGN_OR_RETURN(plan.grammar, service.constraints.compiled(output_shape(request, prompt)));
  std::vector<ChoiceRequest> choices;
  add_choices(service, request.generation, plan, std::move(prompt), choices);
  return Generation::submit(*service.context.engine, service.metrics, std::move(choices), request.generation.n);
}

}  // namespace quern::server
