#include "server/output_assembler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "server/request_id.h"

namespace quern::server {
namespace {

text::StopMatcher make_matcher(const OutputOptions& options) {
  text::StopOptions stop_options;
  stop_options.include_stop_in_output = options.include_stop;
  stop_options.atomic = {"<think>", "</think>", "<tool_call>", "</tool_call>"};
  return text::StopMatcher::create(options.stop, std::move(stop_options)).value();  // requests with an empty stop string are refused
}

bool contains(const std::vector<int32_t>& ids, int32_t id) { return std::ranges::find(ids, id) != ids.end(); }

}  // namespace

OutputAssembler::OutputAssembler(OutputOptions options) : options_(std::move(options)), stops_(make_matcher(options_)) {
  usage_.prompt_tokens = options_.prompt_tokens;
  if (options_.tokenizer != nullptr) detokenizer_.emplace(*options_.tokenizer, options_.skip_special_tokens);
  if (options_.split_reasoning) splitter_.emplace(options_.starts_in_reasoning);
  if (options_.tools != nullptr) calls_.emplace(options_.tools, options_.parallel_tool_calls ? std::numeric_limits<size_t>::max() : 1);
}

OutputDelta OutputAssembler::push(engine::TokenEvent event) {
  OutputDelta delta;
  if (const std::string opening = std::exchange(options_.opening, {}); !opening.empty()) split(opening, delta);
  delta.prompt_logprobs = std::move(event.prompt_logprobs);
  for (size_t i = 0; i < event.tokens.size() && !stopped(); ++i) {
    delta.token_ids.push_back(event.tokens[i]);
    if (i < event.logprobs.size()) delta.logprobs.push_back(std::move(event.logprobs[i]));
    push_token(event.tokens[i], delta);
  }
  if (event.finish) finish(*event.finish, delta);
  return delta;
}

void OutputAssembler::push_token(int32_t id, OutputDelta& delta) {
  ++usage_.completion_tokens;
  if (splitter_ && splitter_->in_reasoning()) ++usage_.reasoning_tokens;
  if (!detokenizer_) return;
  if (contains(options_.stop_ids, id) && !options_.include_stop) return;  // the end itself has no text
  push_text(detokenizer_->push(id), delta);
}

void OutputAssembler::push_text(std::string_view text, OutputDelta& delta) {
  if (text.empty()) return;
  split(stops_.push(text), delta);
  if (const std::string* stop = stops_.matched()) stop_string_ = *stop;
}

void OutputAssembler::split(std::string_view text, OutputDelta& delta) {
  if (!splitter_) return add_content(text, delta);
  const text::ReasoningSplitter::Delta pieces = splitter_->push(text);
  delta.reasoning += pieces.reasoning;
  add_content(pieces.content, delta);
}

void OutputAssembler::add_content(std::string_view text, OutputDelta& delta) {
  if (!calls_) {
    delta.add_content(text, 0);
  } else if (!text.empty()) {
    add_calls(calls_->push(text), delta);
    called_ = !options_.parallel_tool_calls && calls_->num_complete() > 0;
  }
}

void OutputAssembler::add_calls(text::ToolCallParser::Delta calls, OutputDelta& delta) {
  OutputDelta news;
  std::string_view rest = calls.content;
  for (const text::ToolCallParser::ContentRun& run : calls.runs) {
    news.add_content(rest.substr(0, run.num_bytes), static_cast<int32_t>(run.calls_before));
    rest.remove_prefix(run.num_bytes);
  }
  for (text::ToolCallParser::Piece& piece : calls.pieces) {
    std::string id = piece.name.empty() ? std::string() : new_request_id("call_");
    news.tool_calls.push_back({static_cast<int32_t>(piece.call), std::move(id), std::move(piece.name), std::move(piece.arguments)});
  }
  delta.append(std::move(news));
}

void OutputAssembler::finish(const engine::Finish& finish, OutputDelta& delta) {
  usage_.prompt_tokens = finish.usage.prompt_tokens;
  usage_.cached_tokens = finish.usage.cached_tokens;
  if (!stopped() && detokenizer_) push_text(detokenizer_->finish(), delta);
  if (!stopped()) split(stops_.finish(), delta);
  if (splitter_) {
    const text::ReasoningSplitter::Delta pieces = splitter_->finish();
    delta.reasoning += pieces.reasoning;
    add_content(pieces.content, delta);
  }
  if (calls_) add_calls(calls_->finish(), delta);
  OutputEnd end;
  if (calls_ && calls_->num_begun() > 0) end.finish_reason = "tool_calls";
  if (stop_string_) {
    end.finish_reason = "stop";
    end.stop_string = stop_string_;
  } else if (called_) {
    // The call is the end.
  } else if (finish.reason == engine::FinishReason::kLength) {
    end.finish_reason = "length";
  } else if (finish.stop_token && contains(options_.named_stop_ids, *finish.stop_token)) {
    end.stop_token = finish.stop_token;
  }
  delta.end = std::move(end);
}

}  // namespace quern::server
