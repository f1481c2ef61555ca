#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::string_view kTools = R"([
  {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}},
  {"type": "custom", "name": "g"}])";
constexpr std::string_view kCalls =
    "Hm 🙂.\n</think>\n\nI look.\n\n<tool_call>\n<function=f>\n<parameter=s>\na \"b\" 你好\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
    "</tool_call>\nand then\n<tool_call>\n<function=g>\n</function>\n</tool_call>\ndone";
constexpr std::string_view kThinking = R"("thinking": {"type": "enabled", "budget_tokens": 1024})";

class AnthropicApi : public ApiTest {
 protected:
  static Json message_body(std::string_view members) {
    Json body = Json::parse(R"({"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]})");
    body.update(Json::parse(members));
    return body;
  }
  ClientResponse message(std::string_view members = "{}") { return post("/v1/messages", message_body(members)); }
  std::string prompt_of(size_t request) { return standin_tokenizer().decode(engine_.submitted()[request].prompt, false); }
};

/// The message that a stream's events add up to.
Json assembled(const std::vector<Json>& events) {
  Json message;
  std::string partial;
  int64_t open = -1;
  for (const Json& event : events) {
    const std::string type = event["type"];
    if (type == "message_start") {
      message = event["message"];
    } else if (type == "content_block_start") {
      EXPECT_EQ(open, -1) << "one block is open at a time";
      open = event["index"].get<int64_t>();
      EXPECT_EQ(event["index"], message["content"].size());
      message["content"].push_back(event["content_block"]);
      partial.clear();
    } else if (type == "content_block_delta") {
      EXPECT_EQ(event["index"], open);
      Json& block = message["content"].back();
      const Json& delta = event["delta"];
      if (delta["type"] == "input_json_delta") {
        EXPECT_EQ(block["type"], "tool_use");
        partial += delta["partial_json"].get<std::string>();
        continue;
      }
      const std::string name = delta["type"] == "text_delta" ? "text" : delta["type"] == "thinking_delta" ? "thinking" : "signature";
      EXPECT_EQ(delta["type"], name + "_delta");
      block[name] = block[name].get<std::string>() + delta[name].get<std::string>();
    } else if (type == "content_block_stop") {
      EXPECT_EQ(event["index"], open);
      open = -1;
      if (!partial.empty()) message["content"].back()["input"] = Json::parse(partial, nullptr, false);
    } else if (type == "message_delta") {
      EXPECT_EQ(open, -1);
      message.update(event["delta"]);
      message["usage"].update(event["usage"]);
    } else {
      EXPECT_TRUE(type == "ping" || type == "message_stop") << type;
    }
  }
  return message;
}

TEST_F(AnthropicApi, AnswersWithBlocks) {
  start();
  engine_.set_writer([](const auto&) {
    Script script = say(kAnswer);
    script.cached_tokens = 4;
    return script;
  });
  const ClientResponse response = message(fmt::format("{{{}, \"system\": [{{\"type\": \"text\", \"text\": \"Be brief.\"}}]}}", kThinking));
  ASSERT_EQ(response.status, 200) << response.body;
  const Json body = response.json();
  EXPECT_EQ(body["type"], "message");
  EXPECT_EQ(body["role"], "assistant");
  EXPECT_EQ(body["model"], "qwen");
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("msg_"));
  ASSERT_EQ(body["content"].size(), 2u);
  EXPECT_EQ(body["content"][0]["thinking"], "Let me think: 你好?\n");
  EXPECT_THAT(body["content"][0]["signature"].get<std::string>(), StartsWith("quern:"));
  EXPECT_EQ(body["content"][1], Json::parse(R"({"type": "text", "text": "Hello 🙂 world, one two three."})"));
  EXPECT_EQ(body["stop_reason"], "end_turn");
  EXPECT_TRUE(body["stop_sequence"].is_null());
  const size_t prompt = engine_.submitted()[0].prompt.size();
  EXPECT_EQ(body["usage"]["input_tokens"], prompt - 4) << "cached ones are not counted twice";
  EXPECT_EQ(body["usage"]["cache_read_input_tokens"], 4);
  EXPECT_EQ(body["usage"]["output_tokens"], say(kAnswer).tokens.size());
  EXPECT_THAT(prompt_of(0), StartsWith("<|im_start|>system\nBe brief.<|im_end|>\n"));
  EXPECT_EQ(response.header("request-id"), response.header("X-Request-Id"));
}

