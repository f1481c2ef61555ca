#pragma once

#include <string>
#include <string_view>

namespace quern::text {

/// Cuts a stream of decoded text into reasoning and content (model-spec.md 4.4). The outcome does not depend on how the text
/// is cut into pieces; at most one tag, and white space before it, is held back. One stream, one thread.
///   reasoning  up to </think>; up to the end when there is none; a <tool_call> in it ends it, too, and belongs to the content
///   content    the rest, without the newlines behind </think>
/// A <think> that the model writes itself counts only at the very beginning; later it is content.
class ReasoningSplitter {
 public:
  struct Delta {
    std::string reasoning, content;
  };

  /// `starts_in_reasoning`: the prompt has left a <think> open (RenderedPrompt).
  explicit ReasoningSplitter(bool starts_in_reasoning) : starts_in_reasoning_(starts_in_reasoning) {}

  Delta push(std::string_view text);
  /// What was held back; nothing may be pushed afterwards.
  Delta finish();
  [[nodiscard]] bool in_reasoning() const;

 private:
  enum class State { kBegin, kAfterOpenTag, kReasoning, kAfterCloseTag, kContent };
  Delta run(bool at_end);
  /// One step on held_; false when it has to wait for more text.
  bool step(Delta& delta, bool at_end);

  const bool starts_in_reasoning_;
  State state_ = State::kBegin;
  std::string held_;
};

}  // namespace quern::text
