// Who may ask, how much at once and for how long; and what is told of it.

#include <regex>
#include <set>
#include <thread>

#include "api_fixture.h"
#include "base/file.h"
#include "server/api_keys.h"
#include "server/cors.h"

namespace quern::server {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;
using ::testing::Not;

class Access : public ApiTest {
 protected:
  static ServerOptions with_keys(std::vector<std::string> keys) {
    ServerOptions options;
    options.api.api_keys = std::move(keys);
    return options;
  }
  /// Its lines once there are `count` of them.
  static std::vector<Json> lines_of(const std::filesystem::path& log, size_t count) {
    while (true) {
      std::vector<Json> lines;
      std::istringstream text(*read_file(log));
      for (std::string line; std::getline(text, line);) lines.push_back(Json::parse(line, nullptr, false));
      if (lines.size() >= count) return lines;
      std::this_thread::yield();
    }
  }
  /// The text of /metrics once it has this line: a request is counted when its last byte has been sent.
  std::string metrics_with(const std::string& line) {
    std::string text;
    for (int i = 0; i < 500 && text.find(line) == std::string::npos; ++i) text = get("/metrics").body;
    EXPECT_THAT(text, HasSubstr(line));
    return text;
  }
  ClientResponse preflight(std::string_view origin, std::string_view method, std::string_view headers = "") {
    std::string text = fmt::format("Origin: {}\r\nAccess-Control-Request-Method: {}\r\n", origin, method);
    if (!headers.empty()) text += fmt::format("Access-Control-Request-Headers: {}\r\n", headers);
    return value(HttpClient::fetch(port(), "OPTIONS", "/v1/chat/completions", "", text));
  }
};

TEST_F(Access, TakesTheKeyAsOpenAisAndAsAnthropicsClientsSendIt) {
  start(with_keys({"first", "second"}));
  for (const char* header : {"Authorization: Bearer first\r\n", "x-api-key: second\r\n", "X-Api-Key: first\r\n",
                             "Authorization: Bearer nothing\r\nx-api-key: second\r\n"}) {
    EXPECT_EQ(get("/v1/models", header).status, 200) << header;
  }
  for (const char* header : {"x-api-key: Bearer first\r\n", "x-api-key: \r\n", "Authorization: Bearer \r\n", "Authorization: Bearer\r\n",
                             "x-api-key: firstfirst\r\n", "Authorization: Bearer first second\r\n"}) {
    const ClientResponse response = get("/v1/models", header);
    EXPECT_EQ(response.status, 401) << header;
    EXPECT_EQ(response.json()["error"]["type"], "authentication_error");
    EXPECT_EQ(response.json()["error"]["code"], "invalid_api_key");
    EXPECT_THAT(response.body, Not(HasSubstr("first")));
  }
}

TEST_F(Access, AStrangersBodyIsNotRead) {
  start(with_keys({"key"}));
  const std::string body(5'000'000, ' ');
  for (const char* path : {"/v1/chat/completions", "/health", "/nothing", "/tokenize"}) {
    const auto response = HttpClient::fetch(port(), "POST", path, body);
    ASSERT_TRUE(response) << path;
    EXPECT_EQ(response->status, 401) << path;
    EXPECT_EQ(response->header("Connection"), "close") << path;
  }
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/nothing").status, 404);
}

TEST(ApiKeys, KeysThatNoClientCouldSendAreNamedByTheirPlace) {
  for (const std::string& bad : {std::string(), std::string("two words"), std::string("line\n"), std::string("ключ")}) {
    const auto keys = ApiKeys::make({"good", bad});
    ASSERT_FALSE(keys);
    EXPECT_THAT(keys.error().message, HasSubstr("API key 2 of 2"));
    EXPECT_TRUE(bad.empty() || keys.error().message.find(bad) == std::string::npos) << keys.error().message;
  }
  const auto keys = ApiKeys::make({"a", "b", "a"});
  ASSERT_OK(keys);
  EXPECT_EQ(keys->find("a"), 0);
  EXPECT_EQ(keys->find("b"), 1);
  EXPECT_EQ(keys->find(""), std::nullopt);
  EXPECT_EQ(keys->find("A"), std::nullopt);
}

TEST_F(Access, AKeyHasItsLimitAndOthersHaveTheirs) {
  ServerOptions options = with_keys({"first", "second"});
  options.api.max_requests_per_key = 2;
  start(options);
  engine_.hold();
  const std::string body = dump_json(chat_body("{}")), streamed = dump_json(chat_body(R"({"stream": true})"));
  HttpClient one(port()), two(port());
  ASSERT_TRUE(one.send_request("POST", "/v1/chat/completions", body, "x-api-key: first\r\n"));
  ASSERT_TRUE(two.send_request("POST", "/v1/chat/completions", streamed, "x-api-key: first\r\n"));
  while (engine_.stats().num_running < 2) std::this_thread::yield();
  const ClientResponse refused = value(HttpClient::fetch(port(), "POST", "/v1/chat/completions", body, "x-api-key: first\r\n"));
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.json()["error"]["code"], "rate_limit_exceeded");
  EXPECT_EQ(refused.json()["error"]["type"], "rate_limit_error");
  EXPECT_NE(refused.header("Retry-After"), "");
  HttpClient other(port());
  ASSERT_TRUE(other.send_request("POST", "/v1/chat/completions", body, "x-api-key: second\r\n"));
  while (engine_.stats().num_running < 3) std::this_thread::yield();
  EXPECT_THAT(get("/metrics").body, HasSubstr("quern:key_limit_refusals_total{key=\"0\"} 1\n"));
  two.close();  // whoever leaves gives back its place
  while (engine_.stats().num_running == 3) {
    engine_.permit(0);
    std::this_thread::yield();
  }
  engine_.let_run();
  EXPECT_EQ(one.read_response()->status, 200);
  EXPECT_EQ(other.read_response()->status, 200);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(value(HttpClient::fetch(port(), "POST", "/v1/chat/completions", body, "x-api-key: first\r\n")).status, 200);
  }
}