TEST_F(AnthropicApi, ThinksOnlyWhenAsked) {
  start();
  for (const char* members : {"{}", R"({"thinking": {"type": "disabled"}})", R"({"thinking": {"type": "adaptive"}})"}) ASSERT_EQ(message(members).status, 200);
  ASSERT_EQ(message(fmt::format("{{{}}}", kThinking)).status, 200);
  EXPECT_THAT(prompt_of(0), EndsWith("<think>\n\n</think>\n\n"));
  EXPECT_THAT(prompt_of(1), EndsWith("<think>\n\n</think>\n\n"));
  EXPECT_THAT(prompt_of(2), EndsWith("<think>\n"));
  EXPECT_THAT(prompt_of(3), EndsWith("<think>\n"));
}

// REAS-38, REAS-41, TOOL-46, TOOL-47, STOP-55, STOP-58, USAGE-71
TEST_F(AnthropicApi, StreamingEqualsTheWholeAnswerForEveryCut) {
  start();
  const std::string thinking(kThinking), tools = fmt::format(R"({}, "tools": {})", kThinking, kTools);
  const std::pair<std::string, std::string_view> cases[] = {
      {"{}", "Just so."},
      {"{" + thinking + "}", kAnswer},
      {"{" + thinking + R"(, "stop_sequences": ["two th"]})", kAnswer},
      {"{" + thinking + R"(, "max_tokens": 4})", kAnswer},
      {"{" + tools + "}", kCalls},
      {"{" + tools + R"(, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}})", kCalls},
      {"{" + tools + R"(, "max_tokens": 30})", kCalls},
      {"{" + tools + R"(, "tool_choice": {"type": "tool", "name": "g"}})", "</function>\n</tool_call>"},
      {"{" + thinking + "}", kCalls},
  };
  for (const auto& [members, text] : cases) {
    engine_.set_writer([said = std::string(text)](const auto&) { return say(said); });
    Json body = message_body(members);
    const Json whole = without_ids(post("/v1/messages", body).json());
    ASSERT_TRUE(whole["content"].is_array()) << whole;
    for_every_cut(text, [&] {
      body["stream"] = false;
      ASSERT_EQ(without_ids(post("/v1/messages", body).json()), whole) << members;
      body["stream"] = true;
      ASSERT_EQ(without_ids(assembled(post("/v1/messages", body).chunks())), whole) << members;
    });
  }
}

TEST_F(AnthropicApi, StreamsInAnthropicsOrder) {
  start();
  const ClientResponse response = message(fmt::format("{{{}, \"stream\": true}}", kThinking));
  std::vector<std::string> types, names;
  for (const Json& event : response.chunks()) {
    names.push_back(event["type"]);
    if (types.empty() || types.back() != event["type"]) types.push_back(event["type"]);
  }
  EXPECT_THAT(types, ElementsAre("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "content_block_start",
                                 "content_block_delta", "content_block_stop", "message_delta", "message_stop"));
  EXPECT_EQ(response.event_names(), names);
}

