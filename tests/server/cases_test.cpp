#include <cmath>
#include <limits>
#include <thread>

#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Faults that other servers were reported to have (cases.md, by area and number), each looked for on every endpoint where it could be.

/// The three endpoints with conversations, in their own words.
struct Chatter {
  const char* path;
  const char* max_tokens;
  const char* stop;
  const char* prompt_field;
};
constexpr Chatter kChat{"/v1/chat/completions", "max_tokens", "stop", "messages"};
constexpr Chatter kResponses{"/v1/responses", "max_output_tokens", "stop", "input"};
constexpr Chatter kMessages{"/v1/messages", "max_tokens", "stop_sequences", "messages"};

class Cases : public ApiTest, public ::testing::WithParamInterface<Chatter> {
 protected:
  static bool is(const Chatter& chatter) { return GetParam().path == std::string_view(chatter.path); }
  static Json body(std::string_view user = "hi", bool thinking = true) {
    Json json;
    json[is(kResponses) ? "input" : "messages"] = Json::array({{{"role", "user"}, {"content", user}}});
    json[GetParam().max_tokens] = 200;
    json["chat_template_kwargs"] = {{"enable_thinking", thinking}};
    return json;
  }
  /// Tools f (a string, an array, an object, a number, a boolean) and g (nothing).
  static Json tools() {
    const Json schema = Json::parse(R"({"type": "object", "properties": {"s": {"type": "string"}, "list": {"type": "array"}, "o": {"type": "object"},
      "n": {"type": "number"}, "b": {"type": "boolean"}}})");
    Json list = Json::array();
    for (const char* name : {"f", "g"}) {
      const Json parameters = std::string_view(name) == "f" ? schema : Json::parse(R"({"type": "object", "properties": {}})");
      if (is(kMessages)) {
        list.push_back({{"name", name}, {"input_schema", parameters}});
      } else if (is(kResponses)) {
        list.push_back({{"type", "function"}, {"name", name}, {"parameters", parameters}});
      } else {
        list.push_back({{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}}}});
      }
    }
    return list;
  }
  struct Answer {
    int status = 0;
    std::string reasoning, content, end;  // end: in the words of chats
    std::vector<std::string> calls;       // name(arguments)
    int64_t completion_tokens = 0, reasoning_tokens = -1;
    Json raw;
    friend bool operator==(const Answer& a, const Answer& b) {
      return a.status == b.status && a.reasoning == b.reasoning && a.content == b.content && a.end == b.end && a.calls == b.calls &&
             a.completion_tokens == b.completion_tokens && a.reasoning_tokens == b.reasoning_tokens;
    }
  };
  Answer ask(Json request) {
    const ClientResponse response = post(GetParam().path, request);
    Answer answer;
    answer.status = response.status;
    answer.raw = response.json();
    if (response.status != 200) return answer;
    if (is(kChat)) return read_chat(std::move(answer));
    if (is(kResponses)) return read_response(std::move(answer));
    return read_message(std::move(answer));
  }
  /// The same, streamed: what it adds up to is put together by the tests of each endpoint, here only text and calls.
  Answer ask_streamed(Json request) {
    request["stream"] = true;
    if (is(kChat)) request["stream_options"] = {{"include_usage", true}};
    const ClientResponse response = post(GetParam().path, request);
    Answer answer;
    answer.status = response.status;
    std::vector<std::string> names, arguments;
    for (const Json& event : response.chunks()) {
      const std::string type = event.value("type", "");
      if (is(kChat)) {
        if (event.contains("usage") && event["usage"].is_object()) set_usage(event["usage"], "completion_tokens", "completion_tokens_details", answer);
        if (event["choices"].empty()) continue;
        const Json& choice = event["choices"][0];
        answer.reasoning += choice["delta"].value("reasoning_content", "");
        answer.content += choice["delta"].value("content", "");
        if (choice["finish_reason"].is_string()) answer.end = choice["finish_reason"];
        for (const Json& call : choice["delta"].value("tool_calls", Json::array())) {
          if (call.contains("id")) names.push_back(call["function"]["name"]), arguments.emplace_back();
          arguments.back() += call["function"]["arguments"].get<std::string>();
        }
      } else if (is(kResponses)) {
        if (type == "response.output_text.delta") answer.content += event["delta"].get<std::string>();
        if (type == "response.reasoning_text.delta") answer.reasoning += event["delta"].get<std::string>();
        if (type == "response.output_item.added" && event["item"]["type"] == "function_call") names.push_back(event["item"]["name"]), arguments.emplace_back();
        if (type == "response.function_call_arguments.delta") arguments.back() += event["delta"].get<std::string>();
        if (type == "response.completed" || type == "response.incomplete") {
          answer.raw = event["response"];
          const Answer whole = read_response(answer);
          answer.end = whole.end;
          answer.completion_tokens = whole.completion_tokens;
          answer.reasoning_tokens = whole.reasoning_tokens;
        }
      } else {
        if (type == "content_block_start" && event["content_block"]["type"] == "tool_use") names.push_back(event["content_block"]["name"]), arguments.emplace_back();
        if (type == "content_block_delta") {
          const Json& delta = event["delta"];
          answer.content += delta.value("text", "");
          answer.reasoning += delta.value("thinking", "");
          if (delta.contains("partial_json")) arguments.back() += delta["partial_json"].get<std::string>();
        }
        if (type == "message_delta") {
          answer.end = end_of(event["delta"]["stop_reason"]);
          answer.completion_tokens = event["usage"]["output_tokens"];
        }
      }
    }
    for (size_t i = 0; i < names.size(); ++i) answer.calls.push_back(call_text(names[i], Json::parse(arguments[i], nullptr, false)));
    return answer;
  }
  Answer say_and_ask(std::string_view text, const Json& request) {
    engine_.set_writer([said = std::string(text)](const auto&) { return say(said); });
    Answer answer = ask(request);
    EXPECT_EQ(ask_streamed(request), answer) << text;
    return answer;
  }
  std::string last_prompt() { return standin_tokenizer().decode(engine_.submitted().back().prompt, false); }
  static std::string error_message(const Answer& answer) { return answer.raw["error"]["message"]; }

 private:
  static std::string call_text(const std::string& name, const Json& arguments) { return name + "(" + arguments.dump() + ")"; }
  static std::string end_of(const std::string& stop_reason) {
    return stop_reason == "max_tokens" ? "length" : stop_reason == "tool_use" ? "tool_calls" : "stop";
  }
  static void set_usage(const Json& usage, const char* tokens, const char* details, Answer& answer) {
    answer.completion_tokens = usage[tokens];
    answer.reasoning_tokens = usage[details]["reasoning_tokens"];
  }
  static Answer read_chat(Answer answer) {
    const Json& choice = answer.raw["choices"][0];
    const auto text = [](const Json& json) { return json.is_string() ? json.get<std::string>() : std::string(); };
    answer.reasoning = text(choice["message"]["reasoning_content"]);
    answer.content = text(choice["message"]["content"]);
    answer.end = choice["finish_reason"];
    for (const Json& call : choice["message"].value("tool_calls", Json::array())) {
      answer.calls.push_back(call_text(call["function"]["name"], Json::parse(call["function"]["arguments"].get<std::string>())));
    }
    set_usage(answer.raw["usage"], "completion_tokens", "completion_tokens_details", answer);
    return answer;
  }
  static Answer read_response(Answer answer) {
    answer.reasoning.clear();
    answer.content.clear();
    for (const Json& item : answer.raw["output"]) {
      if (item["type"] == "reasoning") answer.reasoning += item["content"][0]["text"].get<std::string>();
      if (item["type"] == "message") answer.content += item["content"][0]["text"].get<std::string>();
      if (item["type"] == "function_call") answer.calls.push_back(call_text(item["name"], Json::parse(item["arguments"].get<std::string>())));
    }
    answer.end = answer.raw["status"] == "incomplete" ? "length" : answer.calls.empty() ? "stop" : "tool_calls";
    set_usage(answer.raw["usage"], "output_tokens", "output_tokens_details", answer);
    return answer;
  }
  static Answer read_message(Answer answer) {
    for (const Json& block : answer.raw["content"]) {
      answer.reasoning += block.value("thinking", "");
      answer.content += block.value("text", "");
      if (block["type"] == "tool_use") answer.calls.push_back(call_text(block["name"], block["input"]));
    }
    answer.end = end_of(answer.raw["stop_reason"]);
    answer.completion_tokens = answer.raw["usage"]["output_tokens"];
    return answer;
  }
};
INSTANTIATE_TEST_SUITE_P(Endpoints, Cases, ::testing::Values(kChat, kResponses, kMessages), [](const auto& chatter) {
  return std::string(chatter.param.path == std::string_view(kChat.path) ? "Chat" : chatter.param.path == std::string_view(kResponses.path) ? "Responses" : "Messages");
});

