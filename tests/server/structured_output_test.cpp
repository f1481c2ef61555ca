#include <atomic>
#include <thread>

#include "api_fixture.h"
#include "server/constraints.h"

namespace quern::server {
namespace {

using ::testing::HasSubstr;

constexpr const char* kPerson =
    R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": false})";

bool allows(const std::vector<uint32_t>& mask, int32_t token) { return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0; }

/// What a model says that would like to say `wish`, and is held to the request's constraint: where it may not go on with its wish, it takes
/// the plainest token that is allowed, and then tries the rest of its wish again.
Script obey(const engine::GenerationRequest& request, std::string_view wish) {
  const text::Tokenizer& tokenizer = standin_tokenizer();
  std::vector<int32_t> wanted = tokenizer.encode(wish);
  wanted.push_back(end_of_turn());
  engine::TokenConstraint* constraint = request.constraint.get();
  if (constraint == nullptr) return Script{wanted, {}, {}, 0};
  Script script;
  size_t next = 0;
  std::vector<uint32_t> mask((static_cast<size_t>(tokenizer.num_tokens()) + 31) / 32);
  while (!constraint->finished() && script.tokens.size() < 300) {
    std::fill(mask.begin(), mask.end(), 0);
    EXPECT_TRUE(constraint->fill_mask(mask));
    int32_t token = -1;
    if (next < wanted.size() && allows(mask, wanted[next])) {
      token = wanted[next++];
    } else if (allows(mask, end_of_turn())) {
      token = end_of_turn();
    } else {
      for (const char* plain : {"\"", "}", "]", ":", "0", "1", "a", "<", "/", ">", "\n", ",", "{"}) {
        const int32_t id = *tokenizer.token_to_id(plain);
        if (token < 0 && allows(mask, id)) token = id;
      }
      for (int32_t id = 0; token < 0 && id < tokenizer.num_tokens(); ++id)
        if (allows(mask, id)) token = id;
      EXPECT_GE(token, 0) << "a dead end";
      if (token < 0) break;
    }
    script.tokens.push_back(token);
    if (token == end_of_turn()) break;
    EXPECT_TRUE(constraint->accept(token));
  }
  return script;
}

class StructuredOutput : public ApiTest {
 protected:
  void wish(std::string text) {
    engine_.set_writer([text](const engine::GenerationRequest& request) { return obey(request, text); });
  }
  Json chat_message(Json members) {
    Json body = chat_body("{}");
    body.update(members);
    const ClientResponse response = post("/v1/chat/completions", body);
    EXPECT_EQ(response.status, 200) << response.body;
    // The stream adds up to the same.
    body["stream"] = true;
    const ClientResponse streamed = post("/v1/chat/completions", body);
    std::string content, reasoning, arguments, finish_reason;
    for (const Json& chunk : streamed.chunks()) {
      for (const Json& choice : chunk["choices"]) {
        content += choice["delta"].value("content", "");
        reasoning += choice["delta"].value("reasoning_content", "");
        for (const Json& call : choice["delta"].value("tool_calls", Json::array())) arguments += call["function"].value("arguments", "");
        if (choice["finish_reason"].is_string()) finish_reason = choice["finish_reason"];
      }
    }
    const Json choice = response.json()["choices"][0];
    const Json& message = choice["message"];
    const auto text = [&](const char* name) { return message[name].is_null() ? std::string() : message[name].get<std::string>(); };
    EXPECT_EQ(content, text("content"));
    EXPECT_EQ(reasoning, text("reasoning_content"));
    std::string whole_arguments;
    for (const Json& call : message.value("tool_calls", Json::array())) whole_arguments += call["function"]["arguments"].get<std::string>();
    EXPECT_EQ(arguments, whole_arguments);
    EXPECT_EQ(finish_reason, choice["finish_reason"]);
    return choice;
  }
  static Json schema_format(const char* schema) { return {{"type", "json_schema"}, {"json_schema", {{"name", "x"}, {"strict", true}, {"schema", Json::parse(schema)}}}}; }
};

TEST_F(StructuredOutput, BeginsWithTheFirstTokenWhenThinkingIsOff) {
  start();
  wish("Sure! Here is the person: {\"name\": \"Ada\"}");
  const Json choice = chat_message({{"response_format", schema_format(kPerson)}, {"chat_template_kwargs", {{"enable_thinking", false}}}});
  const Json person = Json::parse(choice["message"]["content"].get<std::string>());
  EXPECT_TRUE(person["name"].is_string() && person["age"].is_number_integer());
  EXPECT_TRUE(choice["message"]["reasoning_content"].is_null());
  EXPECT_EQ(choice["finish_reason"], "stop");
}

TEST_F(StructuredOutput, LeavesReasoningFreeAndHoldsWhatFollows) {
  start();
  wish("I could say {\"name\": 3}.\n</think>\n\nWell: {\"name\": \"Ada\", \"age\": 36}");
  const Json choice = chat_message({{"response_format", schema_format(kPerson)}});
  EXPECT_EQ(choice["message"]["reasoning_content"], "I could say {\"name\": 3}.\n");
  const Json person = Json::parse(choice["message"]["content"].get<std::string>());
  EXPECT_TRUE(person["name"].is_string() && person["age"].is_number_integer());
}

// API-83
TEST_F(StructuredOutput, IsTheSameInEveryDialect) {
  start();
  wish("{\"name\": \"Ada\", \"age\": 36, \"more\": 1}");
  const Json off{{"enable_thinking", false}};
  const Json schema = Json::parse(kPerson);
  const Json input = Json::parse(R"([{"role": "user", "content": "hi"}])");
  const std::string expected = "{\"name\": \"Ada\", \"age\": 36}";
  EXPECT_EQ(chat_message({{"response_format", schema_format(kPerson)}, {"chat_template_kwargs", off}})["message"]["content"], expected);
  EXPECT_EQ(chat_message({{"guided_json", schema}, {"chat_template_kwargs", off}})["message"]["content"], expected);
  EXPECT_EQ(chat_message({{"guided_json", kPerson}, {"chat_template_kwargs", off}})["message"]["content"], expected);
  EXPECT_EQ(chat_message({{"structured_outputs", {{"json", schema}}}, {"chat_template_kwargs", off}})["message"]["content"], expected);
  EXPECT_EQ(post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 100}, {"response_format", schema_format(kPerson)}}).json()["choices"][0]["text"], expected);
  const ClientResponse responses = post("/v1/responses", {{"input", "hi"}, {"chat_template_kwargs", off}, {"text", {{"format", {{"type", "json_schema"}, {"name", "x"}, {"schema", schema}}}}}});
  EXPECT_THAT(responses.body, HasSubstr(dump_json(Json(expected)))) << responses.body;
  const ClientResponse message = post("/v1/messages", {{"messages", input}, {"max_tokens", 100}, {"output_config", {{"format", {{"type", "json_schema"}, {"schema", schema}}}}}});
  EXPECT_THAT(message.body, HasSubstr(dump_json(Json(expected)))) << message.body;
}

