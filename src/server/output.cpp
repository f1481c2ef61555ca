#include "server/output.h"

#include <iterator>
#include <utility>

namespace quern::server {
namespace {

template <class T>
void append_all(std::vector<T>& to, std::vector<T>& from) {
  to.insert(to.end(), std::move_iterator(from.begin()), std::move_iterator(from.end()));
}

}  // namespace

void OutputDelta::append(OutputDelta other) {
  reasoning += other.reasoning;
  std::string_view text = other.content;
  for (const ContentRun& run : other.content_runs) {
    add_content(text.substr(0, run.num_bytes), run.calls_before);
    text.remove_prefix(run.num_bytes);
  }
  for (ToolCallDelta& call : other.tool_calls) {
    if (tool_calls.empty() || tool_calls.back().index != call.index) {
      tool_calls.push_back(std::move(call));
    } else {
      tool_calls.back().arguments += call.arguments;
    }
  }
  append_all(token_ids, other.token_ids);
  append_all(logprobs, other.logprobs);
  append_all(prompt_logprobs, other.prompt_logprobs);
  if (other.end) end = std::move(other.end);
}

void OutputDelta::add_content(std::string_view text, int32_t calls_before) {
  if (text.empty()) return;
  content += text;
  if (content_runs.empty() || content_runs.back().calls_before != calls_before) content_runs.push_back({calls_before, 0});
  content_runs.back().num_bytes += text.size();
}

}  // namespace quern::server