TEST_F(AnthropicApi, TellsWhyItEnded) {
  start();
  engine_.set_writer([](const auto&) { return say("one two three"); });
  Json body = message(R"({"stop_sequences": [" two"]})").json();
  EXPECT_EQ(body["stop_reason"], "stop_sequence");
  EXPECT_EQ(body["stop_sequence"], " two");
  EXPECT_EQ(body["content"][0]["text"], "one");
  EXPECT_EQ(message(R"({"max_tokens": 1})").json()["stop_reason"], "max_tokens");
  engine_.set_writer([](const auto&) { return say("<tool_call>\n<function=g>\n</function>\n</tool_call>"); });
  body = message(fmt::format(R"({{"tools": {}}})", kTools)).json();
  EXPECT_EQ(body["stop_reason"], "tool_use");
  EXPECT_EQ(body["content"][0]["name"], "g");
  EXPECT_EQ(body["content"][0]["input"], Json::object());
  EXPECT_THAT(body["content"][0]["id"].get<std::string>(), StartsWith("toolu_"));
}

TEST_F(AnthropicApi, BlocksBecomeTheMessagesOfAChat) {
  start();
  const char* messages = R"([
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "why", "signature": "x"}, {"type": "text", "text": "I look."},
      {"type": "tool_use", "id": "a", "name": "f", "input": {"s": "x"}}, {"type": "tool_use", "id": "b", "name": "g", "input": {}}]},
    {"role": "user", "content": [{"type": "text", "text": "And be quick."}, {"type": "tool_result", "tool_use_id": "b", "is_error": true, "content": "no g"},
      {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "of f"}]}]}])";
  ASSERT_EQ(post("/v1/messages", {{"max_tokens", 5}, {"messages", Json::parse(messages)}, {"tools", Json::parse(kTools)}}).status, 200);
  const char* chat_messages = R"([{"role": "user", "content": "one two"},
    {"role": "assistant", "content": "I look.", "reasoning": "why", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"s": "x"}}},
                                                                 {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}}]},
    {"role": "tool", "tool_call_id": "a", "content": "of f"}, {"role": "tool", "tool_call_id": "b", "content": "Error: no g"},
    {"role": "user", "content": "And be quick."}])";
  const char* chat_tools = R"([{"type": "function", "function": {"name": "f", "description": "d",
    "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}, {"type": "function", "function": {"name": "g"}}])";
  ASSERT_EQ(post("/v1/chat/completions", {{"messages", Json::parse(chat_messages)}, {"tools", Json::parse(chat_tools)}, {"enable_thinking", false}}).status, 200);
  EXPECT_EQ(prompt_of(0), prompt_of(1));
}

TEST_F(AnthropicApi, ContinuesTheAssistantsWords) {
  start();
  engine_.set_writer([](const auto&) { return say(" world"); });
  const Json body = message(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Hello"}]})").json();
  EXPECT_THAT(prompt_of(0), EndsWith("Hello"));
  EXPECT_EQ(body["content"][0]["text"], " world");
}

TEST_F(AnthropicApi, CountsTokensOfThePromptThatItWouldMake) {
  start();
  const Json members = Json::parse(fmt::format(R"({{{}, "tools": {}, "system": "s"}})", kThinking, kTools));
  Json body = message_body(members.dump());
  ASSERT_EQ(post("/v1/messages", body).status, 200);
  body.erase("max_tokens");
  EXPECT_EQ(post("/v1/messages/count_tokens", body).json(), Json({{"input_tokens", engine_.submitted()[0].prompt.size()}}));
  EXPECT_EQ(engine_.submitted().size(), 1u) << "counting asks the engine nothing";
}

