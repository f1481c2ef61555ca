#include <set>

#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::string_view kTools = R"([
  {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}},
  {"type": "function", "name": "g"}])";
constexpr std::string_view kCalls =
    "Hm 🙂.\n</think>\n\nI look.\n\n<tool_call>\n<function=f>\n<parameter=s>\na \"b\" 你好\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
    "</tool_call>\nand then\n<tool_call>\n<function=g>\n</function>\n</tool_call>\ndone";

class ResponsesApi : public ApiTest {
 protected:
  ClientResponse respond(std::string_view members = "{}") {
    Json body = {{"input", "hi"}};
    body.update(Json::parse(members));
    return post("/v1/responses", body);
  }
  std::string prompt_of(size_t request) { return standin_tokenizer().decode(engine_.submitted()[request].prompt, false); }
};

/// Puts the items of a stream together from its deltas, as clients do, and checks on the way that the events agree with each other.
Json assembled(const std::vector<Json>& events) {
  Json items = Json::array();
  int64_t sequence_number = 0;
  for (const Json& event : events) {
    EXPECT_EQ(event["sequence_number"], sequence_number++);
    const std::string type = event["type"];
    if (!event.contains("output_index")) continue;
    const auto index = event["output_index"].get<size_t>();
    if (type == "response.output_item.added") {
      EXPECT_EQ(index, items.size());
      EXPECT_EQ(event["item"]["status"], "in_progress");
      items.push_back(event["item"]);
      continue;
    }
    EXPECT_EQ(index + 1, items.size()) << "one item is open at a time";
    Json& item = items[index];
    EXPECT_EQ(event.value("item_id", item["id"]), item["id"]);
    if (type == "response.content_part.added") {
      item["content"].push_back(event["part"]);
    } else if (type == "response.output_text.delta" || type == "response.reasoning_text.delta") {
      Json& text = item["content"][event["content_index"].get<size_t>()]["text"];
      text = text.get<std::string>() + event["delta"].get<std::string>();
    } else if (type == "response.function_call_arguments.delta") {
      item["arguments"] = item["arguments"].get<std::string>() + event["delta"].get<std::string>();
    } else if (type == "response.output_text.done" || type == "response.reasoning_text.done") {
      EXPECT_EQ(item["content"][0]["text"], event["text"]);
    } else if (type == "response.content_part.done") {
      EXPECT_EQ(item["content"][0], event["part"]);
    } else if (type == "response.function_call_arguments.done") {
      EXPECT_EQ(item["arguments"], event["arguments"]);
    } else if (type == "response.output_item.done") {
      item["status"] = event["item"]["status"];
      EXPECT_EQ(item, event["item"]);
    } else {
      ADD_FAILURE() << "unknown event " << type;
    }
  }
  return items;
}

TEST_F(ResponsesApi, AnswersWithItems) {
  start();
  const ClientResponse response = respond(R"({"instructions": "Be brief.", "metadata": {"k": "v"}, "temperature": 0.1, "user": "u"})");
  ASSERT_EQ(response.status, 200) << response.body;
  const Json body = response.json();
  EXPECT_EQ(body["object"], "response");
  EXPECT_EQ(body["status"], "completed");
  EXPECT_EQ(body["model"], "qwen");
  EXPECT_EQ(body["instructions"], "Be brief.");
  EXPECT_EQ(body["metadata"], Json::parse(R"({"k": "v"})"));
  EXPECT_EQ(body["temperature"], 0.1);
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("resp_"));
  ASSERT_EQ(body["output"].size(), 2u);
  EXPECT_EQ(body["output"][0]["type"], "reasoning");
  EXPECT_EQ(body["output"][0]["content"][0]["text"], "Let me think: 你好?\n");
  EXPECT_EQ(body["output"][1]["content"][0]["text"], "Hello 🙂 world, one two three.");
  EXPECT_EQ(body["usage"]["output_tokens"], say(kAnswer).tokens.size());
  EXPECT_GT(body["usage"]["output_tokens_details"]["reasoning_tokens"], 0);
  EXPECT_EQ(body["usage"]["input_tokens_details"]["cached_tokens"], 0);  // USAGE-73
  EXPECT_THAT(prompt_of(0), StartsWith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"));
}

