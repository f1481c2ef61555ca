#include "text/reasoning_splitter.h"

#include <algorithm>

namespace quern::text {
namespace {

constexpr std::string_view kOpenTag = "<think>", kCloseTag = "</think>", kToolCallTag = "<tool_call>";
constexpr auto npos = std::string_view::npos;

/// Length of the longest end of `text` that is a beginning of `tag`, but not all of it.
size_t partial_tag(std::string_view text, std::string_view tag) {
  for (size_t length = std::min(text.size(), tag.size() - 1); length > 0; --length) {
    if (text.ends_with(tag.substr(0, length))) return length;
  }
  return 0;
}

}  // namespace

ReasoningSplitter::Delta ReasoningSplitter::push(std::string_view text) {
  held_ += text;
  return run(false);
}

ReasoningSplitter::Delta ReasoningSplitter::finish() { return run(true); }

bool ReasoningSplitter::in_reasoning() const {
  return state_ == State::kReasoning || state_ == State::kAfterOpenTag || (state_ == State::kBegin && starts_in_reasoning_);
}

ReasoningSplitter::Delta ReasoningSplitter::run(bool at_end) {
  Delta delta;
  while (!held_.empty() && step(delta, at_end)) {
  }
  return delta;
}

bool ReasoningSplitter::step(Delta& delta, bool at_end) {
  switch (state_) {
    case State::kBegin: {
      const size_t begin = held_.find_first_not_of(" \t\r\n");
      const std::string_view rest = begin == npos ? std::string_view() : std::string_view(held_).substr(begin);
      if (rest.starts_with(kOpenTag)) {
        held_.erase(0, begin + kOpenTag.size());
        state_ = State::kAfterOpenTag;
      } else if (!at_end && kOpenTag.starts_with(rest)) {
        return false;
      } else {
        state_ = starts_in_reasoning_ ? State::kReasoning : State::kContent;
      }
      return true;
    }
    case State::kAfterOpenTag:
    case State::kAfterCloseTag:
      held_.erase(0, held_.find_first_not_of('\n'));
      if (!held_.empty()) state_ = state_ == State::kAfterOpenTag ? State::kReasoning : State::kContent;
      return true;
    case State::kReasoning: {
      const size_t close = held_.find(kCloseTag), tool_call = held_.find(kToolCallTag);
      const size_t end = std::min(close, tool_call);
      if (end != npos) {
        delta.reasoning.append(held_, 0, end);
        held_.erase(0, end + (close < tool_call ? kCloseTag.size() : 0));
        state_ = close < tool_call ? State::kAfterCloseTag : State::kContent;
        return true;
      }
      const size_t kept = at_end ? 0 : std::max(partial_tag(held_, kCloseTag), partial_tag(held_, kToolCallTag));
      delta.reasoning.append(held_, 0, held_.size() - kept);
      held_.erase(0, held_.size() - kept);
      return false;
    }
    case State::kContent:
      delta.content += held_;
      held_.clear();
      return true;
  }
  return false;
}

}  // namespace quern::text
