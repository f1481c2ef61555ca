#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/output.h"
#include "text/detokenizer.h"
#include "text/reasoning_splitter.h"
#include "text/stop_matcher.h"
#include "text/tokenizer.h"
#include "text/tool_call_parser.h"

namespace quern::server {

struct OutputOptions {
  const text::Tokenizer* tokenizer = nullptr;  // null: token ids only
  int32_t prompt_tokens = 0;
  bool split_reasoning = false;
  bool starts_in_reasoning = false;
  bool skip_special_tokens = true;
  std::vector<std::string> stop;
  bool include_stop = false;            // the stop string, or a stop token's text, stays in the output
  std::vector<int32_t> stop_ids;        // end the output: eos ids and stop_token_ids
  std::vector<int32_t> named_stop_ids;  // stop_token_ids: those that `stop_reason` names
  std::shared_ptr<const text::ToolSchemas> tools;  // calls are read with these; null: a call is content
  bool parallel_tool_calls = true;      // false: the first call ends the output
  std::string opening;                  // the beginning of the output, which the prompt ends with already
};

/// Turns the events of one request into text: tokens -> characters -> stop strings -> reasoning and content -> tool calls. Every stage works
/// token by token, so how tokens were grouped into events changes nothing. Stop strings are looked for in all text, reasoning too.
/// One owner, one thread.
class OutputAssembler {
 public:
  explicit OutputAssembler(OutputOptions options);

  /// What `event` adds; `end` is set by the event with `finish`. Tokens after a stop are dropped.
  OutputDelta push(engine::TokenEvent event);
  /// A stop string has matched, or the only allowed call is there: usage().completion_tokens is where the output ends.
  [[nodiscard]] bool stopped() const { return stop_string_.has_value() || called_; }
  [[nodiscard]] const OutputUsage& usage() const { return usage_; }

 private:
  void push_token(int32_t id, OutputDelta& delta);
  void push_text(std::string_view text, OutputDelta& delta);
  void split(std::string_view text, OutputDelta& delta);
  void add_content(std::string_view text, OutputDelta& delta);
  void add_calls(text::ToolCallParser::Delta calls, OutputDelta& delta);
  void finish(const engine::Finish& finish, OutputDelta& delta);

  OutputOptions options_;
  OutputUsage usage_;
  std::optional<text::StreamingDetokenizer> detokenizer_;
  text::StopMatcher stops_;
  std::optional<text::ReasoningSplitter> splitter_;
  std::optional<text::ToolCallParser> calls_;
  bool called_ = false;  // and no second call is wanted
  std::optional<std::string> stop_string_;
};

}  // namespace quern::server