// REAS-38, REAS-41, TOOL-46, TOOL-47, STOP-55, STOP-58, USAGE-71, API-83
TEST_F(ResponsesApi, StreamingEqualsTheWholeAnswerForEveryCut) {
  start();
  const std::string tools = fmt::format(R"("tools": {})", kTools);
  const std::pair<std::string, std::string_view> cases[] = {
      {"{}", kAnswer},
      {R"({"stop": ["two th"]})", kAnswer},
      {R"({"stop": ["world"], "include_stop_str_in_output": true})", kAnswer},
      {R"({"max_output_tokens": 4})", kAnswer},
      {R"({"max_output_tokens": 14})", kAnswer},
      {R"({"reasoning": {"effort": "none"}})", "Just so."},
      {"{" + tools + "}", kCalls},
      {"{" + tools + R"(, "parallel_tool_calls": false})", kCalls},
      {"{" + tools + R"(, "max_output_tokens": 30})", kCalls},
      {"{" + tools + R"(, "tool_choice": {"type": "function", "name": "g"}})", "</function>\n</tool_call>"},
      {"{}", kCalls},
  };
  for (const auto& [members, text] : cases) {
    engine_.set_writer([said = std::string(text)](const auto&) { return say(said); });
    Json body = {{"input", "hi"}};
    body.update(Json::parse(members));
    const Json whole = without_ids(post("/v1/responses", body).json());
    ASSERT_TRUE(whole["output"].is_array()) << whole;
    for_every_cut(text, [&] {
      body["stream"] = false;
      ASSERT_EQ(without_ids(post("/v1/responses", body).json()), whole) << members;
      body["stream"] = true;
      const std::vector<Json> events = post("/v1/responses", body).chunks();
      const Json items = assembled(events);
      ASSERT_EQ(items, events.back()["response"]["output"]) << members;
      ASSERT_EQ(without_ids(events.back()["response"]), whole) << members;
      ASSERT_EQ(events.back()["type"], whole["status"] == "completed" ? "response.completed" : "response.incomplete");
    });
  }
}

TEST_F(ResponsesApi, StreamsInOpenAisOrder) {
  start();
  const ClientResponse response = respond(R"({"stream": true})");
  std::vector<std::string> types;
  for (const Json& event : response.chunks()) {
    if (types.empty() || types.back() != event["type"]) types.push_back(event["type"]);
  }
  EXPECT_THAT(types, ElementsAre("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
                                 "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
                                 "response.output_item.done", "response.output_item.added", "response.content_part.added",
                                 "response.output_text.delta", "response.output_text.done", "response.content_part.done",
                                 "response.output_item.done", "response.completed"));
  std::vector<std::string> names;
  for (const Json& event : response.chunks()) names.push_back(event["type"]);
  EXPECT_EQ(response.event_names(), names);
  EXPECT_EQ(response.chunks()[0]["response"]["status"], "in_progress");
  EXPECT_TRUE(response.chunks()[0]["response"]["usage"].is_null());
}

TEST_F(ResponsesApi, TextBetweenCallsStaysBetweenThem) {
  start();
  engine_.set_writer([](const auto&) { return say(kCalls); });
  const Json output = respond(fmt::format(R"({{"tools": {}}})", kTools)).json()["output"];
  ASSERT_EQ(output.size(), 6u) << output;
  EXPECT_EQ(output[1]["content"][0]["text"], "I look.");
  EXPECT_EQ(output[2]["arguments"], R"({"s": "a \"b\" 你好", "n": 7})");
  EXPECT_EQ(output[3]["content"][0]["text"], "and then");
  EXPECT_EQ(output[4]["name"], "g");
  EXPECT_EQ(output[4]["arguments"], "{}");  // TOOL-43
  EXPECT_EQ(output[5]["content"][0]["text"], "done");
  EXPECT_NE(output[2]["call_id"], output[4]["call_id"]);
}

TEST_F(ResponsesApi, AnAnswerThatLengthCutsOffIsIncomplete) {
  start();
  const Json body = respond(R"({"max_output_tokens": 3})").json();
  EXPECT_EQ(body["status"], "incomplete");
  EXPECT_EQ(body["incomplete_details"]["reason"], "max_output_tokens");
  ASSERT_EQ(body["output"].size(), 1u);
  EXPECT_EQ(body["output"][0]["type"], "reasoning");
  EXPECT_EQ(body["output"][0]["status"], "incomplete");
}