TEST_F(Access, ALimitPerKeyNeedsKeys) {
  ServerOptions options;
  options.http.port = 0;
  options.api.max_requests_per_key = 2;
  const auto server = Server::start(options);
  ASSERT_FALSE(server);
  EXPECT_THAT(server.error().message, HasSubstr("--api-key"));
}

TEST_F(Access, PreflightsAreAnsweredWithoutAKey) {
  ServerOptions options = with_keys({"key"});
  options.api.cors.allowed_origins = {"http://app.example"};
  start(options);
  const ClientResponse allowed = preflight("http://app.example", "POST", "authorization, content-type");
  EXPECT_EQ(allowed.status, 204);
  EXPECT_EQ(allowed.header("Access-Control-Allow-Origin"), "http://app.example");
  EXPECT_THAT(allowed.header("Access-Control-Allow-Methods"), HasSubstr("POST"));
  EXPECT_EQ(allowed.header("Access-Control-Allow-Headers"), "authorization, content-type");
  EXPECT_EQ(allowed.header("Access-Control-Allow-Credentials"), "");
  EXPECT_EQ(allowed.header("Vary"), "Origin");
  EXPECT_NE(allowed.header("Access-Control-Max-Age"), "");
  const ClientResponse evil = preflight("http://evil.example", "POST");
  EXPECT_EQ(evil.status, 403);
  EXPECT_EQ(evil.header("Access-Control-Allow-Origin"), "");
  EXPECT_EQ(preflight("http://app.example", "PUT").status, 403);
  // What a page may read: also that its key was wrong.
  const ClientResponse wrong = get("/v1/models", "Origin: http://app.example\r\n");
  EXPECT_EQ(wrong.status, 401);
  EXPECT_EQ(wrong.header("Access-Control-Allow-Origin"), "http://app.example");
}

TEST_F(Access, CorsListsAreKept) {
  ServerOptions options;
  options.api.cors = {.allowed_origins = {"http://app.example"},
                      .allowed_methods = {"GET"},
                      .allowed_headers = {"Content-Type", "X-One"},
                      .allow_credentials = true};
  start(options);
  EXPECT_EQ(preflight("http://app.example", "POST").status, 403);
  EXPECT_EQ(preflight("http://app.example", "GET", "x-one").status, 204);
  EXPECT_EQ(preflight("http://app.example", "GET", "x-one,x-two").status, 403);
  EXPECT_EQ(preflight("http://app.example", "GET").header("Access-Control-Allow-Credentials"), "true");
  EXPECT_EQ(get("/health", "Origin: http://app.example\r\n").header("Access-Control-Allow-Credentials"), "true");
  options.api.cors = {.allowed_origins = {"*"}, .allowed_methods = {"*"}, .allowed_headers = {"*"}, .allow_credentials = false};
  start(options);
  EXPECT_EQ(preflight("http://any.example", "PATCH", "x-any").status, 204);
}

TEST(Cors, WhatCannotBeMeantIsRefused) {
  for (const char* origin : {"app.example", "http://", "http://app.example/", "https://app.example/path", "://x"}) {
    const auto cors = Cors::make({.allowed_origins = {origin}, .allowed_methods = {}, .allowed_headers = {}, .allow_credentials = false});
    ASSERT_FALSE(cors) << origin;
    EXPECT_THAT(cors.error().message, HasSubstr(origin));
  }
  EXPECT_FALSE(Cors::make({.allowed_origins = {"*"}, .allowed_methods = {}, .allowed_headers = {}, .allow_credentials = true}));
  EXPECT_TRUE(Cors::make({.allowed_origins = {"http://localhost:3000", "null"}, .allowed_methods = {}, .allowed_headers = {}, .allow_credentials = true}));
}

