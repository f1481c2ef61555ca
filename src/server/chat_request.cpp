#include "server/chat_request.h"

#include <algorithm>

namespace quern::server {
namespace {

constexpr size_t kMaxMessages = 16384;

ToolChoice read_tool_choice(JsonFields& fields) {
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr || *choice == "auto") return {};
  if (*choice == "none") return {ToolChoice::Kind::kNone, {}};
  if (*choice == "required") return {ToolChoice::Kind::kRequired, {}};
  if (!choice->is_object()) {
    fields.fail("tool_choice", "expected \"auto\", \"none\", \"required\" or a function");
    return {};
  }
  JsonFields members(*choice, "tool_choice.");
  const auto type = members.string("type", 64);
  if (type && *type != "function") {
    fields.unsupported("tool_choice", "type \"{}\" is not supported, only \"function\"", *type);
    return {};
  }
  const Json* function = members.object("function");
  const auto name = function != nullptr ? JsonFields(*function, "tool_choice.function.").string("name", 1024) : std::nullopt;
  if (!name) fields.fail("tool_choice", "expected {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}");
  return {ToolChoice::Kind::kNamed, name.value_or("")};
}

}  // namespace

void apply_tool_choice(const ToolChoice& choice, JsonFields& fields, Conversation& conversation) {
  if (choice.kind == ToolChoice::Kind::kAuto) return;
  if (choice.kind == ToolChoice::Kind::kNone) {
    conversation.tools = nullptr;
    return;
  }
  const auto schemas = text::ToolSchemas::parse(conversation.tools);
  if (!schemas) return;  // told by the reader of the tools
  if (choice.kind == ToolChoice::Kind::kRequired) {
    if (schemas->empty()) return fields.fail("tool_choice", "a call is required, which needs tools");
  } else if (!schemas->has(choice.name)) {
    return fields.fail("tool_choice", "there is no tool \"{}\"", choice.name);
  }
  conversation.forced_call = choice.name;
  if (conversation.continue_final_message) fields.fail("tool_choice", "a forced call cannot continue the final message");
}

void set_reasoning_effort(const std::string& effort, Conversation& conversation) {
  Json& kwargs = conversation.template_kwargs;
  if (!kwargs.contains("reasoning_effort")) kwargs["reasoning_effort"] = effort;
  if (effort == "none" && !kwargs.contains("enable_thinking")) kwargs["enable_thinking"] = false;
}

Conversation read_conversation(JsonFields& fields) {
  Conversation conversation;
  const Json* messages = fields.array("messages");
  if (messages == nullptr) {
    fields.fail("messages", "is required");
  } else if (messages->empty()) {
    fields.fail("messages", "the list is empty");
  } else if (messages->size() > kMaxMessages) {
    fields.fail("messages", "{} messages, at most {} are allowed", messages->size(), kMaxMessages);
  } else {
    conversation.messages = *messages;
  }
  if (const Json* tools = fields.array("tools")) conversation.tools = *tools;
  if (const Json* kwargs = fields.object("chat_template_kwargs")) conversation.template_kwargs = *kwargs;
  if (const auto thinking = fields.boolean("enable_thinking")) {
    if (!conversation.template_kwargs.contains("enable_thinking")) conversation.template_kwargs["enable_thinking"] = *thinking;
  }
  if (const auto effort = fields.string("reasoning_effort", 64)) {
    set_reasoning_effort(*effort, conversation);
  }
  const auto add_generation_prompt = fields.boolean("add_generation_prompt");
  conversation.continue_final_message = fields.boolean("continue_final_message").value_or(false);
  if (conversation.continue_final_message && add_generation_prompt == true) {
    fields.fail("continue_final_message", "cannot be true together with add_generation_prompt");
  }
  conversation.add_generation_prompt = add_generation_prompt.value_or(!conversation.continue_final_message);
  apply_tool_choice(read_tool_choice(fields), fields, conversation);
  return conversation;
}

Result<ChatRequest> parse_chat_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  ChatRequest request;
  request.conversation = read_conversation(fields);
  request.generation = read_generation_fields(fields, defaults, limits);
  auto max_tokens = fields.integer("max_completion_tokens", 1, INT32_MAX);
  if (const auto old_name = fields.integer("max_tokens", 1, INT32_MAX); !max_tokens) max_tokens = old_name;
  if (max_tokens) request.max_tokens = static_cast<int32_t>(*max_tokens);
  request.logprobs = fields.boolean("logprobs").value_or(false);
  request.top_logprobs = static_cast<int32_t>(fields.integer("top_logprobs", 0, kMaxLogprobs).value_or(0));
  if (request.top_logprobs > 0 && !request.logprobs) fields.fail("top_logprobs", "only allowed with \"logprobs\": true");
  if (request.max_tokens && request.generation.sampling.min_tokens > *request.max_tokens) {
    fields.fail("min_tokens", "{} is more than max_tokens, {}", request.generation.sampling.min_tokens, *request.max_tokens);
  }
  if (fields.find("functions") != nullptr) fields.unsupported("functions", "is not supported; use tools");
  if (fields.boolean("echo") == true) fields.unsupported("echo", "is not supported here; /v1/completions has it");
  for (const char* name : {"chat_template", "documents", "audio", "web_search_options"}) {
    if (fields.find(name) != nullptr) fields.unsupported(name, "is not supported");
  }
  if (const Json* modalities = fields.array("modalities");
      modalities != nullptr && std::ranges::any_of(*modalities, [](const Json& m) { return m != "text"; })) {
    fields.unsupported("modalities", "only text is supported");
  }
  request.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(text::ToolSchemas tools, text::ToolSchemas::parse(request.conversation.tools));
  if (!tools.empty()) request.tools = std::make_shared<const text::ToolSchemas>(std::move(tools));
  return request;
}

}  // namespace quern::server