TEST_F(ResponsesApi, ItemsBecomeTheMessagesOfAChat) {
  start();
  const char* items = R"([
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"s\": \"x\"}"},
    {"type": "function_call", "call_id": "b", "name": "g", "arguments": ""},
    {"type": "function_call_output", "call_id": "b", "output": "of g"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "of f"}]}])";
  Json body = {{"input", Json::parse(items)}, {"tools", Json::parse(kTools)}};
  ASSERT_EQ(post("/v1/responses", body).status, 200);
  const char* messages = R"([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "I look.", "reasoning": "why", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"s": "x"}}},
                                                                 {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "of f"}, {"role": "tool", "tool_call_id": "b", "content": "of g"}])";
  Json chat_tools = Json::array();
  for (Json tool : Json::parse(kTools)) {
    tool.erase("type");
    chat_tools.push_back({{"type", "function"}, {"function", tool}});
  }
  ASSERT_EQ(post("/v1/chat/completions", {{"messages", Json::parse(messages)}, {"tools", chat_tools}}).status, 200);
  EXPECT_EQ(prompt_of(0), prompt_of(1));
  EXPECT_THAT(prompt_of(0), HasSubstr("<tool_response>\nof f\n</tool_response>\n<tool_response>\nof g\n"));
}

TEST_F(ResponsesApi, GoesOnFromAStoredResponse) {
  start();
  engine_.set_writer([](const auto&) { return say(kCalls); });
  const std::string tools = fmt::format(R"("tools": {})", kTools);
  const Json first = respond("{" + tools + R"(, "instructions": "Only for this one."})").json();
  Json outputs = Json::array();
  for (const char* call : {"f", "g"}) {
    for (const Json& item : first["output"]) {
      if (item.value("name", "") == call) outputs.insert(outputs.begin(), Json{{"type", "function_call_output"}, {"call_id", item["call_id"]}, {"output", "of " + std::string(call)}});
    }
  }
  Json body = {{"previous_response_id", first["id"]}, {"input", outputs}, {"tools", Json::parse(kTools)}};
  engine_.set_writer([](const auto&) { return say(kAnswer); });
  const ClientResponse second = post("/v1/responses", body);
  ASSERT_EQ(second.status, 200) << second.body;
  EXPECT_EQ(second.json()["previous_response_id"], first["id"]);
  EXPECT_THAT(prompt_of(1), Not(HasSubstr("Only for this one")));
  EXPECT_THAT(prompt_of(1), HasSubstr("<|im_start|>user\nhi<|im_end|>"));
  EXPECT_THAT(prompt_of(1), HasSubstr("<think>\nHm 🙂.\n</think>\n\nI look.and thendone\n\n<tool_call>\n<function=f>"));
  EXPECT_THAT(prompt_of(1), HasSubstr("<tool_response>\nof f\n</tool_response>\n<tool_response>\nof g\n")) << "results came in the other order";
  const ClientResponse third = post("/v1/responses", {{"previous_response_id", second.json()["id"]}, {"input", "and now?"}});
  ASSERT_EQ(third.status, 200);
  EXPECT_THAT(prompt_of(2), HasSubstr("Hello 🙂 world, one two three.<|im_end|>\n<|im_start|>user\nand now?<|im_end|>"));
}

TEST_F(ResponsesApi, StoresWhatItShallAndForgetsWhenAsked) {
  start();
  const std::string id = respond().json()["id"], streamed = respond(R"({"stream": true})").chunks().back()["response"]["id"],
                    secret = respond(R"({"store": false})").json()["id"];
  EXPECT_EQ(get("/v1/responses/" + id).json()["output"][1]["content"][0]["text"], "Hello 🙂 world, one two three.");
  EXPECT_EQ(get("/v1/responses/" + streamed).json()["status"], "completed");
  EXPECT_EQ(get("/v1/responses/" + secret).status, 404);
  const Json items = get("/v1/responses/" + id + "/input_items").json();
  EXPECT_EQ(items["data"][0]["content"][0]["text"], "hi");
  EXPECT_EQ(items["has_more"], false);
  const Json deleted = ask("DELETE", "/v1/responses/" + id).json();
  EXPECT_EQ(deleted["deleted"], true);
  EXPECT_EQ(deleted["id"], id);
  for (const ClientResponse& gone : {get("/v1/responses/" + id), get("/v1/responses/" + id + "/input_items"), ask("DELETE", "/v1/responses/" + id),
                                     respond(R"({"previous_response_id": ")" + id + "\"}")}) {
    EXPECT_EQ(gone.status, 404);
    EXPECT_EQ(gone.json()["error"]["code"], "response_not_found");
  }
  EXPECT_EQ(respond(R"({"previous_response_id": "resp_x"})").json()["error"]["param"], "previous_response_id");
  EXPECT_EQ(get("/v1/responses/" + streamed + "?stream=true").json()["error"]["param"], "stream");
  EXPECT_EQ(ask("PUT", "/v1/responses/" + id).header("Allow"), "GET, HEAD, DELETE, OPTIONS");
}