TEST_F(Access, AnAnswerWithoutATokenInTimeIsA504) {
  context_.time_limits.first_token = std::chrono::milliseconds(100);
  start();
  engine_.hold();
  const ClientResponse late = chat();
  EXPECT_EQ(late.status, 504);
  EXPECT_EQ(late.json()["error"]["type"], "timeout_error");
  EXPECT_THAT(late.body, HasSubstr("no token came within the server's limit of 0.1 s"));
  const ClientResponse stream = chat(R"({"stream": true})");
  EXPECT_EQ(stream.status, 200);
  ASSERT_GE(stream.events().size(), 2U);
  EXPECT_THAT(stream.events()[stream.events().size() - 2], HasSubstr("no token came"));
  EXPECT_EQ(stream.events().back(), "[DONE]");
  EXPECT_TRUE(engine_.wait_until_idle());
  EXPECT_EQ(engine_.stats().requests_cancelled, 2U);
  metrics_with("quern:http_outcomes_total{outcome=\"timeout\"} 2\n");
}

TEST_F(Access, TheFirstTokenEndsOnlyTheFirstLimit) {
  context_.time_limits = {.first_token = std::chrono::milliseconds(150), .total = std::chrono::milliseconds(1500)};
  start();
  engine_.hold();
  HttpClient client(port());
  ASSERT_TRUE(client.send_request("POST", "/v1/chat/completions", dump_json(chat_body(R"({"stream": true})"))));
  while (engine_.stats().num_running == 0) std::this_thread::yield();
  engine_.permit(3);
  const auto response = client.read_response();
  ASSERT_TRUE(response);
  EXPECT_THAT(response->body, HasSubstr("longer than the server's limit of 1.5 s"));
  EXPECT_THAT(response->body, Not(HasSubstr("no token came")));
}

TEST_F(Access, WithinItsTimeAnAnswerIsWhole) {
  context_.time_limits = {.first_token = std::chrono::minutes(5), .total = std::chrono::minutes(5)};
  start();
  EXPECT_EQ(chat().status, 200);
  EXPECT_EQ(chat(R"({"stream": true})").events().back(), "[DONE]");
}

TEST_F(Access, TheLogTellsWhoAskedWhatAndHowMuch) {
  const TemporaryFolder folder;
  ServerOptions options = with_keys({"secret-one", "secret-two"});
  options.access_log.target = (folder.path() / "access.log").string();
  start(options);
  const std::string trace = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
  const ClientResponse chat =
      value(HttpClient::fetch(port(), "POST", "/v1/chat/completions?token=private", dump_json(chat_body("{}")), "x-api-key: secret-two\r\n" + trace));
  ASSERT_EQ(chat.status, 200);
  lines_of(options.access_log.target, 1);  // a line is written behind the last byte of an answer
  const ClientResponse stream = value(
      HttpClient::fetch(port(), "POST", "/v1/chat/completions", dump_json(chat_body(R"({"stream": true})")), "x-api-key: secret-one\r\n" + trace));
  lines_of(options.access_log.target, 2);
  ASSERT_EQ(get("/v1/models", "x-api-key: wrong-secret\r\n").status, 401);
  const std::vector<Json> lines = lines_of(options.access_log.target, 3);
  const Json& first = lines[0];
  EXPECT_EQ(first["method"], "POST");
  EXPECT_EQ(first["path"], "/v1/chat/completions");
  EXPECT_EQ(first["status"], 200);
  EXPECT_EQ(first["outcome"], "complete");
  EXPECT_EQ(first["key"], 1);
  EXPECT_EQ(first["request_id"], chat.json()["id"]);
  EXPECT_EQ(first["prompt_tokens"], chat.json()["usage"]["prompt_tokens"]);
  EXPECT_EQ(first["completion_tokens"], chat.json()["usage"]["completion_tokens"]);
  EXPECT_GE(first["ms"], first["ttft_ms"]);
  EXPECT_GT(first["bytes"], chat.body.size());
  EXPECT_EQ(first["trace_id"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(chat.header("traceparent"), fmt::format("00-0af7651916cd43dd8448eb211c80319c-{}-01", first["span_id"].get<std::string>()));
  EXPECT_EQ(lines[1]["key"], 0);
  EXPECT_EQ(lines[1]["completion_tokens"], first["completion_tokens"]);
  EXPECT_EQ(stream.header("traceparent"), fmt::format("00-0af7651916cd43dd8448eb211c80319c-{}-01", lines[1]["span_id"].get<std::string>()));
  EXPECT_EQ(lines[2]["status"], 401);
  EXPECT_FALSE(lines[2].contains("key"));
  EXPECT_FALSE(lines[2].contains("trace_id"));
  const std::string text = *read_file(options.access_log.target);
  for (const char* word : {"secret", "private"}) EXPECT_THAT(text, Not(HasSubstr(word)));
}

TEST_F(Access, AClientThatLeavesIsLoggedWithWhatItHadSoFar) {
  const TemporaryFolder folder;
  ServerOptions options;
  options.access_log.target = (folder.path() / "access.log").string();
  start(options);
  engine_.hold();
  {
    HttpClient client(port());
    ASSERT_TRUE(client.send_request("POST", "/v1/chat/completions", dump_json(chat_body(R"({"stream": true})"))));
    while (engine_.stats().num_running == 0) std::this_thread::yield();
    engine_.permit(4);
    ASSERT_TRUE(client.read_until("reasoning_content"));
  }
  const Json line = lines_of(options.access_log.target, 1)[0];
  EXPECT_EQ(line["outcome"], "client_left");
  EXPECT_EQ(line["status"], 200);
  EXPECT_GE(line["completion_tokens"], 1);
  EXPECT_GT(line["prompt_tokens"], 1);
}

/// The names of all time series in a text of /metrics.
std::set<std::string> series_of(const std::string& text) {
  std::set<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line[0] != '#') names.insert(line.substr(0, line.find_first_of("{ ")));
  }
  return names;
}

