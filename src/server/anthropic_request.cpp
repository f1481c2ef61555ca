#include "server/anthropic_request.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/structured_output.h"

namespace quern::server {
namespace {

constexpr size_t kMaxMessages = 16384;

template <class... Args>
Error field_error(ErrorCode code, std::string field, fmt::format_string<Args...> format, Args&&... args) {
  std::string message = fmt::format("{}: {}", field, fmt::format(format, std::forward<Args>(args)...));
  return Error{code, std::move(message), std::move(field)};
}
template <class... Args>
Error wrong(std::string field, fmt::format_string<Args...> format, Args&&... args) {
  return field_error(ErrorCode::kInvalidArgument, std::move(field), format, std::forward<Args>(args)...);
}

const Json* find_member(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

Result<std::string> string_member(const Json& object, const char* name, const std::string& field) {
  const Json* value = find_member(object, name);
  if (value == nullptr || !value->is_string()) return wrong(fmt::format("{}.{}", field, name), "expected a string");
  return value->get<std::string>();
}

Result<std::string> type_of_block(const Json& block, const std::string& field) {
  if (!block.is_object()) return wrong(field, "expected an object, found {}", json_kind(block));
  return string_member(block, "type", field);
}

Error unsupported_block(const std::string& type, const std::string& field) {
  return field_error(ErrorCode::kUnsupported, field + ".type", "this server takes text only; blocks of type \"{}\" are not supported", type);
}

/// A string, or a list of text blocks.
Result<std::string> text_of(const Json& content, const std::string& field) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return wrong(field, "expected a string or a list of blocks, found {}", json_kind(content));
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string block_field = fmt::format("{}[{}]", field, i);
    ASSIGN_OR_RETURN(const std::string type, type_of_block(content[i], block_field));
    if (type != "text") return unsupported_block(type, block_field);
    ASSIGN_OR_RETURN(const std::string part, string_member(content[i], "text", block_field));
    text += part;
  }
  return text;
}

/// A user's blocks: results of tools first, whatever their place, then the text.
Result<void> add_user(const Json& content, const std::string& field, Json& messages) {
  std::string text;
  bool has_text = false, has_results = false;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string block_field = fmt::format("{}[{}]", field, i);
    const Json& block = content[i];
    ASSIGN_OR_RETURN(const std::string type, type_of_block(block, block_field));
    if (type == "text") {
      ASSIGN_OR_RETURN(const std::string part, string_member(block, "text", block_field));
      text += part;
      has_text = true;
    } else if (type == "tool_result") {
      ASSIGN_OR_RETURN(std::string id, string_member(block, "tool_use_id", block_field));
      std::string result;
      if (const Json* given = find_member(block, "content")) {
        ASSIGN_OR_RETURN(result, text_of(*given, block_field + ".content"));
      }
      // Templates have no place for the mark.
      if (const Json* failed = find_member(block, "is_error"); failed != nullptr && *failed == true) result = "Error: " + result;
      messages.push_back({{"role", "tool"}, {"tool_call_id", std::move(id)}, {"content", std::move(result)}});
      has_results = true;
    } else {
      return unsupported_block(type, block_field);
    }
  }
  if (has_text || !has_results) messages.push_back({{"role", "user"}, {"content", std::move(text)}});
  return {};
}

Result<void> add_assistant(const Json& content, const std::string& field, Json& messages) {
  Json message = {{"role", "assistant"}};
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string block_field = fmt::format("{}[{}]", field, i);
    const Json& block = content[i];
    ASSIGN_OR_RETURN(const std::string type, type_of_block(block, block_field));
    if (type == "text") {
      ASSIGN_OR_RETURN(const std::string text, string_member(block, "text", block_field));
      message["content"] = message.value("content", "") + text;
    } else if (type == "thinking") {
      ASSIGN_OR_RETURN(const std::string thinking, string_member(block, "thinking", block_field));
      message["reasoning_content"] = message.value("reasoning_content", "") + thinking;
    } else if (type == "tool_use") {
      ASSIGN_OR_RETURN(std::string id, string_member(block, "id", block_field));
      ASSIGN_OR_RETURN(std::string name, string_member(block, "name", block_field));
      const Json* input = find_member(block, "input");
      if (input != nullptr && !input->is_object()) return wrong(block_field + ".input", "expected an object, found {}", json_kind(*input));
      Json function = {{"name", std::move(name)}, {"arguments", input == nullptr ? Json::object() : *input}};
      message["tool_calls"].push_back({{"id", std::move(id)}, {"type", "function"}, {"function", std::move(function)}});
    } else {
      return unsupported_block(type, block_field);
    }
  }
  messages.push_back(std::move(message));
  return {};
}

