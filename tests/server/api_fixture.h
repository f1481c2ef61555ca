#pragma once

#include <memory>
#include <string>
#include <vector>

#include "http_client.h"
#include "scripted_engine.h"
#include "server/server.h"
#include "support/standin_tokenizer.h"
#include "support/test_support.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace quern::server {

inline const text::Tokenizer& standin_tokenizer() {
  static const text::Tokenizer instance = text::Tokenizer::load(testing::standin_tokenizer_dir()).value();
  return instance;
}
inline const text::ChatTemplate& qwen_template() {
  static const text::ChatTemplate instance =
      text::ChatTemplate::load(testing::standin_tokenizer_dir(), testing::data_path("templates/qwen3.6.jinja")).value();
  return instance;
}
inline int32_t end_of_turn() { return *standin_tokenizer().token_to_id("<|im_end|>"); }

/// What is new in every answer: taken out, to compare answers.
inline Json without_ids(const Json& json) {
  if (!json.is_structured()) return json;
  Json result = json.is_array() ? Json::array() : Json::object();
  for (const auto& [key, value] : json.items()) {
    if (json.is_array()) {
      result.push_back(without_ids(value));
    } else if (key != "id" && key != "call_id" && key != "item_id" && key != "created" && key != "created_at" && key != "completed_at") {
      result[key] = without_ids(value);
    }
  }
  return result;
}

/// A script that says `text` (control tokens are those) and ends the turn.
inline Script say(std::string_view text) {
  Script script{standin_tokenizer().encode(text), {}, {}, 0};
  script.tokens.push_back(end_of_turn());
  return script;
}
/// What a model that thinks first would say.
inline constexpr std::string_view kAnswer = "Let me think: 你好?\n</think>\n\nHello 🙂 world, one two three.";

inline ServerContext standin_context(engine::Engine& engine) {
  ServerContext context;
  context.engine = &engine;
  context.tokenizer = &standin_tokenizer();
  context.chat_template = &qwen_template();
  context.model_names = {"qwen", "Qwen/Alias"};
  context.max_model_len = 4096;
  context.eos_ids = {end_of_turn()};
  context.seed = 1;
  return context;
}

/// A server on a free port, with a scripted engine behind it.
class ApiTest : public ::testing::Test {
 protected:
  void start(ServerOptions options = {}, bool ready = true) {
    options.http.port = 0;
    options.api.version = "1.2.3";
    auto server = Server::start(options);
    ASSERT_OK(server);
    server_ = std::move(*server);
    if (ready) server_->set_ready(context_);
  }
  [[nodiscard]] uint16_t port() const { return server_->port(); }
  ClientResponse get(std::string_view target, std::string_view headers = "") {
    return value(HttpClient::fetch(port(), "GET", target, "", headers));
  }
  ClientResponse post(std::string_view target, const Json& body) { return value(HttpClient::post(port(), target, body)); }
  ClientResponse post_text(std::string_view target, std::string_view body) {
    return value(HttpClient::fetch(port(), "POST", target, body));
  }
  /// A chat request with one user message and these further members.
  ClientResponse chat(std::string_view members = "{}") { return post("/v1/chat/completions", chat_body(members)); }
  ClientResponse complete(std::string_view body) { return post("/v1/completions", Json::parse(body)); }
  static Json chat_body(std::string_view members) {
    Json body = Json::parse(R"({"messages": [{"role": "user", "content": "hi"}]})");
    body.update(Json::parse(members));
    return body;
  }
  ClientResponse ask(std::string_view method, std::string_view target, std::string_view headers = "") {
    return value(HttpClient::fetch(port(), method, target, "", headers));
  }
  /// Lets the engine say `text` in two events for every place between them, then token by token, and calls check() for each.
  template <class Check>
  void for_every_cut(std::string_view text, const Check& check) {
    const size_t length = say(text).tokens.size();
    for (size_t cut = 1; cut <= length; ++cut) {
      engine_.set_writer([cut, said = std::string(text)](const auto&) {
        Script script = say(said);
        if (cut < script.tokens.size()) script.events = {cut, script.tokens.size() - cut};
        return script;
      });
      check();
      if (::testing::Test::HasFatalFailure()) FAIL() << text << " cut at " << cut;
    }
  }
  static ClientResponse value(std::optional<ClientResponse> response) {
    EXPECT_TRUE(response) << "no response";
    return response ? *std::move(response) : ClientResponse{};
  }

  ScriptedEngine engine_{[](const engine::GenerationRequest&) { return say(kAnswer); }};
  ServerContext context_ = standin_context(engine_);
  std::unique_ptr<Server> server_;
};

}  // namespace quern::server
