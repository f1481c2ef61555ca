#include "server/responses_request.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/structured_output.h"
#include "text/chat_messages.h"

namespace quern::server {
namespace {

constexpr size_t kMaxItems = 16384;

template <class... Args>
Error item_error(ErrorCode code, std::string field, fmt::format_string<Args...> format, Args&&... args) {
  std::string message = fmt::format("{}: {}", field, fmt::format(format, std::forward<Args>(args)...));
  return Error{code, std::move(message), std::move(field)};
}

const Json* find_member(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

Result<std::string> string_member(const Json& object, const char* name, const std::string& field) {
  const Json* value = find_member(object, name);
  if (value == nullptr || !value->is_string()) return item_error(ErrorCode::kInvalidArgument, fmt::format("{}.{}", field, name), "expected a string");
  return value->get<std::string>();
}

/// Items one after the other become messages. Reasoning, text and calls of one turn of the assistant belong to one message.
class MessageBuilder {
 public:
  /// own: the items are the server's.
  explicit MessageBuilder(bool own) : own_(own) {}

  Result<void> add(const Json& item, const std::string& field) {
    if (!item.is_object()) return item_error(ErrorCode::kInvalidArgument, field, "expected an object, found {}", json_kind(item));
    const Json* type = find_member(item, "type");
    if (type != nullptr && !type->is_string()) return item_error(ErrorCode::kInvalidArgument, field + ".type", "expected a string");
    const std::string name = type == nullptr ? "message" : type->get<std::string>();
    if (name == "message") return add_message(item, field);
    if (name == "reasoning") return add_reasoning(item, field);
    if (name == "function_call") return add_call(item, field);
    if (name == "function_call_output") return add_result(item, field);
    return item_error(ErrorCode::kUnsupported, field + ".type",
                      "items of type \"{}\" are not supported, only message, reasoning, function_call and function_call_output", name);
  }
  Json take() {
    flush();
    return std::exchange(messages_, Json::array());
  }

 private:
  Result<void> add_message(const Json& item, const std::string& field) {
    ASSIGN_OR_RETURN(const std::string role, string_member(item, "role", field));
    static constexpr std::array<std::string_view, 4> kRoles = {"user", "assistant", "system", "developer"};
    if (std::ranges::find(kRoles, role) == kRoles.end()) {
      return item_error(ErrorCode::kInvalidArgument, field + ".role", "unknown role \"{}\"; expected user, assistant, system or developer", role);
    }
    const Json* content = find_member(item, "content");
    if (content == nullptr) return item_error(ErrorCode::kInvalidArgument, field + ".content", "is required");
    ASSIGN_OR_RETURN(std::string text, text::content_text(*content, field + ".content"));
    if (role != "assistant") {
      flush();
      messages_.push_back({{"role", role}, {"content", std::move(text)}});
      return {};
    }
    if (turn_.contains("content") && !turn_.contains("tool_calls")) flush();  // another message of the assistant
    turn_["content"] = turn_.value("content", "") + text;
    return {};
  }

  Result<void> add_reasoning(const Json& item, const std::string& field) {
    std::string text;
    for (const char* list : {"content", "summary"}) {
      const Json* parts = find_member(item, list);
      if (parts == nullptr || !text.empty()) continue;
      const std::string parts_field = fmt::format("{}.{}", field, list);
      if (!parts->is_array()) return item_error(ErrorCode::kInvalidArgument, parts_field, "expected a list, found {}", json_kind(*parts));
      for (size_t i = 0; i < parts->size(); ++i) {
        const std::string part_field = fmt::format("{}[{}]", parts_field, i);
        if (!(*parts)[i].is_object()) return item_error(ErrorCode::kInvalidArgument, part_field, "expected an object, found {}", json_kind((*parts)[i]));
        ASSIGN_OR_RETURN(const std::string part, string_member((*parts)[i], "text", part_field));
        text += part;
      }
    }
    if (turn_.contains("content") || turn_.contains("tool_calls")) flush();
    if (!text.empty()) turn_["reasoning_content"] = turn_.value("reasoning_content", "") + text;
    return {};
  }

  Result<void> add_call(const Json& item, const std::string& field) {
    ASSIGN_OR_RETURN(std::string id, string_member(item, "call_id", field));
    ASSIGN_OR_RETURN(std::string name, string_member(item, "name", field));
    ASSIGN_OR_RETURN(std::string arguments, string_member(item, "arguments", field));
    const bool blank = arguments.find_first_not_of(" \t\r\n") == std::string::npos;
    if (const auto parsed = parse_json(arguments, "arguments"); !own_ && !blank && (!parsed || !parsed->is_object())) {
      return item_error(ErrorCode::kInvalidArgument, field + ".arguments", "expected a string with a JSON object");
    }
    Json call = {{"id", std::move(id)}, {"type", "function"}, {"function", {{"name", std::move(name)}, {"arguments", std::move(arguments)}}}};
    turn_["tool_calls"].push_back(std::move(call));
    return {};
  }

  Result<void> add_result(const Json& item, const std::string& field) {
    ASSIGN_OR_RETURN(std::string id, string_member(item, "call_id", field));
    const Json* output = find_member(item, "output");
    if (output == nullptr) return item_error(ErrorCode::kInvalidArgument, field + ".output", "is required");
    ASSIGN_OR_RETURN(std::string text, text::content_text(*output, field + ".output"));
    flush();
    messages_.push_back({{"role", "tool"}, {"tool_call_id", std::move(id)}, {"content", std::move(text)}});
    return {};
  }

  void flush() {
    if (turn_.empty()) return;
    Json message = {{"role", "assistant"}};
    message.update(turn_);
    messages_.push_back(std::move(message));
    turn_ = Json::object();
  }

  bool own_;
  Json messages_ = Json::array();
  Json turn_ = Json::object();  // of the assistant, so far
};

Result<void> read_input(JsonFields& fields, ResponsesRequest& request) {
  const Json* input = fields.find("input");
  if (input == nullptr) {
    fields.fail("input", "is required");
    return {};
  }
  if (input->is_string()) {
    request.input_items.push_back({{"type", "message"}, {"role", "user"}, {"content", Json::array({{{"type", "input_text"}, {"text", *input}}})}});
  } else if (!input->is_array()) {
    fields.fail("input", "expected a string or a list of items, found {}", json_kind(*input));
  } else if (input->empty()) {
    fields.fail("input", "the list is empty");
  } else if (input->size() > kMaxItems) {
    fields.fail("input", "{} items, at most {} are allowed", input->size(), kMaxItems);
  } else {
    request.input_items = *input;
  }
  MessageBuilder builder(false);
  for (size_t i = 0; i < request.input_items.size(); ++i) RETURN_IF_ERROR(builder.add(request.input_items[i], fmt::format("input[{}]", i)));
  request.messages = builder.take();
  return {};
}

/// Flat, as this API has them, to nested, as chats and templates have them.
Result<void> read_tools(JsonFields& fields, ResponsesRequest& request) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr) return {};
  request.tools = *tools;
  Json nested = Json::array();
  for (size_t i = 0; i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string field = fmt::format("tools[{}]", i);
    if (!tool.is_object()) return item_error(ErrorCode::kInvalidArgument, field, "expected an object, found {}", json_kind(tool));
    ASSIGN_OR_RETURN(const std::string type, string_member(tool, "type", field));
    if (type != "function") {
      return item_error(ErrorCode::kUnsupported, field + ".type",
                        "there is no built-in tool \"{}\" here, only \"function\": call it yourself and send the output back", type);
    }
    ASSIGN_OR_RETURN(const std::string name, string_member(tool, "name", field));
    Json function = {{"name", name}};
    for (const char* member : {"description", "parameters", "strict"}) {
      if (const Json* value = find_member(tool, member)) function[member] = *value;
    }
    nested.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  request.chat.conversation.tools = std::move(nested);
  return {};
}

/// {"type": "allowed_tools"}: the others are taken away.
void allow_tools(const Json& choice, JsonFields& fields, Conversation& conversation, ToolChoice& out) {
  JsonFields members(choice, "tool_choice.");
  const auto mode = members.string("mode", 16).value_or("auto");
  const Json* allowed = members.array("tools");
  if (allowed == nullptr || (mode != "auto" && mode != "required")) {
    return fields.fail("tool_choice", "expected {{\"type\": \"allowed_tools\", \"mode\": \"auto\" or \"required\", \"tools\": [...]}}");
  }
  Json kept = Json::array();
  for (const Json& tool : conversation.tools) {
    const bool named = std::ranges::any_of(*allowed, [&](const Json& a) { return a.is_object() && a.value("name", Json()) == tool["function"]["name"]; });
    if (named) kept.push_back(tool);
  }
  conversation.tools = std::move(kept);
  if (mode == "required") out.kind = ToolChoice::Kind::kRequired;
}

void read_tool_choice(JsonFields& fields, ResponsesRequest& request) {
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  request.tool_choice = *choice;
  ToolChoice out;
  if (*choice == "none") {
    out.kind = ToolChoice::Kind::kNone;
  } else if (*choice == "required") {
    out.kind = ToolChoice::Kind::kRequired;
  } else if (choice->is_object()) {
    JsonFields members(*choice, "tool_choice.");
    const std::string type = members.string("type", 64).value_or("");
    const auto name = members.string("name", 1024);
    if (type == "allowed_tools") {
      allow_tools(*choice, fields, request.chat.conversation, out);
    } else if (type != "function") {
      return fields.unsupported("tool_choice", "type \"{}\" is not supported, only \"function\" and \"allowed_tools\"", type);
    } else if (!name) {
      return fields.fail("tool_choice", "expected {{\"type\": \"function\", \"name\": ...}}");
    } else {
      out = {ToolChoice::Kind::kNamed, *name};
    }
  } else if (*choice != "auto") {
    return fields.fail("tool_choice", "expected \"auto\", \"none\", \"required\" or a function");
  }
  apply_tool_choice(out, fields, request.chat.conversation);
}

void read_reasoning(JsonFields& fields, ResponsesRequest& request) {
  Conversation& conversation = request.chat.conversation;
  if (const Json* kwargs = fields.object("chat_template_kwargs")) conversation.template_kwargs = *kwargs;
  if (const auto thinking = fields.boolean("enable_thinking"); thinking && !conversation.template_kwargs.contains("enable_thinking")) {
    conversation.template_kwargs["enable_thinking"] = *thinking;
  }
  const Json* reasoning = fields.object("reasoning");
  if (reasoning == nullptr) return;
  JsonFields members(*reasoning, "reasoning.");
  const auto effort = members.string("effort", 64);
  members.string("summary", 64);  // there are none: the reasoning itself is given
  if (const auto status = members.status(); !status) return fields.fail("reasoning", "{}", status.error().message);
  if (effort) set_reasoning_effort(*effort, conversation);
  request.reasoning = *reasoning;
}

void read_text(JsonFields& fields, ResponsesRequest& request) {
  const Json* text = fields.object("text");
  if (text == nullptr) return;
  request.text = *text;
  const Json* format = find_member(*text, "format");
  if (format == nullptr) return;
  if (auto content = read_format_object(*format, "text.format", fields)) request.chat.generation.content_format = std::move(content);
}

/// What the answer could additionally hold. Encrypted reasoning is not made, since reasoning itself is in the answer and may come back.
void read_include(JsonFields& fields) {
  const Json* include = fields.array("include");
  if (include == nullptr) return;
  static constexpr std::array<std::string_view, 6> kWithoutEffect = {
      "reasoning.encrypted_content",    "file_search_call.results",      "web_search_call.results",
      "web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs"};
  for (const Json& one : *include) {
    if (!one.is_string()) return fields.fail("include", "expected a list of strings, found {} in it", json_kind(one));
    const auto& name = one.get_ref<const std::string&>();
    if (name == "message.output_text.logprobs") {
      return fields.unsupported("include", "\"{}\" is not supported; /v1/chat/completions gives log-probabilities", name);
    }
    if (std::ranges::find(kWithoutEffect, name) == kWithoutEffect.end()) return fields.fail("include", "unknown value \"{}\"", name.substr(0, 64));
  }
}

void read_metadata(JsonFields& fields, ResponsesRequest& request) {
  const Json* metadata = fields.object("metadata");
  if (metadata == nullptr) return;
  if (metadata->size() > 16) return fields.fail("metadata", "{} entries, at most 16 are allowed", metadata->size());
  for (const auto& [key, value] : metadata->items()) {
    if (!value.is_string()) return fields.fail("metadata", "\"{}\": expected a string, found {}", key.substr(0, 64), json_kind(value));
    if (key.size() > 64 || value.get_ref<const std::string&>().size() > 512) {
      return fields.fail("metadata", "keys have at most 64 bytes and values 512");
    }
  }
  request.metadata = *metadata;
}

void refuse_what_is_not_supported(JsonFields& fields, const GenerationFields& generation) {
  if (fields.boolean("background") == true) fields.unsupported("background", "responses are made while the client waits; use stream");
  for (const char* name : {"conversation", "prompt", "context_management", "moderation"}) {
    if (fields.find(name) != nullptr) fields.unsupported(name, "is not supported");
  }
  if (fields.integer("top_logprobs", 0, kMaxLogprobs).value_or(0) > 0) {
    fields.unsupported("top_logprobs", "is not supported; /v1/chat/completions gives log-probabilities");
  }
  require_plain_output(generation, fields);
}

}  // namespace

Result<ResponsesRequest> parse_responses_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  ResponsesRequest request;
  RETURN_IF_ERROR(read_input(fields, request));
  request.instructions = fields.string("instructions", SIZE_MAX) ? Json(body["instructions"]) : Json();
  request.previous_response_id = fields.string("previous_response_id", 256).value_or("");
  RETURN_IF_ERROR(read_tools(fields, request));
  read_reasoning(fields, request);
  read_tool_choice(fields, request);
  read_include(fields);
  read_metadata(fields, request);
  request.chat.generation = read_generation_fields(fields, defaults, limits);
  read_text(fields, request);
  if (const auto max_tokens = fields.integer("max_output_tokens", 1, INT32_MAX)) request.chat.max_tokens = static_cast<int32_t>(*max_tokens);
  if (request.chat.max_tokens && request.chat.generation.sampling.min_tokens > *request.chat.max_tokens) {
    fields.fail("min_tokens", "{} is more than max_output_tokens, {}", request.chat.generation.sampling.min_tokens, *request.chat.max_tokens);
  }
  request.chat.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  request.store = fields.boolean("store").value_or(true);
  if (const auto truncation = fields.string("truncation", 16)) {
    if (*truncation != "auto" && *truncation != "disabled") fields.fail("truncation", "expected \"auto\" or \"disabled\"");
    request.truncate = *truncation == "auto";
  }
  if (const auto user = fields.string("user", 1024)) request.user = *user;
  refuse_what_is_not_supported(fields, request.chat.generation);
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(text::ToolSchemas tools, text::ToolSchemas::parse(request.chat.conversation.tools));
  if (!tools.empty()) request.chat.tools = std::make_shared<const text::ToolSchemas>(std::move(tools));
  return request;
}

void complete_conversation(ResponsesRequest& request, const Json& earlier) {
  Json& messages = request.chat.conversation.messages;
  messages = Json::array();
  if (!request.instructions.is_null()) messages.push_back({{"role", "system"}, {"content", request.instructions}});
  messages.insert(messages.end(), earlier.begin(), earlier.end());
  messages.insert(messages.end(), request.messages.begin(), request.messages.end());
}

Json output_messages(const Json& output) {
  MessageBuilder builder(true);
  for (const Json& item : output) CHECK(builder.add(item, "output").has_value());
  return builder.take();
}

}  // namespace quern::server