TEST_F(Access, EveryMetricOfDashboardAndAlertsIsThere) {
  ServerOptions options = with_keys({"key"});
  options.api.max_requests_per_key = 1;
  start(options);
  // A request over the limit, one that is answered, a draft: what is counted by name appears with its first.
  const std::string body = dump_json(chat_body("{}"));
  engine_.hold();
  HttpClient first(port());
  ASSERT_TRUE(first.send_request("POST", "/v1/chat/completions", body, "x-api-key: key\r\n"));
  while (engine_.stats().num_running == 0) std::this_thread::yield();
  ASSERT_EQ(value(HttpClient::fetch(port(), "POST", "/v1/chat/completions", body, "x-api-key: key\r\n")).status, 429);
  engine_.let_run();
  ASSERT_EQ(first.read_response()->status, 200);
  const std::set<std::string> exported = series_of(metrics_with("http_requests_total{handler=\"/v1/chat/completions\""));

  const Json dashboard = Json::parse(*read_file(std::filesystem::path(QUERN_SOURCE_DIR) / "packaging/grafana/quern.json"));
  std::set<std::string> queried;
  const auto add_names = [&](const std::string& text) {
    static const std::regex kName("(vllm:|quern:|http_|process_)[a-z0-9_]+");
    for (std::sregex_iterator at(text.begin(), text.end(), kName), end; at != end; ++at) queried.insert(at->str());
  };
  const std::function<void(const Json&)> collect = [&](const Json& node) {
    if (node.is_object() && node.contains("expr")) add_names(node["expr"]);
    for (const Json& child : node) {
      if (child.is_structured()) collect(child);
    }
  };
  collect(dashboard);
  EXPECT_GT(queried.size(), 30U);
  std::istringstream rules(*read_file(std::filesystem::path(QUERN_SOURCE_DIR) / "packaging/prometheus/quern.rules.yml"));
  for (std::string line; std::getline(rules, line);) {
    if (line.find(" expr: ") != std::string::npos) add_names(line);
  }
  for (const std::string& name : queried) EXPECT_TRUE(exported.contains(name)) << name << " is shown, but not exported";
}

TEST_F(Access, MetricsOfHttpAreThereBeforeAModelIs) {
  start({}, false);
  ASSERT_EQ(get("/health").status, 200);
  ASSERT_EQ(get("/made-up-path").status, 404);
  ASSERT_EQ(value(HttpClient::fetch(port(), "INVENTED", "/health")).status, 405);
  const std::string text = metrics_with("http_requests_total{handler=\"/health\",method=\"other\",status=\"4xx\"} 1\n");
  EXPECT_THAT(text, HasSubstr("http_requests_total{handler=\"/health\",method=\"GET\",status=\"2xx\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("http_requests_total{handler=\"none\",method=\"GET\",status=\"4xx\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("http_requests_total{handler=\"/health\",method=\"other\",status=\"4xx\"} 1\n"));
  EXPECT_THAT(text, Not(HasSubstr("made-up")));
  EXPECT_THAT(text, HasSubstr("http_request_duration_seconds_count{handler=\"/health\",method=\"GET\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("\nquern:http_connections "));
  for (const char* name : {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "process_start_time_seconds"}) {
    std::smatch found;
    ASSERT_TRUE(std::regex_search(text, found, std::regex(fmt::format("\n{} ([0-9.e+]+)\n", name)))) << name;
    EXPECT_GT(std::stod(found[1]), 0) << name;
  }
}

}  // namespace
}  // namespace quern::server
