#include "text/chat_template.h"

#include <algorithm>
#include <array>

#include "base/file.h"

namespace quern::text {
namespace {

/// Marks where the last message's content ends, to find it in the rendered text: a noncharacter, and a space that shows
/// whether the template trims.
constexpr std::string_view kEndOfContent = "\xEF\xB7\x91 ", kEndOfContentTrimmed = "\xEF\xB7\x91";

/// Tokens of tokenizer_config.json under the names that templates know them by.
Json special_tokens_of(const Json& config) {
  Json tokens = Json::object();
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const auto token = config.find(name);
    if (token == config.end()) continue;
    if (token->is_string()) tokens[name] = *token;
    if (token->is_object() && token->contains("content") && (*token)["content"].is_string()) tokens[name] = (*token)["content"];
  }
  return tokens;
}

Result<jinja::Template> parse(std::string_view source, std::string_view where) {
  auto parsed = jinja::Template::parse(source);
  if (!parsed) return parsed.error().with_context(where);
  return parsed;
}

size_t common_prefix(std::string_view a, std::string_view b) {
  auto length = static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  while (length > 0 && length < a.size() && (a[length] & 0xC0) == 0x80) --length;  // not inside a character
  return length;
}

/// The messages up to the first user message, whose content is replaced by one that begins differently. Null without a user.
Json with_other_question(const Json& messages) {
  const auto user = std::find_if(messages.begin(), messages.end(), [](const Json& message) { return message["role"] == "user"; });
  if (user == messages.end()) return Json();
  Json others = Json::array();
  others.insert(others.end(), messages.begin(), user + 1);
  const auto& text = (*user)["content"].get_ref<const std::string&>();
  const size_t first = text.find_first_not_of(" \t\r\n");
  others.back()["content"] = first != std::string::npos && text[first] == '0' ? "1" : "0";
  return others;
}

bool leaves_think_open(std::string_view text) {
  const size_t open = text.rfind("<think>"), close = text.rfind("</think>");
  return open != std::string_view::npos && (close == std::string_view::npos || close < open);
}

}  // namespace

Result<ChatTemplate> ChatTemplate::from_source(std::string_view source, Json special_tokens) {
  ASSIGN_OR_RETURN(jinja::Template main, jinja::Template::parse(source));
  return ChatTemplate(std::move(main), std::nullopt, std::move(special_tokens));
}

Result<ChatTemplate> ChatTemplate::load(const std::filesystem::path& model_dir, const std::optional<std::filesystem::path>& override_file) {
  const auto config_file = model_dir / "tokenizer_config.json", template_file = model_dir / "chat_template.jinja";
  Json config = Json::object();
  if (std::filesystem::exists(config_file)) {
    ASSIGN_OR_RETURN(config, read_json_file(config_file));
    if (!config.is_object()) return invalid_argument("{}: expected a JSON object", config_file.string());
  }
  if (override_file || std::filesystem::exists(template_file)) {
    const auto& file = override_file ? *override_file : template_file;
    ASSIGN_OR_RETURN(const std::string source, read_file(file));
    ASSIGN_OR_RETURN(jinja::Template main, parse(source, file.string()));
    return ChatTemplate(std::move(main), std::nullopt, special_tokens_of(config));
  }
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) {
    return make_error(
        ErrorCode::kNotFound,
        "{} has no chat template, neither chat_template.jinja nor one in tokenizer_config.json; name one with --chat-template",
        model_dir.string());
  }
  const std::string where = config_file.string() + ": chat_template";
  if (found->is_string()) {
    ASSIGN_OR_RETURN(jinja::Template main, parse(found->get_ref<const std::string&>(), where));
    return ChatTemplate(std::move(main), std::nullopt, special_tokens_of(config));
  }
  std::optional<jinja::Template> main, with_tools;
  if (found->is_array()) {
    for (const Json& entry : *found) {
      const auto text = [&](const char* name) {
        return entry.is_object() && entry.contains(name) && entry[name].is_string() ? entry[name].get<std::string>() : "";
      };
      const std::string name = text("name");
      if (name != "default" && name != "tool_use") continue;
      ASSIGN_OR_RETURN(jinja::Template parsed, parse(text("template"), fmt::format("{}, \"{}\"", where, name)));
      (name == "default" ? main : with_tools) = std::move(parsed);
    }
  }
  if (!main) return invalid_argument("{}: expected a text or a list of templates with one named \"default\"", where);
  return ChatTemplate(*std::move(main), std::move(with_tools), special_tokens_of(config));
}

