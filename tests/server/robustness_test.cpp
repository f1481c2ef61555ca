#include <map>
#include <random>

#include "api_fixture.h"

namespace quern::server {
namespace {

// Mutated requests: whatever a client sends, it gets an answer below 500 (or 503), and the next one is served. The seed is fixed.

/// What requests look like when they are right.
const std::vector<std::pair<std::string, Json>>& seeds() {
  static const std::vector<std::pair<std::string, Json>> all = {
      {"/v1/chat/completions",
       Json::parse(R"({"model": "qwen", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi 🙂"}],
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_tokens": 5, "stop": ["x", "yz"], "seed": 3, "n": 2})")},
      {"/v1/chat/completions",
       Json::parse(R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b<|im_end|>"}]},
        {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": [1, 2]}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "result"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}, "logprobs": true, "top_logprobs": 2, "max_completion_tokens": 4})")},
      {"/v1/chat/completions",
       Json::parse(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\npart"}],
        "continue_final_message": true, "chat_template_kwargs": {"enable_thinking": false, "preserve_thinking": true}, "logit_bias": {"5": 1.5},
        "stop_token_ids": [3], "ignore_eos": true, "max_tokens": 3, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5})")},
      {"/v1/completions",
       Json::parse(
           R"({"prompt": "Once upon", "max_tokens": 4, "logprobs": 2, "echo": true, "stream": true, "skip_special_tokens": false})")},
      {"/v1/completions",
       Json::parse(R"({"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 2, "return_token_ids": true, "min_tokens": 1, "best_of": 1})")},
      {"/tokenize", Json::parse(R"({"prompt": "text", "add_special_tokens": true, "return_token_strs": true})")},
      {"/tokenize", Json::parse(R"({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true})")},
      {"/detokenize", Json::parse(R"({"tokens": [1, 2, 151645]})")},
      {"/v1/chat/completions/render", Json::parse(R"({"messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": 4})")},
      {"/v1/completions/render", Json::parse(R"({"prompt": ["a", "b"], "truncate_prompt_tokens": -1, "prompt_logprobs": 1})")},
      {"/v1/responses", Json::parse(R"({"input": "hi", "instructions": "s", "max_output_tokens": 5, "metadata": {"k": "v"}, "store": true, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}}, "truncation": "auto", "include": ["reasoning.encrypted_content"]})")},
      {"/v1/responses",
       Json::parse(R"({"input": [{"role": "developer", "content": "s"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi 🙂"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "x"}], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": [1, 2]}"}, {"type": "function_call_output", "call_id": "1", "output": "result"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}}], "tool_choice": "auto", "stream": true, "max_output_tokens": 9,
        "parallel_tool_calls": false, "temperature": 0.5})")},
      {"/v1/responses", Json::parse(R"({"input": [{"role": "user", "content": "q"}], "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 9,
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}})")},
      {"/v1/responses/input_tokens", Json::parse(R"({"input": [{"role": "user", "content": "hi"}], "instructions": "s"})")},
      {"/v1/messages", Json::parse(R"({"model": "qwen", "max_tokens": 5, "messages": [{"role": "user", "content": "hi 🙂"}], "system": "s", "stop_sequences": ["x"],
        "temperature": 0.5, "top_k": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}})")},
      {"/v1/messages",
       Json::parse(R"({"max_tokens": 9, "stream": true, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "x"}, {"type": "text", "text": "t"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "result"}], "is_error": false}, {"type": "text", "text": "more"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "array"}}}}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}})")},
      {"/v1/messages", Json::parse(R"({"max_tokens": 3, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "begun"}]})")},
      {"/v1/messages/count_tokens", Json::parse(R"({"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}})")},
  };
  return all;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return random_() % n; }

  /// Changes one value, somewhere.
  void mutate(Json& value) {
    if (value.is_structured() && !value.empty() && below(5) != 0) {
      if (value.is_array()) {
        mutate(value[below(value.size())]);
      } else {
        auto it = value.begin();
        std::advance(it, static_cast<std::ptrdiff_t>(below(value.size())));
        mutate(it.value());
      }
      return;
    }
    switch (below(6)) {
      case 0:
        if (value.is_object() && !value.empty()) {
          auto it = value.begin();
          std::advance(it, static_cast<std::ptrdiff_t>(below(value.size())));
          value.erase(it);
          return;
        }
        break;
      case 1:
        if (value.is_array() && value.size() < 64) {
          value.push_back(value.empty() ? strange() : value[below(value.size())]);
          return;
        }
        break;
      case 2:
        if (value.is_object()) {
          value[names_[below(names_.size())]] = strange();
          return;
        }
        break;
      case 3:
        if (value.is_string()) {
          value = text(value.get<std::string>());
          return;
        }
        break;
      default: break;
    }
    value = strange();
  }

  /// Damages the text of a request.
  std::string damage(std::string body) {
    for (size_t n = 1 + below(3); n > 0 && !body.empty(); --n) {
      const size_t at = below(body.size());
      switch (below(4)) {
        case 0: body.erase(at, 1 + below(8)); break;
        case 1: body.insert(at, 1, static_cast<char>(random_())); break;
        case 2: body[at] = static_cast<char>(random_()); break;
        default: body.insert(at, body.substr(below(body.size()), 1 + below(16))); break;
      }
    }
    return body;
  }

 private:
  std::string text(const std::string& old) {
    static const std::vector<std::string> kTexts = {
        "",     "<|im_end|>", "</think>",    "<think>",  "<tool_call>", "\xEF\xB7\x90", "\xEF\xB7\x91 ", std::string(1, '\0'),
        "🙂", "{{ 1/0 }}",  "{% raise %}", "\r\n\r\n", "\u2028"};
    return old.substr(0, below(old.size() + 1)) + kTexts[below(kTexts.size())] + old;
  }
  Json strange() {
    switch (below(16)) {
      case 0: return nullptr;
      case 1: return true;
      case 2: return false;
      case 3: return -1;
      case 4: return 0;
      case 5: return INT64_MIN;
      case 6: return UINT64_MAX;
      case 7: return 1e308;
      case 8: return -0.0;
      case 9: return "";
      case 10: return Json::array();
      case 11: return Json::object();
      case 12: return text("x");
      case 13: return 0.5;
      case 14: return Json::array({1, "a", nullptr});
      default: return static_cast<int64_t>(below(200'000));
    }
  }

  std::mt19937_64 random_;
  const std::vector<std::string> names_ = {"model",
                                           "messages",
                                           "prompt",
                                           "temperature",
                                           "top_p",
                                           "top_k",
                                           "min_p",
                                           "seed",
                                           "n",
                                           "stop",
                                           "stop_token_ids",
                                           "logit_bias",
                                           "max_tokens",
                                           "min_tokens",
                                           "stream",
                                           "stream_options",
                                           "logprobs",
                                           "top_logprobs",
                                           "tools",
                                           "tool_choice",
                                           "response_format",
                                           "chat_template_kwargs",
                                           "enable_thinking",
                                           "echo",
                                           "role",
                                           "content",
                                           "type",
                                           "text",
                                           "function",
                                           "name",
                                           "arguments",
                                           "tool_calls",
                                           "reasoning",
                                           "continue_final_message",
                                           "add_generation_prompt",
                                           "priority",
                                           "cache_salt",
                                           "tokens",
                                           "unheard_of",
                                           "best_of",
                                           "suffix",
                                           "return_token_ids",
                                           "include_stop_str_in_output",
                                           "prompt_logprobs",
                                           "truncate_prompt_tokens",
                                           "request_id",
                                           "input",
                                           "instructions",
                                           "previous_response_id",
                                           "max_output_tokens",
                                           "store",
                                           "reasoning",
                                           "truncation",
                                           "metadata",
                                           "include",
                                           "call_id",
                                           "output",
                                           "summary",
                                           "id",
                                           "system",
                                           "stop_sequences",
                                           "thinking",
                                           "budget_tokens",
                                           "tool_use_id",
                                           "input_schema",
                                           "is_error",
                                           "cache_control"};
};

class Robustness : public ApiTest {};

TEST_F(Robustness, MutatedRequestsGetAnAnswerAndNeverAFault) {
  constexpr int kRequests = 24'000;
  engine_.set_writer([](const auto&) {
    Script script = say("a</think>\n\nb 🙂 xyz");
    script.events = {3, 2, 5};
    return script;
  });
  start();
  Mutator mutator(20261130);
  std::map<int, int> statuses;
  std::map<std::string, int> answered;
  std::string stored;  // a response to go on from
  int parsed = 0, damaged = 0;
  auto client = std::make_unique<HttpClient>(port());
  for (int i = 0; i < kRequests; ++i) {
    auto [path, body] = seeds()[mutator.below(seeds().size())];
    if (path == "/v1/responses" && mutator.below(4) == 0 && !stored.empty()) body["previous_response_id"] = stored;
    for (size_t n = mutator.below(4); n > 0; --n) mutator.mutate(body);
    std::string text = dump_json(body);
    if (mutator.below(8) == 0) {
      text = mutator.damage(std::move(text));
      ++damaged;
    }
    // Whatever is a JSON object is looked at by the endpoint's handler, field by field.
    const Json again = Json::parse(text, nullptr, false);
    parsed += again.is_object() ? 1 : 0;
    if (!client->send_request("POST", path, text)) {
      client = std::make_unique<HttpClient>(port());
      ASSERT_TRUE(client->send_request("POST", path, text));
    }
    const auto response = client->read_response();
    ASSERT_TRUE(response) << path << "\n" << text;
    ++statuses[response->status];
    ASSERT_TRUE(response->status < 500 || response->status == 503) << path << "\n" << text << "\n" << response->body;
    ++answered[path];
    if (response->status == 200 && response->header("Content-Type").starts_with("text/event-stream")) {
      const std::string last = response->events().back();
      ASSERT_TRUE(last == "[DONE]" || last.find(R"("type":"message_stop")") != std::string::npos || last.find(R"("type":"response.)") != std::string::npos) << text << last;
      for (const Json& chunk : response->chunks()) ASSERT_TRUE(chunk.is_object()) << text;
    } else {
      ASSERT_TRUE(response->json().is_object()) << text << "\n" << response->body;
      const Json answer = response->json();
      ASSERT_EQ(answer.contains("error") && answer["error"].is_object(), response->status != 200) << text;
      if (path == "/v1/responses" && response->status == 200) stored = answer["id"];
    }
  }
  EXPECT_EQ(answered.size(), 10u) << "every endpoint with a body";
  for (const auto& [path, count] : answered) EXPECT_GT(count, 500) << path;
  EXPECT_GE(parsed, kRequests / 2);
  EXPECT_GT(damaged, kRequests / 16);
  EXPECT_GT(statuses[200], kRequests / 10) << "mutations that are all refused test little";
  EXPECT_GT(statuses[400], kRequests / 10);
  EXPECT_TRUE(engine_.wait_until_idle());
  EXPECT_EQ(chat(R"({"max_tokens": 3})").status, 200);
  RecordProperty("parsed", parsed);
  for (const auto& [status, count] : statuses) RecordProperty("status_" + std::to_string(status), count);
}

TEST_F(Robustness, StrangePathsGetAnAnswer) {
  start();
  Mutator mutator(5);
  const std::string id = post("/v1/responses", {{"input", "hi"}}).json()["id"];
  const std::vector<std::string> paths = {"/v1/responses/" + id, "/v1/responses/" + id + "/input_items?order=asc&limit=5&after=x", "/v1/models/qwen", "/openapi.json", "/v1/messages/count_tokens"};
  std::map<int, int> statuses;
  for (int i = 0; i < 2'000; ++i) {
    std::string target = paths[mutator.below(paths.size())];
    for (size_t n = mutator.below(3); n > 0; --n) {
      const size_t at = 1 + mutator.below(target.size() - 1);
      if (mutator.below(2) == 0) target.erase(at, 1 + mutator.below(4));
      target.insert(std::min(at, target.size()), 1, "/{}%?&=a"[mutator.below(8)]);
    }
    const char* methods[] = {"GET", "DELETE", "OPTIONS", "PUT", "POST"};
    const auto response = HttpClient::fetch(port(), methods[mutator.below(5)], target);
    ASSERT_TRUE(response) << target;
    ASSERT_LT(response->status, 500) << target;
    ++statuses[response->status];
  }
  EXPECT_GT(statuses[200], 50);
  EXPECT_GT(statuses[404], 50);
  EXPECT_GT(statuses[405], 50);
}

TEST_F(Robustness, DamagedHttpNeverStopsTheServer) {
  start();
  Mutator mutator(7);
  const std::string body = R"({"messages":[{"role":"user","content":"hi"}],"max_tokens":2})";
  const std::string request =
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  for (int i = 0; i < 2'000; ++i) {
    HttpClient client(port());
    ASSERT_TRUE(client.connected());
    std::string text = request;
    for (size_t n = 1 + mutator.below(3); n > 0; --n) text = mutator.damage(std::move(text));
    client.send(text);
    if (mutator.below(2) == 0) continue;  // and leaves at once
    client.finish_sending();
    if (const auto response = client.read_response()) {
      ASSERT_TRUE(response->status < 500 || response->status == 503) << text;
    }
  }
  EXPECT_TRUE(engine_.wait_until_idle());
  EXPECT_EQ(chat().status, 200);
}

}  // namespace
}  // namespace quern::server
