#include "server/anthropic_format.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "base/hash.h"
#include "server/error_body.h"
#include "server/json_writer.h"

namespace quern::server {
namespace {

void write(std::string_view type, Json event, std::string& out) {
  Json whole = {{"type", type}};
  whole.update(event);
  out += fmt::format("event: {}\ndata: ", type);
  out += dump_json(whole);
  out += "\n\n";
}

/// Cached tokens are not part of input_tokens here.
Json usage_object(int32_t prompt_tokens, int32_t cached_tokens, int32_t output_tokens) {
  return {{"input_tokens", prompt_tokens - cached_tokens}, {"cache_read_input_tokens", cached_tokens}, {"output_tokens", output_tokens}};
}

std::string signature_of(std::string_view thinking) {
  uint64_t hash = thinking.size();
  for (const char c : thinking) hash = hash_combine(hash, static_cast<unsigned char>(c));
  return fmt::format("quern:{:016x}", hash);
}

std::string_view stop_reason(const OutputEnd& end) {
  if (end.stop_string) return "stop_sequence";
  if (end.finish_reason == "length") return "max_tokens";
  return end.finish_reason == "tool_calls" ? "tool_use" : "end_turn";
}

Json stop_sequence(const OutputEnd& end) { return end.stop_string ? Json(*end.stop_string) : Json(); }

}  // namespace

Json AnthropicFormat::message(Json content) const {
  return {{"id", header_.id},         {"type", "message"},      {"role", "assistant"},      {"model", header_.model},
          {"content", std::move(content)}, {"stop_reason", nullptr}, {"stop_sequence", nullptr}, {"usage", usage_object(prompt_tokens_, 0, 0)}};
}

void AnthropicFormat::begin(int32_t, std::string& out) {
  write("message_start", {{"message", message(Json::array())}}, out);
  write("ping", Json::object(), out);
}

void AnthropicFormat::delta(int32_t, const OutputDelta& delta, const OutputUsage&, std::string& out) { take(delta, &out); }

void AnthropicFormat::take(const OutputDelta& delta, std::string* out) {
  if (!delta.reasoning.empty()) add_text(Kind::kThinking, delta.reasoning, out);
  visit_in_order(
      delta, [&](std::string_view text) { add_text(Kind::kText, text, out); }, [&](const ToolCallDelta& call) { add_call(call, out); });
  if (!delta.end) return;
  close_block(out);
  end_ = *delta.end;
}

void AnthropicFormat::add_text(Kind kind, std::string_view text, std::string* out) {
  const bool thinking = kind == Kind::kThinking;
  if (open_ != kind) {
    open_block(kind, thinking ? Json{{"type", "thinking"}, {"thinking", ""}, {"signature", ""}} : Json{{"type", "text"}, {"text", ""}}, out);
  }
  text_ += text;
  if (out != nullptr) write_delta(thinking ? "thinking_delta" : "text_delta", thinking ? "thinking" : "text", text, *out);
}

void AnthropicFormat::add_call(const ToolCallDelta& call, std::string* out) {
  if (!call.id.empty()) {
    const std::string id = "toolu_" + call.id.substr(call.id.find('_') + 1);
    open_block(Kind::kToolUse, {{"type", "tool_use"}, {"id", id}, {"name", call.name}, {"input", Json::object()}}, out);
  }
  if (call.arguments.empty()) return;
  text_ += call.arguments;
  if (out != nullptr) write_delta("input_json_delta", "partial_json", call.arguments, *out);
}

void AnthropicFormat::open_block(Kind kind, Json block, std::string* out) {
  close_block(out);
  open_ = kind;
  block_ = std::move(block);
  text_.clear();
  if (out != nullptr) write("content_block_start", {{"index", content_.size()}, {"content_block", block_}}, *out);
}

void AnthropicFormat::close_block(std::string* out) {
  switch (std::exchange(open_, Kind::kNone)) {
    case Kind::kNone: return;
    case Kind::kText: block_["text"] = text_; break;
    case Kind::kThinking:
      block_["thinking"] = text_;
      block_["signature"] = signature_of(text_);
      if (out != nullptr) write_delta("signature_delta", "signature", block_["signature"].get_ref<const std::string&>(), *out);
      break;
    case Kind::kToolUse: {
      auto input = parse_json(text_, "input");  // fails where the model has nested it too deep
      block_["input"] = input ? *std::move(input) : Json::object();
      break;
    }
  }
  if (out != nullptr) write("content_block_stop", {{"index", content_.size()}}, *out);
  content_.push_back(std::move(block_));
}

void AnthropicFormat::write_delta(std::string_view type, std::string_view member, std::string_view text, std::string& out) const {
  fmt::format_to(std::back_inserter(out),
                 "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{},\"delta\":{{\"type\":\"{}\",\"{}\":", content_.size(), type,
                 member);
  append_json_string(out, text);
  out += "}}\n\n";
}

void AnthropicFormat::finish(const OutputUsage& usage, std::string& out) {
  write("message_delta",
        {{"delta", {{"stop_reason", stop_reason(end_)}, {"stop_sequence", stop_sequence(end_)}}},
         {"usage", usage_object(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)}},
        out);
  write("message_stop", Json::object(), out);
}

Json AnthropicFormat::response(std::span<const OutputDelta> choices, const OutputUsage& usage) {
  take(choices[0], nullptr);
  Json json = message(std::move(content_));
  json["stop_reason"] = stop_reason(end_);
  json["stop_sequence"] = stop_sequence(end_);
  json["usage"] = usage_object(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens);
  return json;
}

void AnthropicFormat::fail(const Error& error, std::string& out) {
  out += "event: error\ndata: ";
  out += dump_json(anthropic_error_body(error));
  out += "\n\n";
}

HttpResponse AnthropicFormat::failure(const Error& error) { return error_response(Dialect::kAnthropic, error); }

}  // namespace quern::server
