#include "app/chat_session.h"

#include <fmt/ranges.h>

#include <array>
#include <chrono>

#include "app/event_stream.h"
#include "app/json_members.h"
#include "app/nearest.h"
#include "app/option.h"

namespace quern::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<std::string_view, 9> kParameters = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "thinking"};

bool is_whole(std::string_view name) { return name == "top_k" || name == "max_tokens" || name == "seed"; }

/// One streamed answer while it arrives.
class Answer {
 public:
  explicit Answer(const ChatSession::Listener& listener)
      : listener_(listener), events_([this](std::string_view data) { take_event(data); }) {}

  void take_body(int status, std::string_view bytes) {
    if (status == 200) {
      events_.feed(bytes);
    } else {
      refusal_ += bytes;
    }
  }

  /// What the server said instead of an answer, if so.
  [[nodiscard]] std::optional<Error> error(int status) const {
    if (!error_.empty()) return make_error(ErrorCode::kUnavailable, "{}", error_);
    if (status == 200) return std::nullopt;
    std::string words = refusal_.substr(0, 500);
    const Result<Json> body = parse_json(refusal_, "answer");
    if (const Json* error = body ? object_of(*body, "error") : nullptr) {
      if (const std::string_view message = text_of(*error, "message"); !message.empty()) words = message;
      if (const std::string_view field = text_of(*error, "param"); !field.empty()) words = fmt::format("{}: {}", field, words);
    }
    return make_error(status == 401 ? ErrorCode::kUnauthenticated : ErrorCode::kUnavailable, "the server answers {}: {}", status, words);
  }

  std::string reasoning, content;
  Json calls = Json::array();
  AnswerFigures figures;
  bool done = false;

 private:
  void take_event(std::string_view data) {
    if (data == "[DONE]") {
      done = true;
      return;
    }
    const Result<Json> event = parse_json(data, "event");
    if (!event || !event->is_object()) {
      error_ = "an event of the stream is no JSON object";
      return;
    }
    if (const Json* error = member_of(*event, "error"); error != nullptr && !error->is_null()) {
      error_ = text_of(*error, "message");
      if (error_.empty()) error_ = dump_json(*error);
      return;
    }
    if (const Json* choices = array_of(*event, "choices"); choices != nullptr && !choices->empty()) take_choice(choices->front());
    if (const Json* usage = object_of(*event, "usage")) {
      figures.prompt_tokens = count_of(*usage, "prompt_tokens").value_or(0);
      figures.output_tokens = count_of(*usage, "completion_tokens").value_or(0);
      if (const Json* details = object_of(*usage, "prompt_tokens_details"))
        figures.cached_tokens = count_of(*details, "cached_tokens").value_or(0);
    }
  }

  void take_choice(const Json& choice) {
    if (const std::string_view reason = text_of(choice, "finish_reason"); !reason.empty()) figures.finish_reason = reason;
    const Json* delta = object_of(choice, "delta");
    if (delta == nullptr) return;
    const std::string_view plain = text_of(*delta, "reasoning_content");
    const std::string_view thought = plain.empty() ? text_of(*delta, "reasoning") : plain, text = text_of(*delta, "content");
    const Json* called = array_of(*delta, "tool_calls");
    const bool calls_tools = called != nullptr && !called->empty();
    if (thought.empty() && text.empty() && !calls_tools) return;
    const Clock::time_point now = Clock::now();
    if (!begun_) {
      begun_ = true;
      first_ = now;
      figures.ttft = std::chrono::duration<double>(now - sent_).count();
    }
    figures.decode_seconds = std::chrono::duration<double>(now - first_).count();
    reasoning += thought;
    content += text;
    if (!thought.empty()) listener_.on_reasoning(thought);
    if (!text.empty()) listener_.on_content(text);
    if (calls_tools) {
      for (const Json& piece : *called) take_call(piece);
    }
  }

  void take_call(const Json& piece) {
    constexpr int64_t kMostCalls = 128;
    const int64_t number = count_of(piece, "index").value_or(0);
    if (number < 0 || number >= kMostCalls) return;
    const auto index = static_cast<size_t>(number);
    while (calls.size() <= index) calls.push_back({{"id", ""}, {"type", "function"}, {"function", {{"name", ""}, {"arguments", ""}}}});
    const auto append = [](Json& target, std::string_view text) { target = target.get<std::string>() + std::string(text); };
    append(calls[index]["id"], text_of(piece, "id"));
    if (const Json* function = object_of(piece, "function")) {
      append(calls[index]["function"]["name"], text_of(*function, "name"));
      append(calls[index]["function"]["arguments"], text_of(*function, "arguments"));
    }
  }

  const ChatSession::Listener& listener_;
  EventStreamReader events_;
  std::string refusal_, error_;
  Clock::time_point sent_ = Clock::now(), first_ = sent_;
  bool begun_ = false;
};

}  // namespace