TEST_F(ResponsesApi, CountsTokensOfThePromptThatItWouldMake) {
  start();
  const std::string id = respond().json()["id"];
  Json body = Json::parse(fmt::format(R"({{"input": "more", "previous_response_id": "{}", "instructions": "s", "tools": {}}})", id, kTools));
  const Json counted = post("/v1/responses/input_tokens", body).json();
  EXPECT_EQ(engine_.submitted().size(), 1u) << "counting asks the engine nothing";
  ASSERT_EQ(post("/v1/responses", body).status, 200);
  EXPECT_EQ(counted["input_tokens"], engine_.submitted()[1].prompt.size());
  EXPECT_EQ(post("/v1/responses/input_tokens", Json::object()).json()["error"]["param"], "input");
}

TEST_F(ResponsesApi, ListsInputItemsInPages) {
  start();
  const std::string id = respond(R"({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]})").json()["id"];
  const std::string path = "/v1/responses/" + id + "/input_items";
  const auto contents = [](const Json& list) {
    std::string text;
    for (const Json& item : list["data"]) text += item["content"].get<std::string>();
    return text;
  };
  EXPECT_EQ(contents(get(path).json()), "cba");
  EXPECT_EQ(contents(get(path + "?order=asc").json()), "abc");
  const Json page = get(path + "?order=asc&limit=2").json();
  EXPECT_EQ(contents(page), "ab");
  EXPECT_EQ(page["has_more"], true);
  EXPECT_EQ(contents(get(path + "?limit=2&order=asc&after=" + page["last_id"].get<std::string>()).json()), "c");
  for (const char* query : {"?order=up", "?limit=0", "?limit=1x", "?limit=101", "?after=nobody"}) EXPECT_EQ(get(path + query).status, 400) << query;
}

TEST_F(ResponsesApi, LeavesOutTheOldestMessagesWhenAsked) {
  context_.max_model_len = 300;
  start();
  Json items = Json::array();
  for (int i = 0; i < 20; ++i) {
    items.push_back({{"role", "user"}, {"content", fmt::format("question {} with some more words in it", i)}});
    items.push_back({{"role", "assistant"}, {"content", fmt::format("answer {}", i)}});
  }
  items.push_back({{"role", "user"}, {"content", "the last"}});
  Json body = {{"input", items}, {"instructions", "Be brief."}, {"max_output_tokens", 50}};
  const Json error = post("/v1/responses", body).json()["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");  // HTTP-79, HTTP-80
  EXPECT_EQ(error["param"], "input");
  body["truncation"] = "auto";
  const ClientResponse response = post("/v1/responses", body);
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_THAT(prompt_of(0), StartsWith("<|im_start|>system\nBe brief.<|im_end|>"));
  EXPECT_THAT(prompt_of(0), HasSubstr("the last"));
  EXPECT_THAT(prompt_of(0), HasSubstr("answer 19"));
  EXPECT_THAT(prompt_of(0), Not(HasSubstr("question 0 ")));
  const size_t tokens = engine_.submitted()[0].prompt.size();
  EXPECT_LE(tokens, 250u);
  EXPECT_GT(tokens, 200u) << "no more than needed";
}

TEST_F(ResponsesApi, AToolChoiceCanNameSomeTools) {
  start();
  respond(fmt::format(R"({{"tools": {}, "tool_choice": {{"type": "allowed_tools", "mode": "auto", "tools": [{{"type": "function", "name": "g"}}]}}}})", kTools));
  EXPECT_THAT(prompt_of(0), HasSubstr(R"("name": "g")"));
  EXPECT_THAT(prompt_of(0), Not(HasSubstr(R"("name": "f")")));
  respond(fmt::format(R"({{"tools": {}, "tool_choice": "required"}})", kTools));
  EXPECT_THAT(prompt_of(1), EndsWith("<tool_call>\n<function="));
  respond(fmt::format(R"({{"tools": {}, "tool_choice": "none"}})", kTools));
  EXPECT_THAT(prompt_of(2), Not(HasSubstr("<tools>")));
}

