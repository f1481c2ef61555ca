#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "text/chat_messages.h"
#include "text/jinja_template.h"

namespace quern::text {

/// What a chat request says about its prompt.
struct ChatInput {
  Json messages;  // as requested; see normalize_messages
  Json tools;     // array or null
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the prompt ends inside the last message; excludes add_generation_prompt
  Json kwargs = Json::object();         // chat_template_kwargs: enable_thinking, preserve_thinking, reasoning_effort, ...
};

struct RenderedPrompt {
  std::string text;
  bool starts_in_reasoning = false;  // the prompt leaves a <think> open: the answer begins with reasoning
  /// Byte offsets, ascending, where other prompts are likely to part from this one: behind system and tools (where the first
  /// user message begins), and at the generation prompt (the next turn renders this answer anew).
  std::vector<size_t> cut_hints;
};

/// The chat template of a model. Immutable; any number of threads may render at the same time.
class ChatTemplate {
 public:
  /// `override_file`, else chat_template.jinja, else "chat_template" in tokenizer_config.json: a text, or a list of
  /// {name, template} of which "default" is used, and "tool_use" where there are tools.
  /// Errors: kNotFound when there is none; kInvalidArgument, naming file and line, when it cannot be parsed.
  static Result<ChatTemplate> load(const std::filesystem::path& model_dir, const std::optional<std::filesystem::path>& override_file);
  /// `special_tokens`: an object, e.g. {"bos_token": "<s>"}, visible to the template.
  static Result<ChatTemplate> from_source(std::string_view source, Json special_tokens = Json::object());

  /// Errors: kInvalidArgument; the field is named when it is the request's fault, the message is the template's own when it refuses.
  [[nodiscard]] Result<RenderedPrompt> render(const ChatInput& input) const;
  /// The same with every string of the request passed through `escape` before it meets the template.
  [[nodiscard]] Result<RenderedPrompt> render(const ChatInput& input, const EscapeText& escape) const;

 private:
  ChatTemplate(jinja::Template main, std::optional<jinja::Template> with_tools, Json special_tokens)
      : main_(std::move(main)), with_tools_(std::move(with_tools)), special_tokens_(std::move(special_tokens)) {}
  /// The variables of the template but for messages and add_generation_prompt.
  [[nodiscard]] Result<Json> make_context(const ChatInput& input, const EscapeText& escape) const;

  jinja::Template main_;
  std::optional<jinja::Template> with_tools_;
  Json special_tokens_;
};

}  // namespace quern::text