TEST_P(Cases, Tmpl31AndTmpl32ATemplateThatRefusesIsA400BeforeTheStreamBegins) {
  start();
  Json request = body();
  request[GetParam().prompt_field] = Json::array({{{"role", "system"}, {"content", "no user"}}});
  for (const bool stream : {false, true}) {
    request["stream"] = stream;
    const Answer answer = ask(request);
    EXPECT_EQ(answer.status, 400);
    EXPECT_EQ(error_message(answer), "No user query found in messages.");
  }
  EXPECT_TRUE(engine_.submitted().empty());
}

TEST_P(Cases, Tmpl34TheTemplatesVariablesReachIt) {
  start();
  ask(body("hi", true));
  EXPECT_THAT(last_prompt(), EndsWith("<think>\n"));
  ask(body("hi", false));
  EXPECT_THAT(last_prompt(), EndsWith("<think>\n\n</think>\n\n"));
}

TEST_P(Cases, Reas37TheThinkTagOfThePromptCounts) {
  start();
  const Answer thinking = say_and_ask("I think.\n</think>\n\nHello", body("hi", true)), plain = say_and_ask("Hello", body("hi", false));
  EXPECT_EQ(thinking.reasoning, "I think.\n");
  EXPECT_EQ(thinking.content, "Hello");
  EXPECT_EQ(plain.reasoning, "");
  EXPECT_EQ(plain.content, "Hello");
}

