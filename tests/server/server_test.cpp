#include "server/server.h"

#include <thread>

#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class ServerApi : public ApiTest {};

TEST_F(ServerApi, IsAliveButNotReadyWhileTheModelLoads) {
  start({}, false);
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/ready").status, 503);
  EXPECT_EQ(get("/version").json(), Json::parse(R"({"version": "1.2.3"})"));
  EXPECT_EQ(get("/metrics").status, 200);
  const ClientResponse early = chat();
  EXPECT_EQ(early.status, 503);
  EXPECT_EQ(early.json()["error"]["message"], "the model is still loading");
  EXPECT_EQ(early.header("Retry-After"), "1");
  server_->set_ready(context_);
  EXPECT_EQ(get("/ready").status, 200);
  EXPECT_EQ(chat().status, 200);
}

TEST_F(ServerApi, HealthTellsThatTheEngineHasFailed) {
  start();
  EXPECT_THAT(get("/metrics").body, ContainsRegex(R"(quern:engine_failed\{[^}]*\} 0)"));
  engine_.set_failure(make_error(ErrorCode::kInternal, "the device is gone"));
  for (const char* path : {"/health", "/ready"}) {
    const ClientResponse response = get(path);
    EXPECT_EQ(response.status, 503);
    EXPECT_THAT(response.body, HasSubstr("the device is gone"));
  }
  EXPECT_THAT(get("/metrics").body, ContainsRegex(R"(quern:engine_failed\{[^}]*\} 1)"));
}

TEST_F(ServerApi, ListsItsModels) {
  start();
  const Json list = get("/v1/models").json();
  EXPECT_EQ(list["object"], "list");
  EXPECT_EQ(list["data"].size(), 2U);
  EXPECT_EQ(list["data"][0]["id"], "qwen");
  EXPECT_EQ(list["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(get("/v1/models/Qwen/Alias").json()["id"], "Qwen/Alias");
  EXPECT_EQ(get("/v1/models/Qwen%2FAlias").json()["id"], "Qwen/Alias");
  const ClientResponse unknown = get("/v1/models/gpt");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.json()["error"]["code"], "model_not_found");
}

TEST_F(ServerApi, AnUnknownModelIsA404ThatNamesOurs) {
  start();
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}) {
    Json body = chat_body(R"({"model": "gpt", "tokens": [1]})");
    if (std::string_view(path) == "/v1/completions") body["prompt"] = "x";
    const ClientResponse response = post(path, body);
    EXPECT_EQ(response.status, 404) << path;
    EXPECT_EQ(response.json()["error"]["code"], "model_not_found");
    EXPECT_EQ(response.json()["error"]["param"], "model");
    EXPECT_THAT(response.body, HasSubstr("qwen"));
  }
}

TEST_F(ServerApi, TokenizesAndDetokenizes) {
  start();
  const std::string text = "Hello <|im_end|> wörld";
  const Json tokens = post("/tokenize", {{"prompt", text}, {"return_token_strs", true}}).json();
  EXPECT_EQ(tokens["tokens"], Json(standin_tokenizer().encode(text)));
  EXPECT_EQ(tokens["count"], tokens["tokens"].size());
  EXPECT_EQ(tokens["max_model_len"], 4096);
  EXPECT_EQ(tokens["token_strs"][0], "Hello");
  EXPECT_EQ(post("/detokenize", {{"tokens", tokens["tokens"]}}).json()["prompt"], text);
  const Json rendered = post("/tokenize", chat_body(R"({"enable_thinking": false})")).json();
  ASSERT_EQ(chat(R"({"enable_thinking": false})").status, 200);
  EXPECT_EQ(rendered["tokens"], Json(engine_.submitted()[0].prompt));
  EXPECT_EQ(post("/tokenize", Json::object()).json()["error"]["param"], "prompt");
  EXPECT_EQ(post("/detokenize", {{"tokens", {-1}}}).json()["error"]["param"], "tokens");
}

