#include <signal.h>

#include <fstream>
#include <thread>

#include "app/http_client.h"
#include "app/program.h"
#include "app/with_server/tiny_checkpoint.h"
#include "base/json.h"
#include "support/test_support.h"

// `quern serve` from the start to the signal that ends it.

namespace quern::app {
namespace {

using quern::testing::BackgroundProgram;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using quern::testing::write_tiny_checkpoint;
using ::testing::HasSubstr;
using ::testing::Not;

class Serve : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    write_tiny_checkpoint(folder_->path() / "tiny");
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static std::string model() { return (folder_->path() / "tiny").string(); }
  static std::vector<std::string> arguments(const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {
        "serve", model(), "--port", "0", "--threads", "2", "--max-num-seqs", "4", "--max-model-len", "8192", "--kv-cache-memory-bytes",
        "64M"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// The address in the log of a server that has said that it is ready.
  static HttpAddress address_of(const BackgroundProgram& server) {
    const std::string log = server.log();
    const size_t begin = log.find("http://127.0.0.1:");
    const size_t end = log.find_first_not_of("0123456789", begin + 17);
    Result<HttpAddress> address = HttpAddress::parse(log.substr(begin, end - begin));
    EXPECT_OK(address);
    return *address;
  }
  static HttpCall completion(int max_tokens) {
    const Json body{{"model", "tiny"}, {"prompt", {72, 101, 108, 108, 111}}, {"max_tokens", max_tokens}, {"ignore_eos", true}, {"seed", 1}};
    return {.method = "POST", .path = "/v1/completions", .body = body.dump()};
  }
  /// Requests that the server computes, by its metrics.
  static int num_running(const HttpAddress& address) {
    const std::string text = http_call(address, {.path = "/metrics"})->body;
    const size_t value = text.find("} ", text.find("\nvllm:num_requests_running{"));
    return value == std::string::npos ? -1 : std::stoi(text.substr(value + 2));
  }
  static std::unique_ptr<TemporaryFolder> folder_;
};
std::unique_ptr<TemporaryFolder> Serve::folder_;

TEST_F(Serve, AnswersAndEndsWithZeroOnSigterm) {
  BackgroundProgram server(arguments());
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const HttpAddress address = address_of(server);
  EXPECT_EQ(http_call(address, {.path = "/ready"})->status, 200);
  const Result<HttpReply> reply = http_call(address, completion(5));
  ASSERT_OK(reply);
  ASSERT_EQ(reply->status, 200) << reply->body;
  const Result<Json> body = parse_json(reply->body, "answer");
  ASSERT_OK(body);
  EXPECT_EQ(body->at("model"), "tiny");
  EXPECT_EQ(body->at("usage").at("completion_tokens"), 5);
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

// Row i of a prompt predicts token i + 1: what the engine says of it equals what it says of the next token when the prompt ends there.
TEST_F(Serve, PromptLogprobsAreThoseOfTheNextToken) {
  BackgroundProgram server(arguments());
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const auto ask = [&](const Json& body) {
    const Result<HttpReply> reply = http_call(address_of(server), {.method = "POST", .path = "/v1/completions", .body = body.dump()});
    EXPECT_OK(reply);
    EXPECT_EQ(reply->status, 200) << reply->body;
    return *parse_json(reply->body, "answer");
  };
  Json prompt = Json::array();
  for (int i = 0; i < 150; ++i) prompt.push_back((i * 37 + i * i) % 256);
  const Json whole = ask({{"prompt", prompt}, {"prompt_logprobs", 20}, {"max_tokens", 1}})["choices"][0]["prompt_logprobs"];
  ASSERT_EQ(whole.size(), prompt.size());
  EXPECT_TRUE(whole[0].is_null());
  // Again, when the prefix cache has all of it; and echo says the same in its own form.
  EXPECT_EQ(ask({{"prompt", prompt}, {"prompt_logprobs", 20}, {"max_tokens", 0}})["choices"][0]["prompt_logprobs"], whole);
  const Json echoed = ask({{"prompt", prompt}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}})["choices"][0]["logprobs"];
  for (size_t i = 1; i < prompt.size(); ++i) EXPECT_EQ(echoed["token_logprobs"][i], whole[i][prompt[i].dump()]["logprob"]) << i;
  for (const size_t length : {1, 2, 63, 64, 65, 127, 128, 149}) {
    const Json next = ask({{"prompt", Json(std::vector<Json>(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(length)))},
                           {"logprobs", 20}, {"max_tokens", 1}, {"temperature", 0}, {"return_tokens_as_token_ids", true}})["choices"][0]["logprobs"]["top_logprobs"][0];
    int compared = 0;
    for (const auto& [id, told] : whole[length].items()) {
      if (told["rank"] > 20) continue;
      ASSERT_TRUE(next.contains("token_id:" + id)) << length << " " << id;
      EXPECT_NEAR(next["token_id:" + id].get<double>(), told["logprob"].get<double>(), 1e-5) << length << " " << id;  // summed elsewhere, in another order
      ++compared;
    }
    EXPECT_EQ(compared, 20) << length;
  }
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Serve, LetsARunningRequestEndBeforeItStops) {
  BackgroundProgram server(arguments());
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  std::string body;
  constexpr int kNumTokens = 6000;  // long enough to be seen at work
  const auto exchange = HttpExchange::start(address_of(server), completion(kNumTokens), [&](std::string_view bytes) { body += bytes; });
  ASSERT_OK(exchange);
  // The request is on its way when the metrics say that it runs.
  while (num_running(address_of(server)) != 1) {
    ASSERT_TRUE((*exchange)->advance().has_value());
    ASSERT_FALSE((*exchange)->response().complete()) << "the request ended too early for this test";
  }
  server.send(SIGTERM);
  for (bool complete = false; !complete;) {
    poll_exchanges({exchange->get()}, -1);
    const Result<bool> advanced = (*exchange)->advance();
    ASSERT_OK(advanced);
    complete = *advanced;
  }
  EXPECT_EQ((*exchange)->response().status(), 200) << body;
  const Result<Json> answer = parse_json(body, "answer");
  ASSERT_OK(answer);
  EXPECT_EQ(answer->at("usage").at("completion_tokens"), kNumTokens);
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Serve, StopsAtOnceOnASecondSignal) {
  BackgroundProgram server(arguments());
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const auto exchange = HttpExchange::start(address_of(server), completion(8000), [](std::string_view) {});
  ASSERT_OK(exchange);
  poll_exchanges({exchange->get()}, -1);
  ASSERT_TRUE((*exchange)->advance().has_value());
  while (num_running(address_of(server)) != 1) {
  }
  server.send(SIGTERM);
  ASSERT_TRUE(server.wait_for_log("a second signal stops at once"));
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 128 + SIGTERM);
}

TEST_F(Serve, SaysThatThePortIsTakenBeforeItLoads) {
  BackgroundProgram first(arguments());
  ASSERT_TRUE(first.wait_for_log("ready: ")) << first.log();
  const std::string host = address_of(first).host();
  const auto second = run_quern(arguments({"--port", host.substr(host.rfind(':') + 1)}));
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.log, HasSubstr("in use"));
  EXPECT_THAT(second.log, Not(HasSubstr("loading weights")));
}

TEST_F(Serve, RefusesALengthOverTheModelsBeforeItLoads) {
  const auto result = run_quern({"serve", model(), "--port", "0", "--max-model-len", "1000000"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.log, HasSubstr("262144"));
  EXPECT_THAT(result.log, Not(HasSubstr("loading weights")));
}

TEST_F(Serve, SaysThatMemoryIsShortBeforeItLoads) {
  const auto result = run_quern({"serve", model(), "--port", "0", "--kv-cache-memory-bytes", "900T"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.log, Not(HasSubstr("loading weights")));
}

TEST_F(Serve, WarnsOfOptionsWithoutEffect) {
  BackgroundProgram server(arguments({"--enforce-eager", "--language-model-only"}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("--enforce-eager has no effect"));
  EXPECT_THAT(server.log(), HasSubstr("--language-model-only has no effect"));
  server.send(SIGINT);
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Serve, IsMeasuredByBenchServe) {
  BackgroundProgram server(arguments({"--served-model-name", "mill", "--api-key", "secret"}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const std::string url = "http://" + address_of(server).host();
  EXPECT_EQ(http_call(address_of(server), {.path = "/v1/models"})->status, 401);
  ::setenv("OPENAI_API_KEY", "secret", 1);
  const std::string file = (folder_->path() / "serve.json").string();
  const auto result = run_quern({"bench",
                                 "serve",
                                 "--base-url",
                                 url,
                                 "--random-input-len",
                                 "20",
                                 "--random-output-len",
                                 "6",
                                 "--random-vocab-size",
                                 "256",
                                 "--num-prompts",
                                 "10",
                                 "--max-concurrency",
                                 "3",
                                 "--request-rate",
                                 "200",
                                 "--ignore-eos",
                                 "--percentile-metrics",
                                 "ttft,tpot,itl,e2el",
                                 "--save-detailed",
                                 "--result-filename",
                                 file});
  ::unsetenv("OPENAI_API_KEY");
  ASSERT_EQ(result.exit_code, 0) << result.log;
  EXPECT_THAT(result.output, HasSubstr("Successful requests:                     10"));
  EXPECT_THAT(result.output, HasSubstr("Total generated tokens:                  60"));
  const Result<Json> saved = read_json_file(file);
  ASSERT_OK(saved);
  EXPECT_EQ(saved->at("completed"), 10);
  EXPECT_EQ(saved->at("model_id"), "mill");
  EXPECT_LE(saved->at("max_concurrent_requests").get<int>(), 10);
  EXPECT_EQ(saved->at("input_lens")[0], 20);
}

TEST_F(Serve, BenchServeSaysThatNothingListens) {
  const auto result = run_quern({"bench", "serve", "--port", "1", "--num-prompts", "1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.log, HasSubstr("127.0.0.1:1"));
}

/// A server that loses its workers with the step that computes token 13, while two requests run; what became of them, and of it.
class ServeLost : public Serve {
 protected:
  struct Lost {
    std::string running, stream, health, metrics, late;
    int running_status = 0, health_status = 0, late_status = 0, exit_code = -1;
    std::string log;
  };
  static Lost lose(const std::string& how) {
    std::vector<std::string> words = arguments();
    words.insert(words.begin(), how);
    BackgroundProgram server(words, QUERN_FAILING_SERVER);
    Lost lost;
    EXPECT_TRUE(server.wait_for_log("ready: ")) << server.log();
    const HttpAddress address = address_of(server);
    {
      std::jthread running([&] {
        const Result<HttpReply> reply = http_call(address, completion(8000));
        EXPECT_OK(reply);
        lost.running = reply->body;
        lost.running_status = reply->status;
      });
      std::jthread stream([&] {
        HttpCall call = completion(8000);
        Json body = *parse_json(call.body, "request");
        body["stream"] = true;
        call.body = body.dump();
        const Result<HttpReply> reply = http_call(address, call);
        EXPECT_OK(reply);
        lost.stream = reply->body;
      });
      while (num_running(address) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const Json fatal{{"model", "tiny"}, {"prompt", {13}}, {"max_tokens", 5}};
      EXPECT_EQ(http_call(address, {.method = "POST", .path = "/v1/completions", .body = fatal.dump()})->status, 500);
    }
    const Result<HttpReply> health = http_call(address, {.path = "/health"});
    EXPECT_OK(health);
    lost.health = health->body;
    lost.health_status = health->status;
    lost.metrics = http_call(address, {.path = "/metrics"})->body;
    const Result<HttpReply> late = http_call(address, completion(5));
    EXPECT_OK(late);
    lost.late = late->body;
    lost.late_status = late->status;
    lost.exit_code = server.wait();
    lost.log = server.log();
    return lost;
  }
  static void expect_told(const Lost& lost) {
    const auto reason = HasSubstr("no message from rank 1 for 10.0 s (add_partials 3 of 40 KiB, staged)");
    EXPECT_EQ(lost.running_status, 500);
    EXPECT_THAT(lost.running, reason);
    EXPECT_THAT(lost.stream, reason);
    EXPECT_THAT(lost.stream, HasSubstr("data: [DONE]"));
    EXPECT_EQ(lost.health_status, 503);
    EXPECT_THAT(lost.health, reason);
    EXPECT_THAT(lost.metrics, HasSubstr("quern:engine_failed{engine=\"0\",model_name=\"tiny\"} 1"));
    EXPECT_EQ(lost.late_status, 503);
    EXPECT_THAT(lost.late, reason);
    EXPECT_EQ(lost.exit_code, 1);
    EXPECT_THAT(lost.log, HasSubstr("quern: the engine failed: rank 0 (cpu:0): no message from rank 1"));
  }
};

TEST_F(ServeLost, ClientsAndProbesHearOfALostRankAndTheProcessEnds) {
  const Lost lost = lose("error");
  expect_told(lost);
  EXPECT_THAT(lost.log, Not(HasSubstr("still waits for the devices")));
}

TEST_F(ServeLost, TheProcessEndsAlsoWhereADriverNeverReturns) {
  const Lost lost = lose("hang");
  EXPECT_THAT(lost.log, HasSubstr("something still waits for the devices after 15 s"));
  EXPECT_EQ(lost.exit_code, 1);
  EXPECT_EQ(lost.health_status, 503);
  EXPECT_EQ(lost.late_status, 503);
}

}  // namespace
}  // namespace quern::app
