#include "text/chat_messages.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace quern::text {
namespace {

template <class... Args>
Error field_error(std::string field, fmt::format_string<Args...> format, Args&&... args) {
  std::string message = fmt::format("{}: {}", field, fmt::format(format, std::forward<Args>(args)...));
  return Error{ErrorCode::kInvalidArgument, std::move(message), std::move(field)};
}

/// The member, or null when it is missing or null.
const Json* find_member(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

Result<std::string> text_of_part(const Json& part, const std::string& field) {
  if (part.is_string()) return part.get<std::string>();
  if (!part.is_object()) return field_error(field, "expected an object with type and text, found {}", part.type_name());
  const Json* type = find_member(part, "type");
  if (!type || !type->is_string()) return field_error(field + ".type", "expected a string");
  const auto& name = type->get_ref<const std::string&>();
  if (name == "text" || name == "input_text" || name == "output_text" || name == "refusal") {
    const char* const member = name == "refusal" ? "refusal" : "text";
    const Json* text = find_member(part, member);
    if (!text || !text->is_string()) return field_error(fmt::format("{}.{}", field, member), "expected a string");
    return text->get<std::string>();
  }
  Error error = field_error(field + ".type", "this server takes text only; parts of type \"{}\" are not supported", name);
  error.code = ErrorCode::kUnsupported;
  return error;
}

Result<Json> normalize_tool_call(const Json& call, const std::string& field) {
  if (!call.is_object()) return field_error(field, "expected an object, found {}", call.type_name());
  Json result = call;
  const bool nested = find_member(call, "function") != nullptr;
  const std::string function_field = nested ? field + ".function" : field;
  Json& function = nested ? result["function"] : result;
  if (!function.is_object()) return field_error(function_field, "expected an object, found {}", function.type_name());
  if (const Json* name = find_member(function, "name"); !name || !name->is_string()) {
    return field_error(function_field + ".name", "expected a string");
  }
  const auto arguments = function.find("arguments");
  if (arguments == function.end()) return result;
  const std::string arguments_field = function_field + ".arguments";
  if (arguments->is_string()) {
    const std::string text = arguments->get<std::string>();
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
      *arguments = Json::object();
    } else {
      auto parsed = parse_json(text, arguments_field);
      if (!parsed) return Error{ErrorCode::kInvalidArgument, parsed.error().message, arguments_field};
      *arguments = *std::move(parsed);
    }
  }
  if (arguments->is_null()) *arguments = Json::object();
  if (!arguments->is_object())
    return field_error(arguments_field, "expected an object or a string with a JSON object, found {}", arguments->type_name());
  return result;
}

Result<void> normalize_reasoning(Json& message, const std::string& field) {
  std::optional<Json> reasoning;
  for (const char* name : {"reasoning_content", "reasoning"}) {
    const Json* member = find_member(message, name);
    if (!member) continue;
    if (!member->is_string())
      return field_error(fmt::format("{}.{}", field, name), "expected a string or null, found {}", member->type_name());
    if (!reasoning) reasoning = *member;
  }
  message.erase("reasoning");
  if (reasoning) message["reasoning_content"] = *std::move(reasoning);
  return {};
}

Result<void> normalize_tool_calls(Json& message, const std::string& field) {
  const Json* calls = find_member(message, "tool_calls");
  if (!calls) return {};
  if (!calls->is_array()) return field_error(field + ".tool_calls", "expected a list, found {}", calls->type_name());
  Json normalized = Json::array();
  for (size_t i = 0; i < calls->size(); ++i) {
    ASSIGN_OR_RETURN(Json call, normalize_tool_call((*calls)[i], fmt::format("{}.tool_calls[{}]", field, i)));
    normalized.push_back(std::move(call));
  }
  if (normalized.empty())
    message.erase("tool_calls");
  else
    message["tool_calls"] = std::move(normalized);
  return {};
}

Result<Json> normalize_message(const Json& original, const std::string& field) {
  if (!original.is_object()) return field_error(field, "expected an object, found {}", original.type_name());
  const Json* role_member = find_member(original, "role");
  if (!role_member || !role_member->is_string()) return field_error(field + ".role", "expected a string");
  std::string role = role_member->get<std::string>();
  if (role == "developer") role = "system";
  static constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};
  if (std::find(kRoles.begin(), kRoles.end(), role) == kRoles.end()) {
    return field_error(field + ".role", "unknown role \"{}\"; expected system, developer, user, assistant or tool", role);
  }
  if (!original.contains("content") && role != "assistant") return field_error(field + ".content", "is required");

  Json message = Json::object();
  for (const auto& [name, value] : original.items()) {
    if (!value.is_null()) message[name] = value;
  }
  message["role"] = role;
  if (const Json* content = find_member(original, "content")) {
    ASSIGN_OR_RETURN(std::string text, content_text(*content, field + ".content"));
    message["content"] = std::move(text);
  } else if (role != "assistant") {
    message["content"] = "";
  }
  if (role == "assistant") {
    RETURN_IF_ERROR(normalize_reasoning(message, field));
    RETURN_IF_ERROR(normalize_tool_calls(message, field));
  }
  return message;
}