TEST_F(ServerApi, BadJsonIsA400WithThePlace) {
  start();
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}) {
    for (const char* body : {"", "{", "nonsense", "[]", "5", "\"x\"", "null", "{\"a\":1e999}", "{\"a\":\"\xff\"}", "{} {}"}) {
      const ClientResponse response = post_text(path, body);
      EXPECT_EQ(response.status, 400) << path << " " << body;
      EXPECT_EQ(response.json()["error"]["type"], "invalid_request_error") << path << " " << body;
    }
    EXPECT_EQ(post_text(path, std::string(100'000, '[')).status, 400);
  }
}

TEST_F(ServerApi, AsksForTheKey) {
  ServerOptions options;
  options.api.api_keys = {"first", "second"};
  start(options);
  for (const char* path : {"/health", "/ready", "/version", "/metrics"}) EXPECT_EQ(get(path).status, 200) << path;
  for (const char* header : {"", "Authorization: Bearer wrong\r\n", "Authorization: Bearer firs\r\n", "Authorization: first\r\n",
                             "Authorization: Basic first\r\n"}) {
    const ClientResponse response = get("/v1/models", header);
    EXPECT_EQ(response.status, 401) << header;
    EXPECT_EQ(response.json()["error"]["code"], "invalid_api_key");
    EXPECT_EQ(response.header("WWW-Authenticate"), "Bearer");
  }
  EXPECT_EQ(get("/v1/models", "Authorization: Bearer first\r\n").status, 200);
  EXPECT_EQ(get("/v1/models", "authorization: bearer second\r\n").status, 200);
}

TEST_F(ServerApi, UnknownPathsAndMethodsAreJsonErrors) {
  start();
  EXPECT_EQ(get("/nothing").status, 404);
  EXPECT_TRUE(get("/nothing").json()["error"].is_object());
  const ClientResponse wrong = get("/v1/chat/completions");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.header("Allow"), "POST, OPTIONS");
  EXPECT_TRUE(wrong.json()["error"].is_object());
  EXPECT_EQ(value(HttpClient::fetch(port(), "DELETE", "/v1/models")).status, 405);
  EXPECT_EQ(value(HttpClient::fetch(port(), "HEAD", "/health")).status, 200);
  const ClientResponse options = value(HttpClient::fetch(port(), "OPTIONS", "/v1/models"));
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(options.header("Allow"), "GET, HEAD, OPTIONS");
}

TEST_F(ServerApi, PagesOfOtherOriginsMayAskOnlyWhenAllowed) {
  start();
  EXPECT_EQ(get("/v1/models", "Origin: http://evil.example\r\n").header("Access-Control-Allow-Origin"), "");
  ServerOptions options;
  options.api.cors.allowed_origins = {"http://app.example"};
  start(options);
  EXPECT_EQ(get("/v1/models", "Origin: http://evil.example\r\n").header("Access-Control-Allow-Origin"), "");
  EXPECT_EQ(get("/v1/models", "Origin: http://app.example\r\n").header("Access-Control-Allow-Origin"), "http://app.example");
  for (const char* members : {"{}", R"({"stream": true})"}) {
    const ClientResponse response =
        value(HttpClient::fetch(port(), "POST", "/v1/chat/completions", dump_json(chat_body(members)), "Origin: http://app.example\r\n"));
    EXPECT_EQ(response.header("Access-Control-Allow-Origin"), "http://app.example");
  }
}

TEST_F(ServerApi, CountsWhatItDoes) {
  start();
  ASSERT_EQ(chat().status, 200);
  ASSERT_EQ(chat(R"({"stream": true})").status, 200);
  ASSERT_EQ(chat(R"({"temperature": -1})").status, 400);
  const std::string text = get("/metrics").body;
  const std::string labels = R"({engine="0",model_name="qwen"})";
  EXPECT_THAT(text, HasSubstr("vllm:time_to_first_token_seconds_count" + labels + " 2\n"));
  EXPECT_THAT(text, HasSubstr("vllm:e2e_request_latency_seconds_count" + labels + " 2\n"));
  EXPECT_THAT(text, HasSubstr(R"(vllm:request_success_total{engine="0",finished_reason="stop",model_name="qwen"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(quern:http_responses_total{engine="0",model_name="qwen",status="200"} 2)"));
  EXPECT_THAT(text, HasSubstr(R"(quern:http_responses_total{engine="0",model_name="qwen",status="400"} 1)"));
}

TEST_F(ServerApi, DrainingFinishesStreamsAndRefusesNewRequests) {
  start();
  engine_.hold();
  HttpClient client(port());
  ASSERT_TRUE(client.send_request("POST", "/v1/chat/completions", dump_json(chat_body(R"({"stream": true})"))));
  ASSERT_TRUE(client.read_until(R"("role":"assistant")"));
  const uint16_t old_port = port();
  std::jthread drain([&] { server_->drain_and_stop(std::chrono::seconds(20)); });
  while (HttpClient(old_port).connected()) std::this_thread::yield();
  engine_.let_run();
  const auto response = client.read_response();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->events().back(), "[DONE]");
  EXPECT_TRUE(client.at_end());
}

TEST_F(ServerApi, DrainingCancelsWhatTakesTooLong) {
  start();
  engine_.hold();
  HttpClient client(port());
  ASSERT_TRUE(client.send_request("POST", "/v1/chat/completions", dump_json(chat_body("{}"))));
  while (engine_.stats().num_running == 0) std::this_thread::yield();
  server_->drain_and_stop(std::chrono::milliseconds(20));
  EXPECT_TRUE(engine_.wait_until_idle());
  EXPECT_EQ(engine_.stats().requests_cancelled, 1U);
}

TEST_F(ServerApi, ALargePromptDoesNotHoldUpOthers) {
  context_.max_model_len = 1 << 20;
  engine_.mutable_limits().num_blocks = 1 << 14;
  start();
  std::string words;
  while (words.size() < 400'000) words += "many words without end ";
  Json body = chat_body("{}");
  body["messages"][0]["content"] = words;
  HttpClient large(port());
  ASSERT_TRUE(large.send_request("POST", "/v1/chat/completions", dump_json(body)));
  EXPECT_EQ(chat().status, 200);
  EXPECT_EQ(get("/health").status, 200);
  const auto response = large.read_response();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  EXPECT_GT(response->json()["usage"]["prompt_tokens"], 50'000);
}

}  // namespace
}  // namespace quern::server
