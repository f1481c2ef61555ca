#include <limits>

#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class CompletionApi : public ApiTest {
 protected:
  CompletionApi() {
    engine_.set_writer([](const auto&) { return say(" and so on: 🙂"); });
  }
};

TEST_F(CompletionApi, ContinuesATextAsItStands) {
  start();
  const ClientResponse response = complete(R"({"prompt": "Once<|im_end|>", "model": "qwen"})");
  ASSERT_EQ(response.status, 200) << response.body;
  const Json body = response.json();
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("cmpl-"));
  EXPECT_EQ(body["choices"][0]["text"], " and so on: 🙂");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(body["choices"][0]["logprobs"].is_null());
  const auto requests = engine_.submitted();
  const auto& request = requests[0];
  EXPECT_EQ(request.max_tokens, 16);
  EXPECT_EQ(request.prompt.back(), end_of_turn()) << "control tokens of a raw prompt are control tokens";
}

TEST_F(CompletionApi, GivesEveryPromptItsChoicesInOrder) {
  start();
  engine_.set_writer(
      [](const engine::GenerationRequest& request) { return say(" (" + standin_tokenizer().decode(request.prompt, false) + ")"); });
  const Json texts = complete(R"({"prompt": ["a", "b"], "n": 2})").json();
  ASSERT_EQ(texts["choices"].size(), 4U);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(texts["choices"][i]["index"], i);
    EXPECT_EQ(texts["choices"][i]["text"], i < 2 ? " (a)" : " (b)");
  }
  EXPECT_EQ(texts["usage"]["prompt_tokens"], 2) << "each prompt once";
  const Json ids = complete(R"({"prompt": [[64], [65]], "return_token_ids": true})").json();
  EXPECT_EQ(ids["choices"][1]["prompt_token_ids"], Json::parse("[65]"));
  EXPECT_EQ(ids["choices"][1]["token_ids"].back(), end_of_turn());
}

// STOP-55, USAGE-71
TEST_F(CompletionApi, StreamingEqualsTheWholeAnswerForEveryCut) {
  start();
  for (const char* members :
       {R"({"prompt": ["x", "y"]})", R"({"prompt": "x", "echo": true, "logprobs": 1})", R"({"prompt": "two words", "echo": true})",
        R"({"prompt": "x", "stop": "so on"})", R"({"prompt": "two words", "echo": true, "max_tokens": 0, "logprobs": 0})",
        R"({"prompt": ["two words", "y"], "n": 2, "prompt_logprobs": 1, "return_token_ids": true})",
        R"({"prompt": "two words", "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": true})",
        R"({"prompt": "one two three", "echo": true, "truncate_prompt_tokens": 2, "logprobs": 0})"}) {
    Json body = Json::parse(members);
    const Json whole = post("/v1/completions", body).json();
    for_every_cut(" and so on: 🙂", [&] {
      body["stream"] = true;
      body["stream_options"] = {{"include_usage", true}};
      const ClientResponse response = post("/v1/completions", body);
      ASSERT_EQ(response.events().back(), "[DONE]");
      std::vector<std::string> texts(whole["choices"].size());
      std::vector<Json> logprobs(texts.size()), finishes(texts.size()), prompt_logprobs(texts.size()), ids(texts.size()), prompt_ids(texts.size());
      for (const Json& chunk : response.chunks()) {
        for (const Json& choice : chunk["choices"]) {
          const auto index = choice["index"].get<size_t>();
          texts[index] += choice["text"].get<std::string>();
          if (!choice["finish_reason"].is_null()) finishes[index] = choice["finish_reason"];
          if (choice.contains("prompt_logprobs")) prompt_logprobs[index] = choice["prompt_logprobs"];
          if (choice.contains("prompt_token_ids")) prompt_ids[index] = choice["prompt_token_ids"];
          if (choice.contains("token_ids") && ids[index].is_null()) ids[index] = Json::array();
          for (const Json& id : choice.value("token_ids", Json::array())) ids[index].push_back(id);
          if (choice["logprobs"].is_null()) continue;
          for (const auto& [name, list] : choice["logprobs"].items()) {
            for (const Json& value : list) logprobs[index][name].push_back(value);
          }
        }
      }
      for (size_t i = 0; i < texts.size(); ++i) {
        const Json& choice = whole["choices"][i];
        ASSERT_EQ(texts[i], choice["text"]) << members;
        ASSERT_EQ(finishes[i], choice["finish_reason"]) << members;
        ASSERT_EQ(logprobs[i], choice["logprobs"]) << members;
        ASSERT_EQ(prompt_logprobs[i], choice.contains("prompt_logprobs") ? choice["prompt_logprobs"] : Json()) << members;
        ASSERT_EQ(ids[i], choice.contains("token_ids") ? choice["token_ids"] : Json()) << members;
        ASSERT_EQ(prompt_ids[i], choice.contains("prompt_token_ids") ? choice["prompt_token_ids"] : Json()) << members;
      }
      ASSERT_EQ(response.chunks().back()["usage"], whole["usage"]) << members;
    });
  }
}

