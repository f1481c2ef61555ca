#include "server/responses_format.h"

#include <ctime>
#include <iterator>
#include <utility>

#include "server/error_body.h"
#include "server/json_writer.h"

namespace quern::server {
namespace {

Json usage_object(const OutputUsage& usage) {
  Json json;
  json["input_tokens"] = usage.prompt_tokens;
  json["input_tokens_details"] = {{"cached_tokens", usage.cached_tokens}};
  json["output_tokens"] = usage.completion_tokens;
  json["output_tokens_details"] = {{"reasoning_tokens", usage.reasoning_tokens}};
  json["total_tokens"] = int64_t{usage.prompt_tokens} + usage.completion_tokens;
  return json;
}

Json text_config(const Json& asked) {
  Json config = asked.is_object() ? asked : Json::object();
  if (!config.contains("format") || config["format"].is_null()) config["format"] = {{"type", "text"}};
  return config;
}

/// A float as it was asked for: 0.1 and not 0.10000000149.
double rounded(float value) { return std::strtod(fmt::format("{}", value).c_str(), nullptr); }

std::string_view error_code(const Error& error) { return error.code == ErrorCode::kResourceExhausted ? "rate_limit_exceeded" : "server_error"; }

}  // namespace

ResponsesFormat::ResponsesFormat(const ResponseHeader& header, const ResponsesRequest& request, std::function<void(const Json&)> on_complete)
    : id_(header.id), on_complete_(std::move(on_complete)) {
  const engine::SamplingParams& sampling = request.chat.generation.sampling;
  Json& r = response_;
  r["id"] = header.id;
  r["object"] = "response";
  r["created_at"] = header.created;
  r["status"] = "in_progress";
  r["error"] = nullptr;
  r["incomplete_details"] = nullptr;
  r["instructions"] = request.instructions;
  r["max_output_tokens"] = request.chat.max_tokens ? Json(*request.chat.max_tokens) : Json();
  r["model"] = header.model;
  r["output"] = Json::array();
  r["parallel_tool_calls"] = request.chat.parallel_tool_calls;
  r["previous_response_id"] = request.previous_response_id.empty() ? Json() : Json(request.previous_response_id);
  r["reasoning"] = {{"effort", nullptr}, {"summary", nullptr}};
  if (request.reasoning.is_object()) r["reasoning"].update(request.reasoning);
  r["store"] = request.store;
  r["temperature"] = rounded(sampling.temperature);
  r["text"] = text_config(request.text);
  r["tool_choice"] = request.tool_choice;
  r["tools"] = request.tools;
  r["top_p"] = rounded(sampling.top_p);
  r["truncation"] = request.truncate ? "auto" : "disabled";
  r["usage"] = nullptr;
  r["user"] = request.user;
  r["metadata"] = request.metadata;
  r["background"] = false;
}

void ResponsesFormat::write(std::string_view type, Json event, std::string& out) {
  Json whole = {{"type", type}, {"sequence_number", sequence_number_++}};
  whole.update(event);
  out += fmt::format("event: {}\ndata: ", type);
  out += dump_json(whole);
  out += "\n\n";
}

void ResponsesFormat::write_lifecycle(std::string_view type, std::string& out) { write(type, {{"response", response_}}, out); }

/// The one event that every token has.
void ResponsesFormat::write_delta(std::string_view type, std::string_view text, std::string_view more, std::string& out) {
  fmt::format_to(std::back_inserter(out), "event: {0}\ndata: {{\"type\":\"{0}\",\"sequence_number\":{1},\"item_id\":\"{2}\",\"output_index\":{3}{4},\"delta\":", type,
                 sequence_number_++, item_["id"].get_ref<const std::string&>(), output_.size(), more);
  append_json_string(out, text);
  out += "}\n\n";
}

void ResponsesFormat::begin(int32_t, std::string& out) {
  write_lifecycle("response.created", out);
  write_lifecycle("response.in_progress", out);
}

void ResponsesFormat::delta(int32_t, const OutputDelta& delta, const OutputUsage&, std::string& out) { take(delta, &out); }

void ResponsesFormat::take(const OutputDelta& delta, std::string* out) {
  if (!delta.reasoning.empty()) add_text(Kind::kReasoning, delta.reasoning, out);
  visit_in_order(
      delta, [&](std::string_view text) { add_text(Kind::kMessage, text, out); }, [&](const ToolCallDelta& call) { add_call(call, out); });
  if (!delta.end) return;
  cut_off_ = delta.end->finish_reason == "length";
  close_item(cut_off_ ? "incomplete" : "completed", out);
}

void ResponsesFormat::add_text(Kind kind, std::string_view text, std::string* out) {
  if (open_ != kind) {
    Json item = {{"id", nullptr}, {"type", kind == Kind::kReasoning ? "reasoning" : "message"}};
    if (kind == Kind::kReasoning) item["summary"] = Json::array();
    if (kind == Kind::kMessage) item["role"] = "assistant";
    item["content"] = Json::array();
    open_item(kind, std::move(item), out);
  }
  text_ += text;
  if (out == nullptr) return;
  if (kind == Kind::kReasoning) {
    write_delta("response.reasoning_text.delta", text, ",\"content_index\":0", *out);
  } else {
    write_delta("response.output_text.delta", text, ",\"content_index\":0,\"logprobs\":[]", *out);
  }
}

void ResponsesFormat::add_call(const ToolCallDelta& call, std::string* out) {
  if (!call.id.empty()) {
    open_item(Kind::kCall, {{"id", nullptr}, {"type", "function_call"}, {"call_id", call.id}, {"name", call.name}, {"arguments", ""}}, out);
  }
  if (call.arguments.empty()) return;
  text_ += call.arguments;
  if (out != nullptr) write_delta("response.function_call_arguments.delta", call.arguments, "", *out);
}

namespace {

std::string_view id_prefix(std::string_view type) { return type == "reasoning" ? "rs" : type == "message" ? "msg" : "fc"; }

/// The one part of a reasoning or message item.
Json text_part(bool reasoning, std::string_view text) {
  if (reasoning) return {{"type", "reasoning_text"}, {"text", text}};
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
}

}  // namespace

void ResponsesFormat::open_item(Kind kind, Json item, std::string* out) {
  close_item("completed", out);
  open_ = kind;
  item_ = std::move(item);
  const std::string_view digits = std::string_view(id_).substr(id_.find('_') + 1);
  item_["id"] = fmt::format("{}_{}{:02x}", id_prefix(item_["type"].get_ref<const std::string&>()), digits, output_.size());
  item_["status"] = "in_progress";
  text_.clear();
  if (out == nullptr) return;
  write("response.output_item.added", {{"output_index", output_.size()}, {"item", item_}}, *out);
  if (kind == Kind::kCall) return;
  write("response.content_part.added",
        {{"item_id", item_["id"]}, {"output_index", output_.size()}, {"content_index", 0}, {"part", text_part(kind == Kind::kReasoning, "")}}, *out);
}

void ResponsesFormat::close_item(std::string_view status, std::string* out) {
  const Kind kind = std::exchange(open_, Kind::kNone);
  if (kind == Kind::kNone) return;
  const Json place = {{"item_id", item_["id"]}, {"output_index", output_.size()}};
  const auto tell = [&](std::string_view type, Json more) {
    if (out == nullptr) return;
    Json event = place;
    event.update(more);
    write(type, std::move(event), *out);
  };
  if (kind == Kind::kCall) {
    item_["arguments"] = text_;
    tell("response.function_call_arguments.done", {{"name", item_["name"]}, {"arguments", text_}});
  } else {
    const bool reasoning = kind == Kind::kReasoning;
    const Json part = text_part(reasoning, text_);
    Json done = {{"content_index", 0}, {"text", text_}};
    if (!reasoning) done["logprobs"] = Json::array();
    tell(reasoning ? "response.reasoning_text.done" : "response.output_text.done", std::move(done));
    tell("response.content_part.done", {{"content_index", 0}, {"part", part}});
    item_["content"].push_back(part);
  }
  item_["status"] = status;
  if (out != nullptr) write("response.output_item.done", {{"output_index", output_.size()}, {"item", item_}}, *out);
  output_.push_back(std::move(item_));
}

void ResponsesFormat::set_end(const OutputUsage& usage) {
  response_["status"] = cut_off_ ? "incomplete" : "completed";
  if (cut_off_) response_["incomplete_details"] = {{"reason", "max_output_tokens"}};
  response_["output"] = std::move(output_);
  response_["usage"] = usage_object(usage);
  if (!cut_off_) response_["completed_at"] = std::time(nullptr);
  on_complete_(response_);
}

void ResponsesFormat::finish(const OutputUsage& usage, std::string& out) {
  set_end(usage);
  write_lifecycle(cut_off_ ? "response.incomplete" : "response.completed", out);
}

Json ResponsesFormat::response(std::span<const OutputDelta> choices, const OutputUsage& usage) {
  take(choices[0], nullptr);
  set_end(usage);
  return response_;
}

void ResponsesFormat::fail(const Error& error, std::string& out) {
  close_item("incomplete", &out);
  response_["status"] = "failed";
  response_["output"] = std::move(output_);
  response_["error"] = {{"code", error_code(error)}, {"message", error.message}};
  write_lifecycle("response.failed", out);
}

}  // namespace quern::server