TEST_F(AnthropicApi, ErrorsHaveAnthropicsShapeAndNameTheField) {
  start();
  const std::pair<const char*, const char*> cases[] = {
      {R"({"max_tokens": null})", "max_tokens"},
      {R"({"max_tokens": 0})", "max_tokens"},
      {R"({"messages": []})", "messages"},
      {R"({"messages": null})", "messages"},
      {R"({"messages": ["x"]})", "messages[0]"},
      {R"({"messages": [{"role": "robot", "content": "x"}]})", "messages[0].role"},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": 5}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})", "messages[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]})", "messages[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]})", "messages[0].content[0].tool_use_id"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]}]})",
       "messages[0].content[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]})", "messages"},
      {R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 5}]}]})",
       "messages[1].content[0].input"},
      {R"({"system": 5})", "system"},
      {R"({"system": [{"type": "image"}]})", "system[0].type"},
      {R"({"tools": [{"type": "bash_20250124", "name": "bash"}]})", "tools[0].type"},
      {R"({"tools": [{}]})", "tools[0].name"},
      {R"({"tools": [{"name": "f", "input_schema": 5}]})", "tools[0].input_schema"},
      {R"({"tool_choice": {"type": "any"}})", "tool_choice"},
      {R"({"tool_choice": {"type": "tool", "name": "f"}})", "tool_choice"},
      {R"({"tool_choice": "auto"})", "tool_choice"},
      {R"({"thinking": {"type": "maybe"}})", "thinking"},
      {R"({"thinking": {"type": "enabled", "budget_tokens": "x"}})", "thinking"},
      {R"({"stop_sequences": [""]})", "stop_sequences"},
      {R"({"stop_sequences": [5]})", "stop_sequences"},
      {R"({"container": "c"})", "container"},
      {R"({"mcp_servers": [{"type": "url"}]})", "mcp_servers"},
      {R"({"context_management": 5})", "context_management"},
      {R"({"n": 2})", "n"},
      {R"({"temperature": "hot"})", "temperature"},
      {R"({"max_tokens": 100000})", "maximum context length"},
  };
  for (const auto& [members, words] : cases) {
    const ClientResponse response = message(members);
    EXPECT_EQ(response.status, 400) << members << response.body;
    const Json body = response.json();
    EXPECT_EQ(body["type"], "error") << members;
    EXPECT_EQ(body["error"]["type"], "invalid_request_error") << members;
    EXPECT_THAT(body["error"]["message"].get<std::string>(), HasSubstr(words)) << members;
  }
  EXPECT_TRUE(engine_.submitted().empty());
  const Json unknown = message(R"({"model": "claude"})").json();
  EXPECT_EQ(unknown["error"]["type"], "not_found_error");
  EXPECT_EQ(post_text("/v1/messages", "{").json()["error"]["type"], "invalid_request_error");
}

TEST_F(AnthropicApi, ErrorsOfTheServerHaveAnthropicsShapeToo) {
  ServerOptions options;
  options.api.api_keys = {"key"};
  start(options, false);
  const std::string key = "Authorization: Bearer key\r\n";
  const auto ask_with = [&](std::string_view headers) {
    return value(HttpClient::fetch(port(), "POST", "/v1/messages", dump_json(message_body("{}")), headers));
  };
  EXPECT_EQ(ask_with("").json()["error"]["type"], "authentication_error");
  EXPECT_EQ(ask_with(key).status, 503);
  EXPECT_EQ(ask_with(key).json()["error"]["type"], "overloaded_error");
  server_->set_ready(context_);
  EXPECT_EQ(ask_with(key).status, 200);
  EXPECT_EQ(ask_with("x-api-key: key\r\n").status, 200);
  EXPECT_EQ(ask_with("x-api-key: wrong\r\n").json()["error"]["type"], "authentication_error");
  engine_.set_writer([](const auto&) {
    Script script = say("some");
    script.error_after_end = make_error(ErrorCode::kInternal, "a logit was not finite");
    return script;
  });
  EXPECT_EQ(ask_with(key).status, 500);
  EXPECT_EQ(ask_with(key).json()["error"]["type"], "api_error");
  const ClientResponse streamed = value(HttpClient::fetch(port(), "POST", "/v1/messages", dump_json(message_body(R"({"stream": true})")), key));
  EXPECT_EQ(streamed.event_names().back(), "error");
  EXPECT_EQ(streamed.chunks().back()["error"]["message"], "a logit was not finite");
}

}  // namespace
}  // namespace quern::server