TEST_P(Cases, Reas38AThoughtThatIsCutOffIsAllReasoning) {
  start();
  Json request = body();
  request[GetParam().max_tokens] = 4;
  const Answer answer = say_and_ask("I think and think and think", request);
  EXPECT_EQ(answer.content, "");
  EXPECT_THAT(answer.reasoning, ::testing::StartsWith("I think"));
  EXPECT_EQ(answer.end, "length");
}

TEST_P(Cases, Reas40AnEndInsideAThoughtIsToldAsItIs) {
  start();
  const Answer answer = say_and_ask("I think", body());
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.reasoning, "I think");
  EXPECT_EQ(answer.content, "");
  EXPECT_EQ(answer.end, "stop");
}

TEST_P(Cases, Reas41AStopThatBeginsLikeATagDoesNotCutTheTag) {
  start();
  Json request = body();
  request[GetParam().stop] = {"</thinking>", "<thx"};
  const Answer answer = say_and_ask("a <th b\n</think>\n\nc </thin", request);
  EXPECT_EQ(answer.reasoning, "a <th b\n");
  EXPECT_EQ(answer.content, "c </thin");
}

TEST_P(Cases, Tool43CallsWithoutArgumentsAndWithBracesAreValidJson) {
  start();
  Json request = body();
  request["tools"] = tools();
  const Answer answer = say_and_ask(
      "</think>\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=s>\n}\n</parameter>\n</function>\n</tool_call>", request);
  EXPECT_THAT(answer.calls, ElementsAre("g({})", R"(f({"s":"}"}))"));
  EXPECT_EQ(answer.end, "tool_calls");
}