TEST_F(ResponsesApi, NamesTheFieldThatIsWrong) {
  start();
  const std::pair<const char*, const char*> cases[] = {
      {R"({"input": null})", "input"},
      {R"({"input": 5})", "input"},
      {R"({"input": []})", "input"},
      {R"({"input": ["x"]})", "input[0]"},
      {R"({"input": [{"type": 5}]})", "input[0].type"},
      {R"({"input": [{"type": "computer_call"}]})", "input[0].type"},
      {R"({"input": [{"type": "item_reference", "id": "x"}]})", "input[0].type"},
      {R"({"input": [{"role": "robot", "content": "x"}]})", "input[0].role"},
      {R"({"input": [{"role": "user"}]})", "input[0].content"},
      {R"({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})", "input[0].content[0].type"},
      {R"({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]})", "input[0].call_id"},
      {R"({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]})", "input[0].arguments"},
      {R"({"input": [{"type": "function_call_output", "call_id": "a"}]})", "input[0].output"},
      {R"({"input": [{"type": "reasoning", "summary": 5}]})", "input[0].summary"},
      {R"({"tools": [{"type": "web_search"}]})", "tools[0].type"},
      {R"({"tools": [{"type": "function"}]})", "tools[0].name"},
      {R"({"tools": [{"name": "f"}]})", "tools[0].type"},
      {R"({"tool_choice": {"type": "function", "name": "f"}})", "tool_choice"},
      {R"({"tool_choice": {"type": "web_search"}})", "tool_choice"},
      {R"({"tool_choice": "required"})", "tool_choice"},
      {R"({"tool_choice": 5})", "tool_choice"},
      {R"({"max_output_tokens": 0})", "max_output_tokens"},
      {R"({"reasoning": {"effort": 5}})", "reasoning"},
      {R"({"text": {"format": {"type": 5}}})", "text.format.type"},
      {R"({"include": ["message.output_text.logprobs"]})", "include"},
      {R"({"include": ["everything"]})", "include"},
      {R"({"metadata": {"a": 5}})", "metadata"},
      {R"({"truncation": "some"})", "truncation"},
      {R"({"background": true})", "background"},
      {R"({"conversation": "conv_1"})", "conversation"},
      {R"({"prompt": {"id": "x"}})", "prompt"},
      {R"({"top_logprobs": 2})", "top_logprobs"},
      {R"({"n": 2})", "n"},
      {R"({"return_token_ids": true})", "return_token_ids"},
      {R"({"store": "yes"})", "store"},
      {R"({"stream": 1})", "stream"},
      {R"({"temperature": -1})", "temperature"},
  };
  for (const auto& [members, field] : cases) {
    const ClientResponse response = respond(members);
    EXPECT_EQ(response.status, 400) << members << response.body;
    EXPECT_EQ(response.json()["error"]["param"], field) << response.body;
  }
  EXPECT_TRUE(engine_.submitted().empty());
  EXPECT_EQ(respond(R"({"model": "gpt"})").status, 404);
  EXPECT_EQ(respond(R"({"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}})").status, 200);
}

TEST_F(ResponsesApi, AnErrorInTheEngineIsAFailedResponse) {
  start();
  engine_.set_writer([](const auto&) {
    Script script = say("some");
    script.error_after_end = make_error(ErrorCode::kInternal, "a logit was not finite");
    return script;
  });
  EXPECT_EQ(respond().status, 500);
  const std::vector<Json> events = respond(R"({"stream": true})").chunks();
  EXPECT_EQ(events.back()["type"], "response.failed");
  EXPECT_EQ(events.back()["response"]["status"], "failed");
  EXPECT_EQ(events.back()["response"]["error"]["message"], "a logit was not finite");
  EXPECT_EQ(assembled(events), events.back()["response"]["output"]);
}

TEST(ResponseStore, ForgetsTheOldestWhenItIsFull) {
  const auto entry = [](std::string text) { return StoredResponse{std::move(text), Json::array(), Json::array()}; };
  ResponseStore few(2, 1 << 20);
  for (const char* id : {"a", "b", "c"}) few.put(id, entry(id));
  EXPECT_EQ(few.find("a"), nullptr);
  EXPECT_EQ(few.find("c")->response, "c");
  EXPECT_EQ(few.size(), 2u);
  ResponseStore small(100, 100);
  small.put("a", entry(std::string(60, 'x')));
  small.put("a", entry(std::string(60, 'y')));
  EXPECT_EQ(small.size(), 1u) << "the same id once";
  small.put("b", entry(std::string(60, 'z')));
  EXPECT_EQ(small.find("a"), nullptr);
  EXPECT_NE(small.find("b"), nullptr);
  small.put("c", entry(std::string(1000, 'z')));
  EXPECT_EQ(small.size(), 0u) << "what is larger than all of it is not kept";
  small.put("d", entry("x"));
  EXPECT_TRUE(small.erase("d"));
  EXPECT_FALSE(small.erase("d"));
}

}  // namespace
}  // namespace quern::server
