#include "text/tool_call_parser.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace quern::text {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kOpenBlock = "<tool_call>", kCloseBlock = "</tool_call>", kFunction = "<function=", kCloseFunction = "</function>",
                           kParameter = "<parameter=", kCloseParameter = "</parameter>";
constexpr std::string_view kBlank = " \t\r\n";
constexpr size_t kMaxNameBytes = 256;
constexpr auto npos = std::string_view::npos;

/// Bytes before the longest end of `text` that is white space and then a beginning of `tag`, but not all of it.
size_t certain_text(std::string_view text, std::string_view tag) {
  size_t length = std::min(text.size(), tag.size() - 1);
  while (length > 0 && !text.ends_with(tag.substr(0, length))) --length;
  const size_t last = text.substr(0, text.size() - length).find_last_not_of(kBlank);
  return last == npos ? 0 : last + 1;
}

/// What follows an opening such as "<function=".
struct Name {
  enum class Kind : uint8_t { kWhole, kPartial, kNone } kind = Kind::kNone;
  std::string_view name;
  size_t consumed = 0;  // with opening and ">"
};
Name read_name(std::string_view text, std::string_view opening) {
  if (!text.starts_with(opening)) return {};
  const std::string_view rest = text.substr(opening.size(), kMaxNameBytes);
  const size_t end = rest.find_first_of("><\n");
  if (end == npos) return {rest.size() == kMaxNameBytes ? Name::Kind::kNone : Name::Kind::kPartial, {}, 0};
  if (rest[end] != '>') return {};
  const size_t begin = rest.find_first_not_of(kBlank);
  if (begin >= end) return {};
  const std::string_view name = rest.substr(begin, rest.find_last_not_of(kBlank, end - 1) + 1 - begin);
  return {Name::Kind::kWhole, name, opening.size() + end + 1};
}

}  // namespace

ToolCallParser::Delta ToolCallParser::push(std::string_view text) {
  held_ += text;
  Delta delta;
  run(delta, false);
  return delta;
}

ToolCallParser::Delta ToolCallParser::finish() {
  Delta delta;
  run(delta, true);
  if (state_ == State::kBlock) add_content(opening_, delta);
  if (state_ == State::kValue) end_value(delta, false);
  if (state_ == State::kValue || state_ == State::kFunction) end_call(delta);
  return delta;
}

void ToolCallParser::run(Delta& delta, bool at_end) {
  while (!held_.empty() && step(delta, at_end)) {
  }
}

bool ToolCallParser::step(Delta& delta, bool at_end) {
  switch (state_) {
    case State::kText: return step_text(delta, at_end);
    case State::kBlock: return step_block(delta, at_end);
    case State::kFunction: return step_function(delta, at_end);
    case State::kAfterFunction: return step_after_function(delta, at_end);
    case State::kValue: return step_value(delta, at_end);
    case State::kDone: held_.clear(); return false;
  }
  return false;
}

bool ToolCallParser::step_text(Delta& delta, bool at_end) {
  if (after_call_) {
    held_.erase(0, std::min(held_.find_first_not_of(kBlank), held_.size()));
    if (held_.empty()) return false;
  }
  const size_t block = held_.find(kOpenBlock);
  const size_t certain = block != npos ? held_.find_last_not_of(kBlank, block == 0 ? 0 : block - 1) + 1
                         : at_end      ? held_.size()
                                       : certain_text(held_, kOpenBlock);
  const size_t text = block == 0 ? 0 : certain;
  if (text > 0) after_call_ = false;
  add_content(std::string_view(held_).substr(0, text), delta);
  if (block == npos) {
    held_.erase(0, text);
    return false;
  }
  opening_ = held_.substr(text, block + kOpenBlock.size() - text);
  held_.erase(0, block + kOpenBlock.size());
  state_ = State::kBlock;
  return true;
}

/// Behind <tool_call>. Nothing of it has been told yet, so that all of it can still be content.
bool ToolCallParser::step_block(Delta& delta, bool at_end) {
  const size_t begin = std::min(held_.find_first_not_of(kBlank), held_.size());
  const std::string_view rest = std::string_view(held_).substr(begin);
  const Name name = read_name(rest, kFunction);
  if (name.kind == Name::Kind::kWhole) {
    begin_call(std::string(name.name), delta);
    held_.erase(0, begin + name.consumed);
    return true;
  }
  const bool may_become_one = name.kind == Name::Kind::kPartial || kFunction.starts_with(rest);
  if (may_become_one && !at_end) return false;
  add_content(opening_, delta);
  after_call_ = after_call_ && opening_.empty();
  state_ = State::kText;
  return true;
}

/// Between parameters. What is no tag is dropped.
bool ToolCallParser::step_function(Delta& delta, bool at_end) {
  held_.erase(0, std::min(held_.find('<'), held_.size()));
  if (held_.empty()) return false;
  const std::string_view rest = held_;
  if (rest.starts_with(kCloseFunction)) {
    held_.erase(0, kCloseFunction.size());
    end_call(delta);
    return true;
  }
  if (rest.starts_with(kCloseBlock) || rest.starts_with(kOpenBlock)) {  // </function> is missing
    end_call(delta);
    return true;
  }
  const Name name = read_name(rest, kParameter);
  if (name.kind == Name::Kind::kWhole) {
    begin_value(std::string(name.name), delta);
    held_.erase(0, name.consumed);
    return true;
  }
  bool partial = name.kind == Name::Kind::kPartial;
  for (const std::string_view tag : {kCloseFunction, kCloseBlock, kOpenBlock, kParameter}) partial = partial || tag.starts_with(rest);
  if (partial && !at_end) return false;
  held_.erase(0, 1);
  return true;
}