TEST_F(StructuredOutput, KnowsExpressionsChoicesGrammarsAndAnyObject) {
  start();
  const auto complete_with = [&](const char* name, Json value) {
    const ClientResponse response = post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 100}, {name, std::move(value)}});
    EXPECT_EQ(response.status, 200) << response.body;
    return response.json()["choices"][0]["text"].get<std::string>();
  };
  wish("around 192.168.0.1");
  EXPECT_THAT(complete_with("guided_regex", R"(\d{1,3}(\.\d{1,3}){3})"), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+"));
  wish("negative, I think");
  EXPECT_EQ(complete_with("guided_choice", {"positive", "negative"}), "negative");
  EXPECT_EQ(complete_with("structured_outputs", {{"choice", {"positive", "negative"}}}), "negative");
  wish("(1+2)*3 is nine");
  EXPECT_EQ(complete_with("guided_grammar", "root ::= t ([-+*/] t)*\nt ::= [0-9]+ | \"(\" root \")\""), "(1+2)*3");
  wish("Here: {\"a\": [1, 2]} and more");
  EXPECT_TRUE(Json::parse(complete_with("response_format", {{"type", "json_object"}})).is_object());
  wish("{\"a\": [1, 2]} and more");
  EXPECT_EQ(complete_with("response_format", {{"type", "json_object"}}), "{\"a\": [1, 2]}");
  wish("{\"a\":[1,2]}");
  EXPECT_EQ(complete_with("structured_outputs", {{"json_object", true}, {"disable_any_whitespace", true}}), "{\"a\":[1,2]}");
}