TEST_P(Cases, Tool44MalformedParametersNeverBreakTheObjectOrTheSession) {
  start();
  Json request = body();
  request["tools"] = tools();
  for (const char* damage : {"<parameter=\ns>\nx\n</parameter>\n", "<parameter\n", "<parameter=s\nx", "stray = x\n", "<parameter=>\nx\n</parameter>\n"}) {
    const Answer answer = say_and_ask("</think>\n\n<tool_call>\n<function=f>\n" + std::string(damage) + "</function>\n</tool_call>", request);
    ASSERT_EQ(answer.calls.size(), 1u) << damage;
    EXPECT_THAT(answer.calls[0], Not(HasSubstr("<discarded>"))) << damage;
  }
  // A client that sends back what it was given can go on.
  if (is(kChat)) {
    request["messages"].push_back(ask(request).raw["choices"][0]["message"]);
    request["messages"].push_back({{"role", "tool"}, {"content", "x"}});
    EXPECT_EQ(ask(request).status, 200);
  }
}

TEST_P(Cases, Tool46ReasoningThenContentThenCalls) {
  start();
  Json request = body();
  request["tools"] = tools();
  const Answer answer = say_and_ask("Hm <tool.\n</think>\n\nI look.\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>", request);
  EXPECT_EQ(answer.reasoning, "Hm <tool.\n");
  EXPECT_EQ(answer.content, "I look.");
  EXPECT_THAT(answer.calls, ElementsAre("g({})"));
}

TEST_P(Cases, Tool47AnEndInsideACallIsA200WithLength) {
  start();
  Json request = body();
  request["tools"] = tools();
  const std::string text = "</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\nmany words 你好 🙂\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>";
  for (size_t n = 1; n < standin_tokenizer().encode(text).size(); ++n) {
    request[GetParam().max_tokens] = n;
    const Answer answer = say_and_ask(text, request);
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.end, "length") << n;
    for (const std::string& call : answer.calls) EXPECT_THAT(call, Not(HasSubstr("<discarded>"))) << n;
  }
}

TEST_P(Cases, Tool49ArgumentsHaveTheTypesOfTheSchema) {
  start();
  Json request = body();
  request["tools"] = tools();
  const Answer answer = say_and_ask(
      "</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=list>\n[1, \"a\"]\n</parameter>\n<parameter=o>\n{\"x\": {}}\n</parameter>\n"
      "<parameter=n>\n2.5\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>",
      request);
  EXPECT_THAT(answer.calls, ElementsAre(R"(f({"s":"5","list":[1,"a"],"o":{"x":{}},"n":2.5,"b":true}))"));
}

TEST_P(Cases, Stop55AndStop56AStopOfSeveralTokensIsCutExactly) {
  start();
  Json request = body("hi", false);
  request[GetParam().stop] = {"two three"};
  const Answer answer = say_and_ask("one two, two threefold", request);
  EXPECT_EQ(answer.content, "one two, ");
  EXPECT_EQ(answer.end, "stop");
}

TEST_P(Cases, Stop58WhatWasHeldBackGoesThroughTheParsers) {
  start();
  Json request = body();
  request["tools"] = tools();
  request[GetParam().stop] = {"</tool_call>STOP", "</think>STOP"};
  const Answer answer = say_and_ask("a</think>\n\nb\n<tool_call>\n<function=g>\n</function>\n</tool_call>", request);
  EXPECT_EQ(answer.reasoning, "a");
  EXPECT_EQ(answer.content, "b");
  EXPECT_THAT(answer.calls, ElementsAre("g({})"));
}

TEST_P(Cases, Stop59TheBeginningOfAStopIsReleasedAtTheEnd) {
  start();
  Json request = body("hi", false);
  request[GetParam().stop] = {"three four"};
  EXPECT_EQ(say_and_ask("one two three", request).content, "one two three");
}

TEST_P(Cases, Samp61ZeroAndMinusOneSwitchTopKOff) {
  context_.sampling_defaults.top_k = 20;
  start();
  for (const int top_k : {0, -1}) {
    Json request = body();
    request["top_k"] = top_k;
    ASSERT_EQ(ask(request).status, 200);
    EXPECT_EQ(engine_.submitted().back().sampling.top_k, 0);
  }
}

