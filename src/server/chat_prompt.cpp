#include "server/chat_prompt.h"

#include <string_view>

#include "text/added_tokens.h"
#include "text/chat_template.h"

namespace quern::server {
namespace {

size_t count(std::string_view text, std::string_view what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + what.size())) ++n;
  return n;
}

/// Offsets in the rendered text -> numbers of tokens that end at or before them. Exact but for text that normalization made shorter or
/// longer, where a hint may be off: hints decide where states are kept, not what is computed.
std::vector<int32_t> token_hints(const text::Tokenizer& tokenizer, const text::RenderedPrompt& prompt, const std::vector<int32_t>& ids) {
  std::vector<int32_t> hints;
  size_t num_tokens = 0, bytes = 0;
  for (const size_t offset : prompt.cut_hints) {
    const std::string_view before = std::string_view(prompt.text).substr(0, offset);
    const size_t target = offset - count(before, text::kEscape) * text::kEscape.size();
    while (num_tokens < ids.size() && bytes + tokenizer.token_bytes(ids[num_tokens]).size() <= target) {
      bytes += tokenizer.token_bytes(ids[num_tokens++]).size();
    }
    hints.push_back(static_cast<int32_t>(num_tokens));
  }
  return hints;
}

/// How an answer begins that has to be a call (model-spec.md 4.4).
std::string call_opening(const std::string& function) {
  return function.empty() ? "<tool_call>\n<function=" : fmt::format("<tool_call>\n<function={}>\n", function);
}

}  // namespace

Result<PreparedPrompt> render_chat(const Service& service, const Conversation& conversation) {
  const text::Tokenizer* tokenizer = service.context.tokenizer;
  if (tokenizer == nullptr || service.context.chat_template == nullptr) {
    return Error{
        ErrorCode::kUnsupported,
        fmt::format("this model has no {}, so it cannot chat; use /v1/completions", tokenizer == nullptr ? "tokenizer" : "chat template"),
        "messages"};
  }
  text::ChatInput input;
  input.messages = conversation.messages;
  input.tools = conversation.tools;
  input.add_generation_prompt = conversation.add_generation_prompt;
  input.continue_final_message = conversation.continue_final_message;
  input.kwargs = conversation.template_kwargs;
  if (conversation.forced_call) input.kwargs["enable_thinking"] = false;  // the call comes first
  ASSIGN_OR_RETURN(text::RenderedPrompt rendered, service.context.chat_template->render(input, [&](std::string_view text) {
    return tokenizer->escape_control_tokens(text);
  }));
  PreparedPrompt prompt;
  if (conversation.forced_call) {
    if (rendered.starts_in_reasoning) rendered.text += "\n</think>\n\n";  // of a template that always thinks
    rendered.starts_in_reasoning = false;
    prompt.opening = call_opening(*conversation.forced_call);
    rendered.text += call_opening(tokenizer->escape_control_tokens(*conversation.forced_call));
  }
  prompt.ids = tokenizer->encode_with_escapes(rendered.text);
  prompt.cut_hints = token_hints(*tokenizer, rendered, prompt.ids);
  prompt.starts_in_reasoning = rendered.starts_in_reasoning;
  return prompt;
}

}  // namespace quern::server