bool ToolCallParser::step_after_function(Delta& /*delta*/, bool at_end) {
  held_.erase(0, std::min(held_.find_first_not_of(kBlank), held_.size()));
  if (held_.empty()) return false;
  const std::string_view rest = held_;
  if (rest.starts_with(kCloseBlock)) {
    held_.erase(0, kCloseBlock.size());
    state_ = State::kText;
    return true;
  }
  if (rest.starts_with(kFunction)) {  // a second function in one block
    opening_.clear();
    state_ = State::kBlock;
    return true;
  }
  if (!at_end && (kCloseBlock.starts_with(rest) || kFunction.starts_with(rest))) return false;
  state_ = State::kText;  // </tool_call> is missing
  return true;
}

bool ToolCallParser::step_value(Delta& delta, bool at_end) {
  if (value_begins_) {  // exactly one newline behind the tag belongs to the form
    if (held_ == "\r" && !at_end) return false;
    held_.erase(0, held_.starts_with("\r\n") ? 2 : held_.front() == '\n' ? 1 : 0);
    value_begins_ = false;
    value_is_empty_ = true;
    return !held_.empty();
  }
  const ValueEnd end = find_value_end();
  add_value(std::string_view(held_).substr(0, end.value), delta);
  if (end.value > 0) value_is_empty_ = false;
  if (!end.ended) {
    held_.erase(0, end.value);
    return false;
  }
  held_.erase(0, end.consumed);
  end_value(delta, true);
  state_ = State::kFunction;
  return true;
}

ToolCallParser::ValueEnd ToolCallParser::find_value_end() const {
  const std::string_view text = held_;
  for (size_t at = text.find_first_of("\n<"); at != npos; at = text.find_first_of("\n<", at + 1)) {
    const bool newline = text[at] == '\n';
    const std::string_view tag = text.substr(newline ? at + 1 : at);
    if (tag.starts_with(kCloseParameter)) return {at, true, (newline ? at + 1 : at) + kCloseParameter.size()};
    if (kCloseParameter.starts_with(tag)) return {at, false, 0};
    // A closing tag that is missing: only at the beginning of a line is the next one taken for it.
    if (!newline && !(at == 0 && value_is_empty_)) continue;
    const size_t next = newline ? at + 1 : at;
    for (const std::string_view closing : {kCloseFunction, kCloseBlock}) {
      if (tag.starts_with(closing)) return {at, true, next};
      if (closing.starts_with(tag)) return {at, false, 0};
    }
    if (kParameter.starts_with(tag)) return {at, false, 0};
    const Name name = read_name(tag, kParameter);
    if (name.kind == Name::Kind::kPartial) return {at, false, 0};
    if (name.kind == Name::Kind::kWhole && tools_->has_parameter(function_, name.name)) return {at, true, next};
  }
  return {text.size(), false, 0};
}

void ToolCallParser::add_content(std::string_view text, Delta& delta) const {
  if (text.empty()) return;
  delta.content += text;
  if (delta.runs.empty() || delta.runs.back().calls_before != num_begun_) delta.runs.push_back({num_begun_, 0});
  delta.runs.back().num_bytes += text.size();
}

void ToolCallParser::begin_call(std::string name, Delta& delta) {
  function_ = std::move(name);
  seen_.clear();
  has_arguments_ = false;
  delta.pieces.push_back({num_begun_++, function_, {}});
  state_ = State::kFunction;
}

void ToolCallParser::end_call(Delta& delta) {
  arguments(delta) += has_arguments_ ? "}" : "{}";
  ++num_complete_;
  after_call_ = true;
  state_ = num_complete_ == max_calls_ ? State::kDone : State::kAfterFunction;
}

void ToolCallParser::begin_value(std::string name, Delta& delta) {
  parameter_ = std::move(name);
  skipped_ = !seen_.insert(parameter_).second;  // a JSON object has every key once: the first counts
  types_ = tools_->types_of(function_, parameter_);
  value_.clear();
  value_begins_ = true;
  state_ = State::kValue;
  if (skipped_ || types_ != kJsonString) return;
  add_key(delta);
  arguments(delta) += '"';
}

void ToolCallParser::add_value(std::string_view text, Delta& delta) {
  if (skipped_ || text.empty()) return;
  if (types_ == kJsonString) {
    append_json_escaped(arguments(delta), text);
  } else {
    value_ += text;
  }
}

void ToolCallParser::end_value(Delta& delta, bool complete) {
  if (skipped_) return;
  if (types_ == kJsonString) {
    arguments(delta) += '"';
    return;
  }
  const std::string json = json_value(value_, types_, complete);
  if (json.empty()) return;
  add_key(delta);
  arguments(delta) += json;
}

void ToolCallParser::add_key(Delta& delta) {
  std::string& out = arguments(delta);
  out += has_arguments_ ? ", \"" : "{\"";
  append_json_escaped(out, parameter_);
  out += "\": ";
  has_arguments_ = true;
}

std::string& ToolCallParser::arguments(Delta& delta) {
  const size_t call = num_begun_ - 1;
  if (delta.pieces.empty() || delta.pieces.back().call != call) delta.pieces.push_back({call, {}, {}});
  return delta.pieces.back().arguments;
}

}  // namespace quern::text