TEST_P(Cases, Samp64AndSamp65SeedsArePassedOnBesideMinP) {
  start();
  Json request = body();
  request["seed"] = 5;
  request["min_p"] = 0.1;
  ASSERT_EQ(ask(request).status, 200);
  EXPECT_EQ(engine_.submitted().back().sampling.seed, 5u);
  EXPECT_EQ(engine_.submitted().back().sampling.min_p, 0.1F);
  request["seed"] = nullptr;
  ASSERT_EQ(ask(request).status, 200);
  const uint64_t seed = engine_.submitted().back().sampling.seed;
  ASSERT_EQ(ask(request).status, 200);
  EXPECT_NE(engine_.submitted().back().sampling.seed, seed);
}

TEST_P(Cases, Samp67ATemperatureAloneLeavesTheRestNeutral) {
  start();
  Json request = body();
  request["temperature"] = 0.7;
  ASSERT_EQ(ask(request).status, 200);
  const auto requests = engine_.submitted();
  const engine::SamplingParams& sampling = requests.back().sampling;
  EXPECT_EQ(sampling.temperature, 0.7F);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.top_p, 1.0F);
  EXPECT_EQ(sampling.min_p, 0.0F);
  EXPECT_EQ(sampling.repetition_penalty, 1.0F);
}

TEST_P(Cases, Usage70WhatComesBehindAStopIsNotCounted) {
  start();
  Json request = body();
  request[GetParam().stop] = {"STOP"};
  engine_.set_writer([](const auto&) {
    Script script = say("thinks STOP and goes on and on and on");
    script.events = {script.tokens.size()};  // all at once, as accepted drafts come
    return script;
  });
  const Answer answer = ask(request);
  const auto up_to_stop = static_cast<int64_t>(standin_tokenizer().encode("thinks STOP").size());
  EXPECT_EQ(answer.completion_tokens, up_to_stop);
  EXPECT_LE(answer.reasoning_tokens, answer.completion_tokens);
}

TEST_P(Cases, Usage71And73UsageIsWholeAndSaysWhatWasCached) {
  start();
  for (const int cached : {0, 3}) {
    engine_.set_writer([cached](const auto&) {
      Script script = say(kAnswer);
      script.cached_tokens = cached;
      return script;
    });
    const Answer whole = ask(body());
    EXPECT_EQ(ask_streamed(body()), whole);
    EXPECT_EQ(whole.completion_tokens, say(kAnswer).tokens.size());
    const Json& usage = whole.raw["usage"];
    EXPECT_EQ(is(kMessages)    ? usage["cache_read_input_tokens"]
              : is(kResponses) ? usage["input_tokens_details"]["cached_tokens"]
                               : usage["prompt_tokens_details"]["cached_tokens"],
              cached);
  }
}

TEST_P(Cases, Cancel74AClientThatLeavesEndsItsRequest) {
  start();
  engine_.hold();
  for (const bool stream : {false, true}) {
    Json request = body();
    request["stream"] = stream;
    HttpClient client(port());
    ASSERT_TRUE(client.send_request("POST", GetParam().path, dump_json(request)));
    while (engine_.stats().num_running == 0) std::this_thread::yield();
    client.close();
    EXPECT_TRUE(engine_.wait_until_idle());
  }
  EXPECT_EQ(engine_.stats().requests_cancelled, 2u);
}

TEST_P(Cases, Http79AndHttp80APromptOverTheWindowIsA400WithTheNumbers) {
  start();
  std::string words;
  for (int i = 0; i < 5000; ++i) words += " word";
  for (const bool stream : {false, true}) {
    Json request = body(words);
    request["stream"] = stream;
    const Answer answer = ask(request);
    EXPECT_EQ(answer.status, 400);
    EXPECT_THAT(error_message(answer), HasSubstr("maximum context length is 4096 tokens"));
    EXPECT_THAT(error_message(answer), Not(HasSubstr("-")));
    if (is(kMessages)) continue;
    EXPECT_EQ(answer.raw["error"]["param"], GetParam().prompt_field);
    EXPECT_EQ(answer.raw["error"]["code"], "context_length_exceeded");
  }
}