Json tools(bool strict) {
  return Json::array({{{"type", "function"},
                       {"function", {{"name", "weather"}, {"strict", strict}, {"parameters", Json::parse(R"({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}}, "required": ["city", "days"], "additionalProperties": false})")}}}}});
}

TEST_F(StructuredOutput, ForcedCallsHaveArgumentsThatFit) {
  start();
  for (const Json& choice : {Json("required"), Json{{"type", "function"}, {"function", {{"name", "weather"}}}}}) {
    SCOPED_TRACE(dump_json(choice));
    const bool named = choice.is_object();
    wish(std::string(named ? "" : "weather>\n") + "<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n70\n</parameter>\n<parameter=bogus>\n1\n</parameter>\n</function>\n</tool_call>");
    const Json answer = chat_message({{"tools", tools(false)}, {"tool_choice", choice}});
    ASSERT_EQ(answer["message"]["tool_calls"].size(), 1u) << dump_json(answer);
    EXPECT_EQ(answer["message"]["tool_calls"][0]["function"]["name"], "weather");
    const Json arguments = Json::parse(answer["message"]["tool_calls"][0]["function"]["arguments"].get<std::string>());
    EXPECT_EQ(arguments["city"], "Berlin");
    EXPECT_EQ(arguments["days"], 7);
    EXPECT_FALSE(arguments.contains("bogus"));
    EXPECT_EQ(answer["finish_reason"], "tool_calls");
  }
}

TEST_F(StructuredOutput, StrictFunctionsAreHeldWhereTheModelCallsThem) {
  start();
  wish("Let me see.\n</think>\n\nLooking. <tool_call>\n<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\nseven\n</parameter>\n</function>\n</tool_call>");
  const Json held = chat_message({{"tools", tools(true)}});
  EXPECT_EQ(held["message"]["reasoning_content"], "Let me see.\n");
  EXPECT_THAT(held["message"]["content"].get<std::string>(), HasSubstr("Looking."));
  const Json arguments = Json::parse(held["message"]["tool_calls"][0]["function"]["arguments"].get<std::string>());
  EXPECT_TRUE(arguments["days"].is_number_integer()) << dump_json(arguments);
  const Json free = chat_message({{"tools", tools(false)}});
  EXPECT_EQ(Json::parse(free["message"]["tool_calls"][0]["function"]["arguments"].get<std::string>())["days"], "seven");
}

TEST_F(StructuredOutput, AFormatBesideToolsAllowsCallsOrTheFormat) {
  start();
  const Json members{{"tools", tools(true)}, {"response_format", schema_format(kPerson)}};
  wish("Hm.\n</think>\n\n{\"name\": \"Ada\", \"age\": 1} <tool_call>");
  EXPECT_EQ(chat_message(members)["message"]["content"], "{\"name\": \"Ada\", \"age\": 1}");
  wish("Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>");
  const Json call = chat_message(members);
  EXPECT_EQ(call["finish_reason"], "tool_calls");
  EXPECT_TRUE(call["message"]["content"].is_null());
}

TEST_F(StructuredOutput, CutByLengthSaysSo) {
  start();
  wish("{\"name\": \"a name that goes on and on and on\", \"age\": 3}");
  const Json choice = chat_message({{"response_format", schema_format(kPerson)}, {"max_tokens", 5}, {"chat_template_kwargs", {{"enable_thinking", false}}}});
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_THAT(choice["message"]["content"].get<std::string>(), ::testing::StartsWith("{\"name\""));
}

TEST_F(StructuredOutput, WhatCannotBeHeldIsA400ThatNamesIt) {
  start();
  const std::vector<std::tuple<Json, std::string, std::string>> cases{
      {{{"response_format", schema_format(R"({"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": true}}})")}}, "response_format.json_schema.schema", "#/properties/tags/uniqueItems"},
      {{{"guided_json", Json::parse(R"({"not": {}})")}}, "guided_json", "\"not\""},
      {{{"guided_regex", "(?=a)"}}, "guided_regex", "lookahead"},
      {{{"guided_regex", "("}}, "guided_regex", "malformed"},
      {{{"guided_grammar", "start: \"a\""}}, "guided_grammar", "Lark"},
      {{{"guided_grammar", "root ::= root \"a\" | \"b\""}}, "guided_grammar", "left-recursive"},
      {{{"guided_json", false}}, "guided_json", "no text at all"},
      {{{"tools", Json::parse(R"([{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object", "properties": {"x": {"if": {}}}}}}])")}}, "tools[0].function.parameters", "\"if\""},
  };
  for (const auto& [members, param, words] : cases) {
    Json body = chat_body("{}");
    body.update(members);
    const ClientResponse response = post("/v1/chat/completions", body);
    EXPECT_EQ(response.status, 400) << response.body;
    EXPECT_EQ(response.json()["error"]["param"], param) << response.body;
    EXPECT_THAT(response.json()["error"]["message"].get<std::string>(), HasSubstr(words));
  }
}