/// The id of the call that a tool message answers; empty without one.
std::string_view answered_call(const Json& message) {
  const Json* id = find_member(message, "tool_call_id");
  return id != nullptr && id->is_string() ? std::string_view(id->get_ref<const std::string&>()) : std::string_view();
}

/// Brings the tool messages behind messages[assistant] into the order of its calls. Those that answer none of them stay behind.
void sort_tool_results(Json& messages, size_t assistant) {
  const Json* calls = find_member(messages[assistant], "tool_calls");
  if (calls == nullptr) return;
  const auto position = [&](const Json& message) {
    const std::string_view answered = answered_call(message);
    for (size_t i = 0; i < calls->size() && !answered.empty(); ++i) {
      const Json* id = find_member((*calls)[i], "id");
      if (id != nullptr && id->is_string() && id->get_ref<const std::string&>() == answered) return i;
    }
    return calls->size();
  };
  const auto begin = messages.begin() + static_cast<std::ptrdiff_t>(assistant) + 1;
  const auto end = std::find_if(begin, messages.end(), [](const Json& message) { return message["role"] != "tool"; });
  std::stable_sort(begin, end, [&](const Json& a, const Json& b) { return position(a) < position(b); });
}

std::string escape_between_tags(std::string_view text, const EscapeText& escape) {
  static constexpr std::array<std::string_view, 4> kTags = {"<think>", "</think>", "<tool_call>", "</tool_call>"};
  std::string out;
  size_t begin = 0;
  for (size_t at = text.find('<'); at != std::string_view::npos; at = text.find('<', at)) {
    const auto tag = std::find_if(kTags.begin(), kTags.end(), [&](std::string_view t) { return text.substr(at).starts_with(t); });
    if (tag == kTags.end()) {
      ++at;
      continue;
    }
    out += escape(text.substr(begin, at - begin));
    out += *tag;
    begin = at += tag->size();
  }
  return out + escape(text.substr(begin));
}

}  // namespace

Result<std::string> content_text(const Json& content, const std::string& field) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return field_error(field, "expected a string, a list of parts or null, found {}", content.type_name());
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    ASSIGN_OR_RETURN(const std::string part, text_of_part(content[i], fmt::format("{}[{}]", field, i)));
    text += part;
  }
  return text;
}

Result<Json> normalize_messages(const Json& messages) {
  if (!messages.is_array()) return field_error("messages", "expected a list, found {}", messages.type_name());
  if (messages.empty()) return field_error("messages", "must not be empty");
  Json system, others = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    ASSIGN_OR_RETURN(Json message, normalize_message(messages[i], fmt::format("messages[{}]", i)));
    if (message["role"] != "system") {
      others.push_back(std::move(message));
    } else if (system.is_null()) {
      system = std::move(message);
    } else {
      auto& text = system["content"].get_ref<std::string&>();
      const auto& more = message["content"].get_ref<const std::string&>();
      if (!text.empty() && !more.empty()) text += "\n\n";
      text += more;
    }
  }
  for (size_t i = 0; i < others.size(); ++i) {
    if (others[i]["role"] == "assistant") sort_tool_results(others, i);
  }
  if (!system.is_null()) others.insert(others.begin(), std::move(system));
  return others;
}

Result<Json> normalize_tools(const Json& tools) {
  if (tools.is_null()) return Json();
  if (!tools.is_array()) return field_error("tools", "expected a list, found {}", tools.type_name());
  for (size_t i = 0; i < tools.size(); ++i) {
    if (!tools[i].is_object()) return field_error(fmt::format("tools[{}]", i), "expected an object, found {}", tools[i].type_name());
  }
  return tools.empty() ? Json() : tools;
}

Json escape_strings(const Json& value, const EscapeText& escape) {
  if (value.is_string()) return escape(value.get_ref<const std::string&>());
  if (value.is_array()) {
    Json result = Json::array();
    for (const Json& item : value) result.push_back(escape_strings(item, escape));
    return result;
  }
  if (value.is_object()) {
    Json result = Json::object();
    for (const auto& [name, member] : value.items()) result[escape(name)] = escape_strings(member, escape);
    return result;
  }
  return value;
}

Json escape_messages(const Json& messages, const EscapeText& escape) {
  Json result = Json::array();
  for (const Json& message : messages) {
    Json escaped = escape_strings(message, escape);
    if (const auto content = message.find("content"); content != message.end() && message["role"] == "assistant") {
      escaped["content"] = escape_between_tags(content->get_ref<const std::string&>(), escape);
    }
    result.push_back(std::move(escaped));
  }
  return result;
}

}  // namespace quern::text
