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
  content += other.content;
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

}  // namespace quern::server