Result<Json> ChatTemplate::make_context(const ChatInput& input, const EscapeText& escape) const {
  ASSIGN_OR_RETURN(const Json tools, normalize_tools(input.tools));
  Json context = special_tokens_;
  context["tools"] = escape_strings(tools, escape);
  context["documents"] = nullptr;
  if (input.kwargs.is_null()) return context;
  if (!input.kwargs.is_object()) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("chat_template_kwargs: expected an object, found {}", input.kwargs.type_name()),
                 "chat_template_kwargs"};
  }
  for (const auto& [name, value] : input.kwargs.items()) {
    static constexpr std::array<std::string_view, 4> kOwnFields = {"messages", "tools", "add_generation_prompt", "continue_final_message"};
    if (std::find(kOwnFields.begin(), kOwnFields.end(), name) != kOwnFields.end()) {
      const std::string field = "chat_template_kwargs." + name;
      return Error{ErrorCode::kInvalidArgument, fmt::format("{}: use the request's own field \"{}\"", field, name), field};
    }
    context[name] = escape_strings(value, escape);
  }
  return context;
}

Result<RenderedPrompt> ChatTemplate::render(const ChatInput& input) const {
  return render(input, [](std::string_view text) { return std::string(text); });
}

Result<RenderedPrompt> ChatTemplate::render(const ChatInput& input, const EscapeText& escape) const {
  if (input.continue_final_message && input.add_generation_prompt) {
    return Error{ErrorCode::kInvalidArgument, "continue_final_message: cannot be combined with add_generation_prompt",
                 "continue_final_message"};
  }
  ASSIGN_OR_RETURN(const Json normalized, normalize_messages(input.messages));
  Json messages = escape_messages(normalized, escape);
  ASSIGN_OR_RETURN(Json context, make_context(input, escape));
  const jinja::Template& chosen = with_tools_ && !context["tools"].is_null() ? *with_tools_ : main_;
  const Json other_question = with_other_question(messages);
  if (input.continue_final_message) {
    Json& content = messages.back()["content"];
    content = (content.is_string() ? content.get<std::string>() : std::string()).append(kEndOfContent);
  }

  context["messages"] = std::move(messages);
  context["add_generation_prompt"] = input.add_generation_prompt;
  RenderedPrompt prompt;
  ASSIGN_OR_RETURN(prompt.text, chosen.render(context));
  if (input.continue_final_message) {
    const size_t end = prompt.text.rfind(kEndOfContentTrimmed);
    if (end == std::string::npos) {
      return Error{ErrorCode::kInvalidArgument, "continue_final_message: the chat template does not show the last message",
                   "continue_final_message"};
    }
    const bool trims = !std::string_view(prompt.text).substr(end).starts_with(kEndOfContent);
    prompt.text.resize(end);
    if (trims) prompt.text.resize(prompt.text.find_last_not_of(" \t\r\n") + 1);
  }

  // Where the prompt of another conversation, and of this one's next turn, will part from this one. A template that cannot
  // render the shorter conversations merely gives fewer hints.
  size_t answer_begin = 0;
  if (input.add_generation_prompt) {
    context["add_generation_prompt"] = false;
    if (const auto history = chosen.render(context); history && prompt.text.starts_with(*history)) {
      answer_begin = history->size();
      prompt.cut_hints.push_back(answer_begin);
    }
  }
  if (!other_question.is_null()) {
    context["messages"] = other_question;
    if (const auto other = chosen.render(context)) prompt.cut_hints.push_back(common_prefix(prompt.text, *other));
  }
  std::sort(prompt.cut_hints.begin(), prompt.cut_hints.end());
  prompt.cut_hints.erase(std::unique(prompt.cut_hints.begin(), prompt.cut_hints.end()), prompt.cut_hints.end());
  std::erase_if(prompt.cut_hints, [&](size_t hint) { return hint == 0 || hint >= prompt.text.size(); });
  prompt.starts_in_reasoning = leaves_think_open(std::string_view(prompt.text).substr(answer_begin));
  return prompt;
}

}  // namespace quern::text