TEST_F(CompletionApi, GivesThePromptsLogprobsOfEveryPrompt) {
  start();
  const Json body = complete(R"({"prompt": [[64, 65, 66], [67]], "prompt_logprobs": 1, "max_tokens": 1})").json();
  EXPECT_EQ(body["choices"][0]["prompt_logprobs"].size(), 3u);
  EXPECT_EQ(body["choices"][0]["prompt_logprobs"][1]["65"]["rank"], 1);
  EXPECT_EQ(body["choices"][1]["prompt_logprobs"], Json::parse("[null]"));
}

TEST_F(CompletionApi, CutsPromptsAndEchoesWhatIsLeft) {
  start();
  const Json body = complete(R"({"prompt": ["one two three", "four"], "truncate_prompt_tokens": 2, "echo": true})").json();
  EXPECT_EQ(body["choices"][0]["text"], " two three and so on: 🙂");
  EXPECT_EQ(body["choices"][1]["text"], "four and so on: 🙂");
  EXPECT_EQ(engine_.submitted()[0].prompt.size(), 2u);
}

TEST_F(CompletionApi, ShowsThePromptsThatItWouldUse) {
  start();
  const Json body = post("/v1/completions/render", Json::parse(R"({"prompt": ["one two", "<|im_end|>"]})")).json();
  ASSERT_EQ(body["prompts"].size(), 2u);
  EXPECT_EQ(body["prompts"][0]["prompt"], "one two");
  EXPECT_EQ(body["prompts"][0]["count"], 2);
  EXPECT_EQ(body["prompts"][1]["prompt_token_ids"], Json::array({end_of_turn()}));
  EXPECT_TRUE(engine_.submitted().empty());
}

TEST_F(CompletionApi, EchoHasThePromptsLogprobsInFront) {
  engine_.set_logprob([](int32_t, int32_t rank) { return rank == 0 ? -0.5F : -std::numeric_limits<float>::infinity(); });
  start();
  const Json body = complete(R"({"prompt": "one two three", "echo": true, "logprobs": 2, "max_tokens": 2})").json();
  const Json& choice = body["choices"][0];
  EXPECT_EQ(choice["text"], "one two three and so");
  EXPECT_THAT(choice["logprobs"]["tokens"], ElementsAre("one", " two", " three", " and", " so"));
  EXPECT_EQ(choice["logprobs"]["text_offset"], Json::parse("[0,3,7,13,17]"));
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_EQ(choice["logprobs"]["token_logprobs"][1], -0.5);
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][1].size(), 2U);
  EXPECT_EQ(engine_.submitted()[0].prompt_logprobs, 2);
}

TEST_F(CompletionApi, EchoWithoutOutputScoresAPrompt) {
  start();
  const Json body = complete(R"({"prompt": "one two", "echo": true, "logprobs": 0, "max_tokens": 0})").json();
  EXPECT_EQ(body["choices"][0]["text"], "one two");
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"].size(), 2U);
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["completion_tokens"], 0);
}

TEST_F(CompletionApi, WithoutATokenizerTokenIdsGoInAndOut) {
  context_.tokenizer = nullptr;
  context_.chat_template = nullptr;
  context_.eos_ids = {9};
  start();
  engine_.set_writer([](const auto&) { return Script{{5, 6, 9}, {}, {}, 0}; });
  const Json body = complete(R"({"prompt": [1, 2], "logprobs": 1})").json();
  EXPECT_EQ(body["choices"][0]["text"], "");
  EXPECT_EQ(body["choices"][0]["token_ids"], Json::parse("[5,6,9]"));
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"][0], "token_id:5");
  Json streamed = Json::array();
  for (const Json& chunk : complete(R"({"prompt": [1, 2], "stream": true})").chunks()) {
    for (const Json& id : chunk["choices"][0].value("token_ids", Json::array())) streamed.push_back(id);
  }
  EXPECT_EQ(streamed, Json::parse("[5,6,9]"));
  for (const char* text : {R"({"prompt": "text"})", R"({"prompt": [1], "stop": "x"})"}) {
    const ClientResponse response = complete(text);
    EXPECT_EQ(response.status, 400);
    EXPECT_THAT(response.json()["error"]["message"].get<std::string>(), HasSubstr("no tokenizer"));
  }
  EXPECT_EQ(post("/tokenize", {{"prompt", "x"}}).status, 400);
  EXPECT_EQ(post("/detokenize", {{"tokens", {1}}}).status, 400);
}

TEST_F(CompletionApi, RefusesPromptsThatCannotRun) {
  start();
  for (const char* body : {R"({"prompt": ""})", R"({"prompt": [[]]})", R"({"prompt": ["a", ""]})"}) {
    const ClientResponse response = complete(body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_EQ(response.json()["error"]["param"], "prompt") << body;
  }
  Json ids = Json::array();
  for (int i = 0; i < 4096; ++i) ids.push_back(1);
  const Json error = post("/v1/completions", {{"prompt", ids}}).json()["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["param"], "prompt");
  for (const char* number : {" 4096 tokens. ", " 4112 tokens: ", " 4096 in the prompt and 16 for"}) {
    EXPECT_THAT(error["message"].get<std::string>(), HasSubstr(number));
  }
  EXPECT_TRUE(engine_.submitted().empty());
}

}  // namespace
}  // namespace quern::server