TEST_P(Cases, Http82AndTmpl35ATurnMayHaveReasoningTextAndCalls) {
  start();
  Json request = body();
  request["tools"] = tools();
  if (is(kChat)) {
    for (const Json& message : Json::parse(R"([{"role": "assistant", "content": "both", "reasoning": "why", "reasoning_content": null,
           "tool_calls": [{"id": "a", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "a", "content": "done"}])")) {
      request["messages"].push_back(message);
    }
  } else if (is(kResponses)) {
    for (const Json& item : Json::parse(R"([{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
           {"role": "assistant", "content": "both"}, {"type": "function_call", "call_id": "a", "name": "g", "arguments": "{}"},
           {"type": "function_call_output", "call_id": "a", "output": "done"}])")) {
      request["input"].push_back(item);
    }
  } else {
    for (const Json& message : Json::parse(R"([{"role": "assistant", "content": [{"type": "thinking", "thinking": "why", "signature": ""}, {"type": "text", "text": "both"},
           {"type": "tool_use", "id": "a", "name": "g", "input": {}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}]}])")) {
      request["messages"].push_back(message);
    }
  }
  const Answer answer = ask(request);
  EXPECT_EQ(answer.status, 200) << answer.raw;
  EXPECT_THAT(last_prompt(), HasSubstr("<think>\nwhy\n</think>\n\nboth\n\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
                                       "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>"));
}

class CasesOfLogprobs : public ApiTest {};

TEST_F(CasesOfLogprobs, Logp68InfiniteLogprobsAreValidJson) {
  engine_.set_logprob([](int32_t, int32_t rank) {
    return rank == 0 ? -std::numeric_limits<float>::infinity() : rank == 1 ? std::numeric_limits<float>::quiet_NaN() : -1.0F;
  });
  start();
  const auto finite = [](const Json& json, const auto& self) -> bool {
    if (json.is_number_float()) return std::isfinite(json.get<double>());
    return !json.is_structured() || std::all_of(json.begin(), json.end(), [&](const Json& one) { return self(one, self); });
  };
  for (const char* members : {R"({"logprobs": true, "top_logprobs": 3, "prompt_logprobs": 2})", R"({"logprobs": true, "prompt_logprobs": 0, "stream": true})"}) {
    const ClientResponse response = chat(members);
    ASSERT_EQ(response.status, 200);
    for (const Json& json : response.body.starts_with("{") ? std::vector<Json>{response.json()} : response.chunks()) {
      EXPECT_FALSE(json.is_discarded());
      EXPECT_TRUE(finite(json, finite));
    }
  }
  const ClientResponse response = complete(R"({"prompt": "a b", "logprobs": 2, "echo": true, "prompt_logprobs": 2, "temperature": 1e-6, "top_k": 1})");
  ASSERT_EQ(response.status, 200);
  EXPECT_FALSE(response.json().is_discarded());
  EXPECT_EQ(response.json()["choices"][0]["logprobs"]["token_logprobs"][1], -9999.0);
}

TEST(CasesOfHttp, Http85TheDefaultIsThisMachineAlone) {
  EXPECT_EQ(HttpOptions{}.host, "127.0.0.1");
  ServerOptions open;
  open.http.host = "0.0.0.0";
  open.http.port = 0;
  ::testing::internal::CaptureStderr();
  auto server = Server::start(open);
  const std::string log = ::testing::internal::GetCapturedStderr();
  ASSERT_OK(server);
  EXPECT_THAT(log, HasSubstr("ANYONE"));
  open.api.api_keys = {"key"};
  ::testing::internal::CaptureStderr();
  auto guarded = Server::start(open);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("ANYONE")));
  ASSERT_OK(guarded);
}

}  // namespace
}  // namespace quern::server