Result<void> ChatParameters::set(std::string_view name, std::string_view value) {
  if (std::ranges::find(kParameters, name) == kParameters.end()) {
    const std::string nearest = nearest_name(name, {kParameters.begin(), kParameters.end()});
    return invalid_argument("there is no parameter '{}'{}; there are {}", name,
                            nearest.empty() ? "" : fmt::format(" (did you mean {}?)", nearest), fmt::join(kParameters, ", "));
  }
  if (value == "default") {
    values_.erase(std::string(name));
    return {};
  }
  Json parsed;
  if (name == "thinking") {
    if (value != "on" && value != "off") return invalid_argument("thinking: '{}' is not one of on, off, default", value);
    parsed = value == "on";
  } else if (is_whole(name)) {
    Result<int64_t> number = parse_integer(value);
    if (!number) return number.error().with_context(name);
    parsed = *number;
  } else {
    Result<double> number = parse_number(value);
    if (!number) return number.error().with_context(name);
    parsed = *number;
  }
  values_.insert_or_assign(std::string(name), std::move(parsed));
  return {};
}

std::vector<std::pair<std::string, std::string>> ChatParameters::list() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const std::string_view name : kParameters) {
    const auto found = values_.find(name);
    if (found == values_.end()) {
      all.emplace_back(name, "default");
    } else {
      all.emplace_back(name, found->second.is_boolean() ? (found->second.get<bool>() ? "on" : "off") : found->second.dump());
    }
  }
  return all;
}

void ChatParameters::add_to(Json& request) const {
  for (const auto& [name, value] : values_) {
    if (name == "thinking") {
      request["chat_template_kwargs"] = {{"enable_thinking", value}};
    } else {
      request[name] = value;
    }
  }
}

std::string figures_text(const AnswerFigures& figures) {
  std::vector<std::string> parts;
  if (figures.output_tokens > 0) parts.push_back(fmt::format("{} token{}", figures.output_tokens, figures.output_tokens == 1 ? "" : "s"));
  if (figures.output_tokens > 1 && figures.decode_seconds > 0)
    parts.push_back(fmt::format("{:.1f} tok/s", static_cast<double>(figures.output_tokens - 1) / figures.decode_seconds));
  if (figures.ttft > 0) parts.push_back(fmt::format("first token after {:.2f} s", figures.ttft));
  if (figures.prompt_tokens > 0) parts.push_back(fmt::format("prompt {} tokens, {} cached", figures.prompt_tokens, figures.cached_tokens));
  if (figures.finish_reason == "length") parts.emplace_back("cut off by the limit of tokens");
  if (figures.interrupted) parts.emplace_back("stopped");
  return fmt::format("{}", fmt::join(parts, ", "));
}

Json ChatSession::request() const {
  Json request{{"model", server_.model}, {"messages", Json::array()}};
  if (!system_prompt_.empty()) request["messages"].push_back({{"role", "system"}, {"content", system_prompt_}});
  for (const Json& message : messages_) request["messages"].push_back(message);
  parameters_.add_to(request);
  return request;
}

Result<AnswerFigures> ChatSession::ask(const std::string& text, const Listener& listener) {
  messages_.push_back({{"role", "user"}, {"content", text}});
  const auto fail = [this](Error error) {
    messages_.pop_back();
    return error;
  };
  Json body = request();
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}, {"continuous_usage_stats", true}};
  const HttpCall call{.method = "POST", .path = "/v1/chat/completions", .headers = server_.headers, .body = dump_json(body)};
  Answer answer(listener);
  HttpExchange* running = nullptr;
  Result<std::unique_ptr<HttpExchange>> exchange =
      HttpExchange::start(server_.address, call, [&](std::string_view bytes) { answer.take_body(running->response().status(), bytes); });
  if (!exchange) return fail(std::move(exchange).error());
  running = exchange->get();
  for (bool complete = false; !complete && !answer.done;) {
    constexpr int kInterruptMs = 50;  // how long an interruption may wait
    poll_exchanges({running}, kInterruptMs);
    if (listener.interrupted()) {
      answer.figures.interrupted = true;
      break;
    }
    Result<bool> advanced = running->advance();
    if (!advanced) return fail(std::move(advanced).error());
    complete = *advanced;
  }
  if (!answer.figures.interrupted) {
    if (std::optional<Error> error = answer.error(running->response().status())) return fail(*std::move(error));
  }
  if (answer.content.empty() && answer.reasoning.empty() && answer.calls.empty()) {
    messages_.pop_back();  // stopped before it began: as if nothing had been asked
    return answer.figures;
  }
  Json message{{"role", "assistant"}, {"content", answer.content}};
  if (!answer.reasoning.empty()) message["reasoning_content"] = answer.reasoning;
  if (!answer.calls.empty()) message["tool_calls"] = answer.calls;
  messages_.push_back(std::move(message));
  return answer.figures;
}

std::optional<std::string> ChatSession::take_back() {
  while (!messages_.empty()) {
    const Json last = std::move(messages_.back());
    messages_.pop_back();
    if (last["role"] == "user") return last["content"].get<std::string>();
  }
  return std::nullopt;
}

std::string ChatSession::markdown() const {
  std::string text = fmt::format("# A chat with {}\n", server_.model);
  if (!system_prompt_.empty()) text += fmt::format("\n## System\n\n{}\n", system_prompt_);
  for (const Json& message : messages_)
    text += fmt::format("\n## {}\n\n{}\n", message["role"] == "user" ? "You" : server_.model, message["content"].get<std::string>());
  return text;
}

}  // namespace quern::app