Result<void> read_messages(JsonFields& fields, Conversation& conversation) {
  Json& out = conversation.messages;
  if (const Json* system = fields.find("system")) {
    ASSIGN_OR_RETURN(std::string text, text_of(*system, "system"));
    if (!text.empty()) out.push_back({{"role", "system"}, {"content", std::move(text)}});
  }
  const Json* messages = fields.array("messages");
  if (messages == nullptr) {
    fields.fail("messages", "is required");
    return {};
  }
  if (messages->empty()) fields.fail("messages", "the list is empty");
  if (messages->size() > kMaxMessages) fields.fail("messages", "{} messages, at most {} are allowed", messages->size(), kMaxMessages);
  RETURN_IF_ERROR(fields.status());
  std::string role;
  for (size_t i = 0; i < messages->size(); ++i) {
    const Json& message = (*messages)[i];
    const std::string field = fmt::format("messages[{}]", i);
    if (!message.is_object()) return wrong(field, "expected an object, found {}", json_kind(message));
    ASSIGN_OR_RETURN(role, string_member(message, "role", field));
    const Json* content = find_member(message, "content");
    if (content == nullptr) return wrong(field + ".content", "is required");
    if (role != "user" && role != "assistant" && role != "system") {
      return wrong(field + ".role", "unknown role \"{}\"; expected user or assistant", role.substr(0, 64));
    }
    if (content->is_string() || role == "system") {
      ASSIGN_OR_RETURN(std::string text, text_of(*content, field + ".content"));
      out.push_back({{"role", role}, {"content", std::move(text)}});
    } else if (!content->is_array()) {
      return wrong(field + ".content", "expected a string or a list of blocks, found {}", json_kind(*content));
    } else {
      RETURN_IF_ERROR(role == "user" ? add_user(*content, field + ".content", out) : add_assistant(*content, field + ".content", out));
    }
  }
  if (role == "assistant") {
    if (out.back().contains("tool_calls")) return wrong("messages", "the last one has tool calls, whose results are missing");
    conversation.continue_final_message = true;
    conversation.add_generation_prompt = false;
  }
  return {};
}

Result<void> read_tools(JsonFields& fields, Conversation& conversation) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr) return {};
  Json nested = Json::array();
  for (size_t i = 0; i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string field = fmt::format("tools[{}]", i);
    if (!tool.is_object()) return wrong(field, "expected an object, found {}", json_kind(tool));
    if (const Json* type = find_member(tool, "type"); type != nullptr && *type != "custom") {
      return field_error(ErrorCode::kUnsupported, field + ".type", "there are no tools of Anthropic here, only your own (\"custom\")");
    }
    ASSIGN_OR_RETURN(const std::string name, string_member(tool, "name", field));
    Json function = {{"name", name}};
    if (const Json* description = find_member(tool, "description")) function["description"] = *description;
    const Json* schema = find_member(tool, "input_schema");
    if (schema != nullptr && !schema->is_object()) return wrong(field + ".input_schema", "expected an object, found {}", json_kind(*schema));
    if (schema != nullptr) function["parameters"] = *schema;
    if (const Json* strict = find_member(tool, "strict")) function["strict"] = *strict;
    nested.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  conversation.tools = std::move(nested);
  return {};
}

void read_tool_choice(JsonFields& fields, ChatRequest& request) {
  const Json* choice = fields.object("tool_choice");
  if (choice == nullptr) return;
  JsonFields members(*choice, "tool_choice.");
  const std::string type = members.string("type", 64).value_or("");
  request.parallel_tool_calls = !members.boolean("disable_parallel_tool_use").value_or(false);
  const auto name = members.string("name", 1024);
  if (const auto status = members.status(); !status) return fields.fail("tool_choice", "{}", status.error().message);
  ToolChoice out;
  if (type == "none") {
    out.kind = ToolChoice::Kind::kNone;
  } else if (type == "any") {
    out.kind = ToolChoice::Kind::kRequired;
  } else if (type == "tool" && name) {
    out = {ToolChoice::Kind::kNamed, *name};
  } else if (type != "auto") {
    return fields.fail("tool_choice", "expected {{\"type\": \"auto\", \"any\" or \"none\"}} or {{\"type\": \"tool\", \"name\": ...}}");
  }
  apply_tool_choice(out, fields, request.conversation);
}

