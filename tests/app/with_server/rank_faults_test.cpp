#include <signal.h>

#include <thread>

#include "app/http_client.h"
#include "app/program.h"
#include "app/with_server/tiny_checkpoint.h"
#include "base/json.h"
#include "support/test_support.h"

// A server of two ranks, one of which meets a fault in the middle of a step.

namespace quern::app {
namespace {

using quern::testing::BackgroundProgram;
using quern::testing::TemporaryFolder;
using quern::testing::write_tiny_checkpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

class RankFaults : public ::testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    write_tiny_checkpoint(folder_->path() / "tiny");
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static std::vector<std::string> arguments(const std::string& fault) {
    return {fault, "serve", (folder_->path() / "tiny").string(), "--device", "cpu:0,cpu:1", "-tp", "2", "--collective", GetParam(), "--collective-timeout", "3", "--port", "0", "--threads", "1",
            "--max-num-seqs", "4", "--max-model-len", "8192", "--kv-cache-memory-bytes", "64M"};
  }
  static HttpAddress address_of(const BackgroundProgram& server) {
    const std::string log = server.log();
    const size_t begin = log.find("http://127.0.0.1:");
    Result<HttpAddress> address = HttpAddress::parse(log.substr(begin, log.find_first_not_of("0123456789", begin + 17) - begin));
    EXPECT_OK(address);
    return *address;
  }
  static Result<HttpReply> complete(const HttpAddress& address, int max_tokens) {
    const Json body{{"model", "tiny"}, {"prompt", {72, 101, 108, 108, 111}}, {"max_tokens", max_tokens}, {"ignore_eos", true}, {"seed", 1}};
    return http_call(address, {.method = "POST", .path = "/v1/completions", .body = body.dump()});
  }
  /// Requests that the server computes, by its metrics.
  static int num_running(const HttpAddress& address) {
    const std::string text = http_call(address, {.path = "/metrics"})->body;
    const size_t value = text.find("} ", text.find("\nvllm:num_requests_running{"));
    return value == std::string::npos ? -1 : std::stoi(text.substr(value + 2));
  }

  struct Outcome {
    HttpReply running, health, late;
    std::string log;
    int exit_code = -1;
  };
  /// What becomes of a request that runs, of those that come later, and of the server.
  static Outcome lose(const std::string& fault) { return lose(arguments(fault)); }
  static Outcome lose(const std::vector<std::string>& arguments) {
    BackgroundProgram server(arguments, QUERN_FAILING_SERVER);
    Outcome outcome;
    if (!server.wait_for_log("ready: ")) {
      ADD_FAILURE() << server.log();
      return outcome;
    }
    const HttpAddress address = address_of(server);
    std::jthread running([&] { outcome.running = *complete(address, 8000); });
    while (num_running(address) != 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    server.send(SIGUSR2);
    running.join();
    outcome.health = *http_call(address, {.path = "/health"});
    outcome.late = *complete(address, 2);
    outcome.exit_code = server.wait();
    outcome.log = server.log();
    return outcome;
  }
  static void expect_told(const Outcome& outcome, const ::testing::Matcher<std::string>& reason) {
    EXPECT_EQ(outcome.running.status, 500);
    EXPECT_THAT(outcome.running.body, reason);
    EXPECT_EQ(outcome.health.status, 503);
    EXPECT_THAT(outcome.health.body, reason);
    EXPECT_EQ(outcome.late.status, 503);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.log, HasSubstr("the engine failed"));
  }

  static std::unique_ptr<TemporaryFolder> folder_;
};
std::unique_ptr<TemporaryFolder> RankFaults::folder_;

TEST_P(RankFaults, ARankThatStopsEndsTheStepByItsDeadlineAndTheServer) {
  expect_told(lose("rank-stops"), AllOf(HasSubstr("waited 3."), HasSubstr("rank 1"), HasSubstr("message "), HasSubstr("bytes"), HasSubstr("transport " + GetParam())));
}

TEST_P(RankFaults, ARankThatComesAfterTheDeadlineIsNotWaitedForAgain) {
  const Outcome outcome = lose("rank-late");
  expect_told(outcome, AllOf(HasSubstr("waited 3."), HasSubstr("rank 1"), HasSubstr("transport " + GetParam())));
  EXPECT_THAT(outcome.log, ::testing::Not(HasSubstr("still waits for the devices")));
}

TEST_P(RankFaults, ALostDeviceEndsTheStepAtOnceWithItsReason) { expect_told(lose("rank-lost"), HasSubstr("the device of rank 1 is lost")); }

TEST_P(RankFaults, ASlowRankIsWaitedFor) {
  BackgroundProgram server(arguments("rank-slow"), QUERN_FAILING_SERVER);
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const HttpAddress address = address_of(server);
  const HttpReply before = *complete(address, 40);
  EXPECT_EQ(before.status, 200);
  server.send(SIGUSR2);
  const HttpReply slow = *complete(address, 40);
  EXPECT_EQ(slow.status, 200) << slow.body;
  EXPECT_EQ(parse_json(slow.body, "answer")->at("choices"), parse_json(before.body, "answer")->at("choices"));
  EXPECT_EQ(http_call(address, {.path = "/health"})->status, 200);
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

/// One device, whose driver does not come back from a wait or from a call that enqueues.
class HungDevice : public RankFaults {};

TEST_P(HungDevice, EndsTheStepByItsDeadlineAndTheServer) {
  const Outcome outcome =
      lose({GetParam(), "serve", (folder_->path() / "tiny").string(), "--device", "cpu", "--step-timeout", "3", "--port", "0", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "8192",
            "--kv-cache-memory-bytes", "64M"});
  expect_told(outcome, AllOf(HasSubstr("has not ended after 3.0 s"), HasSubstr("does not answer")));
  EXPECT_THAT(outcome.log, HasSubstr("still waits for the devices")) << "the process ends without them";
}

/// A process that was stopped, as a container is that is paused, in the middle of a step.
class PausedServer : public RankFaults {};

TEST_P(PausedServer, DoesNotTakeItsDeviceForLost) {
  BackgroundProgram server({GetParam(), "serve", (folder_->path() / "tiny").string(), "--device", "cpu", "--step-timeout", "2", "--port", "0", "--threads", "1", "--max-num-seqs", "4",
                            "--max-model-len", "8192", "--kv-cache-memory-bytes", "64M"},
                           QUERN_FAILING_SERVER);
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  const HttpAddress address = address_of(server);
  HttpReply reply;
  std::jthread running([&] { reply = *complete(address, 3000); });
  while (num_running(address) != 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  server.send(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  server.send(SIGCONT);
  running.join();
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(http_call(address, {.path = "/health"})->status, 200);
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(One, PausedServer, ::testing::Values("device-hangs"), [](const auto&) { return "Device"; });

INSTANTIATE_TEST_SUITE_P(Faults, HungDevice, ::testing::Values("device-hangs", "device-blocks"), [](const auto& each) { return each.param == "device-hangs" ? "Waiting" : "Enqueuing"; });

INSTANTIATE_TEST_SUITE_P(Transports, RankFaults, ::testing::Values("direct", "staged"), [](const auto& each) { return each.param; });

}  // namespace
}  // namespace quern::app
