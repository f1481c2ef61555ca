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
                                           "include_stop_str_in_output"};
};

class Robustness : public ApiTest {};

TEST_F(Robustness, MutatedRequestsGetAnAnswerAndNeverAFault) {
  constexpr int kRequests = 12'000;
  engine_.set_writer([](const auto&) {
    Script script = say("a</think>\n\nb 🙂 xyz");
    script.events = {3, 2, 5};
    return script;
  });
  start();
  Mutator mutator(20261130);
  std::map<int, int> statuses;
  int parsed = 0, damaged = 0;
  auto client = std::make_unique<HttpClient>(port());
  for (int i = 0; i < kRequests; ++i) {
    auto [path, body] = seeds()[mutator.below(seeds().size())];
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
    if (response->status == 200 && response->header("Content-Type").starts_with("text/event-stream")) {
      ASSERT_EQ(response->events().back(), "[DONE]") << text;
      for (const Json& chunk : response->chunks()) ASSERT_TRUE(chunk.is_object()) << text;
    } else {
      ASSERT_TRUE(response->json().is_object()) << text << "\n" << response->body;
      ASSERT_EQ(response->json().contains("error"), response->status != 200) << text;
    }
  }
  EXPECT_GE(parsed, kRequests / 2);
  EXPECT_GT(damaged, kRequests / 16);
  EXPECT_GT(statuses[200], kRequests / 10) << "mutations that are all refused test little";
  EXPECT_GT(statuses[400], kRequests / 10);
  EXPECT_TRUE(engine_.wait_until_idle());
  EXPECT_EQ(chat(R"({"max_tokens": 3})").status, 200);
  RecordProperty("parsed", parsed);
  for (const auto& [status, count] : statuses) RecordProperty("status_" + std::to_string(status), count);
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
