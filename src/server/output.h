#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"

namespace quern::server {

/// Why an output ended, in OpenAI's words and vLLM's.
struct OutputEnd {
  std::string_view finish_reason = "stop";  // "stop", "length" or "tool_calls"
  std::optional<std::string> stop_string;   // the stop string that matched
  std::optional<int32_t> stop_token;        // the id from stop_token_ids that ended it; an eos id is not named
};

/// News of one tool call. The first of a call has its id and name; the arguments of all together are one JSON object.
struct ToolCallDelta {
  int32_t index = 0;  // of the call in its message
  std::string id, name;
  std::string arguments;
};

/// Where content stands: behind so many calls.
struct ContentRun {
  int32_t calls_before = 0;
  size_t num_bytes = 0;
};

/// What one piece of news adds to an output. Adding up the pieces gives the same output wherever the stream was cut.
struct OutputDelta {
  std::string reasoning;
  std::string content;
  std::vector<ContentRun> content_runs;  // of `content`, one after the other
  std::vector<ToolCallDelta> tool_calls;
  std::vector<int32_t> token_ids;
  std::vector<engine::TokenLogprobs> logprobs;         // parallel to token_ids when asked for
  std::vector<engine::TokenLogprobs> prompt_logprobs;  // once, of every prompt token but the first
  std::optional<OutputEnd> end;

  void append(OutputDelta other);
  void add_content(std::string_view text, int32_t calls_before);
};

/// Calls text(string_view) and call(const ToolCallDelta&) for content and calls in the order in which the model wrote them.
template <class Text, class Call>
void visit_in_order(const OutputDelta& delta, const Text& text, const Call& call) {
  std::string_view rest = delta.content;
  auto next = delta.tool_calls.begin();
  for (const ContentRun& run : delta.content_runs) {
    for (; next != delta.tool_calls.end() && next->index < run.calls_before; ++next) call(*next);
    text(rest.substr(0, run.num_bytes));
    rest.remove_prefix(run.num_bytes);
  }
  for (; next != delta.tool_calls.end(); ++next) call(*next);
}

struct OutputUsage {
  int32_t prompt_tokens = 0;
  int32_t completion_tokens = 0;
  int32_t cached_tokens = 0;
  int32_t reasoning_tokens = 0;
};

}  // namespace quern::server