void read_thinking(JsonFields& fields, Conversation& conversation) {
  Json& kwargs = conversation.template_kwargs;
  if (const Json* given = fields.object("chat_template_kwargs")) kwargs = *given;
  bool on = false;
  if (const Json* thinking = fields.object("thinking")) {
    JsonFields members(*thinking, "thinking.");
    const std::string type = members.string("type", 64).value_or("");
    members.integer("budget_tokens", 1, INT32_MAX);  // not enforced: the model thinks as long as it thinks
    if (const auto status = members.status(); !status) return fields.fail("thinking", "{}", status.error().message);
    if (type != "enabled" && type != "adaptive" && type != "disabled") {
      return fields.fail("thinking", "type: expected \"enabled\", \"adaptive\" or \"disabled\"");
    }
    on = type != "disabled";
  }
  if (!kwargs.contains("enable_thinking")) kwargs["enable_thinking"] = on;
  const Json* config = fields.object("output_config");
  if (config == nullptr) return;
  JsonFields members(*config, "output_config.");
  const auto effort = members.string("effort", 64);
  if (const auto status = members.status(); !status) return fields.fail("output_config", "{}", status.error().message);
  if (effort && !kwargs.contains("reasoning_effort")) kwargs["reasoning_effort"] = *effort;
}

/// output_config.format, and output_format as it was called before.
void read_output_format(JsonFields& fields, GenerationFields& generation) {
  const Json* config = fields.object("output_config");
  const Json* nested = config != nullptr ? JsonFields(*config).find("format") : nullptr;
  const Json* format = nested != nullptr ? nested : fields.find("output_format");
  if (format == nullptr) return;
  if (auto content = read_format_object(*format, nested != nullptr ? "output_config.format" : "output_format", fields)) generation.content_format = std::move(content);
}

/// Of both endpoints.
Result<void> read_conversation(JsonFields& fields, ChatRequest& request) {
  RETURN_IF_ERROR(read_messages(fields, request.conversation));
  RETURN_IF_ERROR(read_tools(fields, request.conversation));
  read_thinking(fields, request.conversation);
  read_tool_choice(fields, request);
  if (fields.find("container") != nullptr) fields.unsupported("container", "is not supported");
  if (const Json* servers = fields.array("mcp_servers"); servers != nullptr && !servers->empty()) {
    fields.unsupported("mcp_servers", "is not supported; call them yourself, as tools");
  }
  fields.object("context_management");  // what a client allows the server to leave out of long conversations: nothing is left out
  return {};
}

Result<ChatRequest> finished(JsonFields& fields, ChatRequest request) {
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(text::ToolSchemas tools, text::ToolSchemas::parse(request.conversation.tools));
  if (!tools.empty()) request.tools = std::make_shared<const text::ToolSchemas>(std::move(tools));
  return request;
}

void read_stop_sequences(JsonFields& fields, GenerationFields& generation) {
  const Json* stops = fields.array("stop_sequences");
  if (stops == nullptr) return;
  if (stops->size() + generation.stop.size() > kMaxStopStrings) {
    return fields.fail("stop_sequences", "{} stop sequences, at most {} are allowed", stops->size() + generation.stop.size(), kMaxStopStrings);
  }
  for (const Json& stop : *stops) {
    if (!stop.is_string()) return fields.fail("stop_sequences", "expected a list of strings, found {} in it", json_kind(stop));
    const auto& text = stop.get_ref<const std::string&>();
    if (text.empty() || text.size() > kMaxStopBytes) return fields.fail("stop_sequences", "a stop sequence has 1 to {} bytes, not {}", kMaxStopBytes, text.size());
    generation.stop.push_back(text);
  }
}

}  // namespace

Result<ChatRequest> parse_messages_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  ChatRequest request;
  RETURN_IF_ERROR(read_conversation(fields, request));
  request.generation = read_generation_fields(fields, defaults, limits);
  read_output_format(fields, request.generation);
  read_stop_sequences(fields, request.generation);
  const auto max_tokens = fields.integer("max_tokens", 1, INT32_MAX);
  if (!max_tokens) fields.fail("max_tokens", "is required");
  request.max_tokens = static_cast<int32_t>(max_tokens.value_or(1));
  if (max_tokens && request.generation.sampling.min_tokens > *max_tokens) {
    fields.fail("min_tokens", "{} is more than max_tokens, {}", request.generation.sampling.min_tokens, *max_tokens);
  }
  require_plain_output(request.generation, fields);
  return finished(fields, std::move(request));
}

Result<ChatRequest> parse_count_tokens_request(const Json& body, FieldLog* log) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  ChatRequest request;
  request.generation.model = fields.string("model", 1024).value_or("");
  RETURN_IF_ERROR(read_conversation(fields, request));
  return finished(fields, std::move(request));
}

}  // namespace quern::server