TEST_F(StructuredOutput, CountsWhatItCompiles) {
  start();
  wish("{}");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(post("/v1/completions", {{"prompt", "x"}, {"response_format", {{"type", "json_object"}}}}).status, 200);
  EXPECT_EQ(post("/v1/completions", {{"prompt", "x"}, {"guided_regex", "("}}).status, 400);
  const std::string metrics = get("/metrics").body;
  EXPECT_THAT(metrics, HasSubstr(R"(quern:grammars_compiled_total{engine="0",model_name="qwen"} 1)"));
  EXPECT_THAT(metrics, HasSubstr(R"(quern:grammar_cache_hits_total{engine="0",model_name="qwen"} 2)"));
  EXPECT_THAT(metrics, HasSubstr(R"(quern:grammars_failed_total{engine="0",model_name="qwen"} 1)"));
}

text::OutputShape regex_shape(std::string pattern) {
  text::OutputShape shape;
  shape.content = text::ContentFormat{};
  shape.content->kind = text::ContentFormat::Kind::kRegex;
  shape.content->text = std::move(pattern);
  shape.content->field = "guided_regex";
  return shape;
}

TEST(Constraints, CompileOnceForAllWhoAskAtTheSameTime) {
  Constraints constraints(&standin_tokenizer(), standin_tokenizer().num_tokens());
  std::vector<std::shared_ptr<const text::TokenGrammar>> grammars(8);
  {
    std::vector<std::jthread> threads;
    for (auto& grammar : grammars) threads.emplace_back([&] { grammar = constraints.compiled(regex_shape("[a-z]{3,40}")).value(); });
  }
  for (const auto& grammar : grammars) EXPECT_EQ(grammar, grammars.front());
  EXPECT_EQ(constraints.stats().num_compiled, 1u);
  EXPECT_EQ(constraints.stats().num_hits, 7u);
}

TEST(Constraints, TellEveryoneOfAFault) {
  Constraints constraints(&standin_tokenizer(), standin_tokenizer().num_tokens());
  std::atomic<int> refused = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { refused += !constraints.compiled(regex_shape("(")); });
  }
  EXPECT_EQ(refused, 4);
  EXPECT_EQ(constraints.stats().num_cached, 0u);
}

TEST(Constraints, ForgetTheLeastRecentlyUsedWhenTheyTakeTooMuch) {
  Constraints constraints(&standin_tokenizer(), standin_tokenizer().num_tokens(), size_t{3} << 20);
  const auto first = constraints.compiled(regex_shape("first[^x]*")).value();
  for (int i = 0; i < 60; ++i) {
    ASSERT_OK(constraints.compiled(regex_shape(fmt::format("[^\\n]*{}[a-z]*", i))));
    EXPECT_LE(constraints.stats().cached_bytes, size_t{16} << 20);
  }
  EXPECT_LT(constraints.stats().num_cached, 60u);
  EXPECT_GE(constraints.stats().num_cached, 1u);
  EXPECT_NE(constraints.compiled(regex_shape("first[^x]*")).value(), first);  // made anew
}

TEST(Constraints, HaveABoundOfTheirSize) {
  Constraints constraints(&standin_tokenizer(), standin_tokenizer().num_tokens());
  const auto grammar = constraints.compiled(regex_shape(std::string(Constraints::kMaxFormBytes, 'a')));
  ASSERT_FALSE(grammar);
  EXPECT_THAT(grammar.error().message, HasSubstr("at most"));
}

TEST(Constraints, SayThatTheyNeedATokenizer) {
  Constraints constraints(nullptr, 100);
  const auto grammar = constraints.compiled(regex_shape("a"));
  ASSERT_FALSE(grammar);
  EXPECT_EQ(grammar.error().field, "guided_regex");
  EXPECT_EQ(constraints.compiled(text::OutputShape{}).value(), nullptr);
}

}  // namespace
}  // namespace quern::server
