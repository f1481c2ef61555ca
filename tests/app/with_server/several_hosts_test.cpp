#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "app/http_client.h"
#include "app/program.h"
#include "app/with_server/tiny_checkpoint.h"
#include "base/file.h"
#include "base/json.h"
#include "support/test_support.h"

// `mpirun -np N quern serve`: over loopback, and once more by CTest on two hosts that are namespaces (tests/support/two_hosts, which says what mpirun needs for them).

namespace quern::app {
namespace {

using quern::testing::BackgroundProgram;
using quern::testing::TemporaryFolder;
using quern::testing::write_tiny_checkpoint;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

class SeveralHosts : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    write_tiny_checkpoint(folder_->path() / "tiny");
    write_tiny_checkpoint(folder_->path() / "other", 2);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (std::string_view(QUERN_MPIRUN).empty()) GTEST_SKIP() << "no mpirun of Open MPI when this was configured (package openmpi-bin)";
  }
  void TearDown() override {
    for (const pid_t pid : pids_)
      if (kill(pid, 0) == 0) kill(pid, SIGKILL);  // of a test that has failed
  }

  static Words join(Words first, const Words& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  static std::string model(const std::string& name = "tiny") { return (folder_->path() / name).string(); }
  /// What `quern serve` is told in every process.
  static Words serve(const Words& more = {}, const std::string& model_dir = model()) {
    Words words = {QUERN_PROGRAM, "serve", model_dir, "--port", "0", "--threads", "1"};
    for (const auto& [option, value] : {std::pair{"--max-num-seqs", "4"}, {"--max-model-len", "8192"}, {"--kv-cache-memory-bytes", "64M"}})
      if (std::find(more.begin(), more.end(), option) == more.end()) words.insert(words.end(), {option, value});
    return join(std::move(words), more);
  }
  /// What mpirun is told before. Tests may run as root and on fewer cores than there are ranks.
  static Words mpirun(const Words& more = {}) {
    Words words = {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"};
    if (const char* hosts = std::getenv("QUERN_MPIRUN_OPTIONS")) {
      std::istringstream list(hosts);
      for (std::string word; list >> word;) words.push_back(word);
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::unique_ptr<BackgroundProgram> start(int num_processes, const Words& program, const Words& options = {}) {
    return std::make_unique<BackgroundProgram>(join(join(mpirun(options), {"-np", std::to_string(num_processes)}), program), QUERN_MPIRUN);
  }
  /// The process ids, by number of process.
  std::vector<pid_t> pids_of(const BackgroundProgram& server, int num_processes) {
    std::vector<pid_t> pids;
    for (int process = 0; process < num_processes; ++process) {
      const std::string wanted = fmt::format("process {} of {}, pid ", process, num_processes), log = server.log();
      const size_t at = log.find(wanted);
      EXPECT_NE(at, std::string::npos) << log;
      pids.push_back(static_cast<pid_t>(std::stol(log.substr(at + wanted.size()))));
      pids_.push_back(pids.back());
    }
    return pids;
  }

  static HttpAddress address_of(const std::string& log) {
    const size_t begin = log.find("http://127.0.0.1:");
    Result<HttpAddress> address = HttpAddress::parse(log.substr(begin, log.find_first_not_of("0123456789", begin + 17) - begin));
    EXPECT_OK(address);
    return *address;
  }
  static Result<HttpReply> complete(const HttpAddress& address, int max_tokens, int seed = 1) {
    Json prompt = Json::array();
    for (int i = 0; i < 90; ++i) prompt.push_back((i * 37 + seed * 11) % 200 + 1);
    const Json body{{"model", "tiny"}, {"prompt", prompt}, {"max_tokens", max_tokens}, {"ignore_eos", true}, {"seed", seed}, {"temperature", seed % 2}, {"logprobs", 2}};
    return http_call(address, {.method = "POST", .path = "/v1/completions", .body = body.dump()});
  }
  static int metric(const HttpAddress& address, const std::string& name) {
    const std::string text = http_call(address, {.path = "/metrics"})->body;
    const size_t value = text.find("} ", text.find("\n" + name + "{"));
    return value == std::string::npos ? -1 : std::stoi(text.substr(value + 2));
  }
  /// Answers to several requests at once, and to one of them twice more.
  static std::vector<Json> answers_of(const HttpAddress& address) {
    std::vector<Json> answers(6);
    {
      std::vector<std::jthread> users;
      for (size_t i = 0; i < answers.size(); ++i)
        users.emplace_back([&, i] {
          const Result<HttpReply> reply = complete(address, 150, static_cast<int>(i));
          ASSERT_OK(reply);
          EXPECT_EQ(reply->status, 200) << reply->body;
          answers[i] = parse_json(reply->body, "answer")->at("choices");
        });
    }
    for (int time = 0; time < 2; ++time) {  // alone, so that the second finds what the first has left
      const Result<HttpReply> again = complete(address, 150, 1);
      answers.push_back(parse_json(again->body, "answer")->at("choices"));
    }
    return answers;
  }

  static std::unique_ptr<TemporaryFolder> folder_;
  std::vector<pid_t> pids_;
};
std::unique_ptr<TemporaryFolder> SeveralHosts::folder_;

/// Until process `pid` is gone, or only waits to be asked for its exit code.
void wait_for_end_of(pid_t pid) {
  while (kill(pid, 0) == 0) {
    const Result<std::string> stat = read_file(fmt::format("/proc/{}/stat", pid));
    if (stat && stat->find(") Z ") != std::string::npos) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_F(SeveralHosts, AnswerWithTheBitsOfOneProcess) {
  const Words drafts = {"--speculative-config", R"({"method": "mtp", "num_speculative_tokens": 2})"};
  for (const std::string tp_size : {"1", "2"}) {
    SCOPED_TRACE("tp " + tp_size);
    const Words ranks = join(drafts, {"-tp", tp_size, "--max-num-seqs", "3", "--kv-cache-memory-bytes", tp_size == "1" ? "330K" : "165K", "--max-model-len", "512"});
    Words alone = join(serve(ranks), {"-pp", "2"});
    std::vector<Json> expected;
    {
      BackgroundProgram one(Words(alone.begin() + 1, alone.end()));
      ASSERT_TRUE(one.wait_for_log("ready: ")) << one.log();
      expected = answers_of(address_of(one.log()));
    }
    const auto server = start(2, serve(ranks));
    ASSERT_TRUE(server->wait_for_log("ready: tiny")) << server->log();
    const std::vector<pid_t> pids = pids_of(*server, 2);
    const HttpAddress address = address_of(server->log());
    const std::vector<Json> found = answers_of(address);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(found[i], expected[i]) << i;
    EXPECT_GT(metric(address, "vllm:prefix_cache_hits_total"), 0);
    EXPECT_GT(metric(address, "vllm:num_preemptions_total"), 0);
    EXPECT_GT(metric(address, "vllm:spec_decode_num_draft_tokens_total"), 0);
    const std::string log = server->log();
    EXPECT_THAT(log, AllOf(HasSubstr("[process 1] quern "), HasSubstr("[process 1] ready: steps come from process 0"), Not(HasSubstr("[process 1] listening"))));
    EXPECT_EQ(log.find("listening on", log.find("listening on") + 1), std::string::npos) << "one process serves";
    // To process 0, as a service manager does: everything ends in order.
    kill(pids[0], SIGTERM);
    EXPECT_EQ(server->wait(), 0) << server->log();
    EXPECT_THAT(server->log(), AllOf(HasSubstr("INFO  stopped"), HasSubstr("[process 1] stopped")));
  }
}

TEST_F(SeveralHosts, EndInOrderWhenMpirunIsAskedTo) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto server = start(2, serve());
    ASSERT_TRUE(server->wait_for_log("ready: tiny") && server->wait_for_log("[process 1] ready")) << server->log();
    const std::vector<pid_t> pids = pids_of(*server, 2);
    server->send(signal);
    server->wait();
    EXPECT_THAT(server->log(), AllOf(HasSubstr("INFO  stopped"), HasSubstr("[process 1] stopped"), Not(HasSubstr("ERROR"))));
    for (const pid_t pid : pids) wait_for_end_of(pid);
  }
}

TEST_F(SeveralHosts, DifferencesAreFoundAtTheStart) {
  struct Case {
    Words other;
    std::string wanted;
  };
  for (const Case& c : {Case{serve({"--max-num-seqs", "5"}), "--max-num-seqs 5 there and 4 here"}, Case{serve({}, model("other")), "the checkpoint "},
                        Case{serve({}, "/nowhere"), "there is no model directory /nowhere"}, Case{serve({"-tp", "2", "--device", "cpu:0,cpu:1,cpu:2"}), "--device names 3 devices"}}) {
    const auto server = std::make_unique<BackgroundProgram>(join(join(join(mpirun(), {"-np", "1"}), serve()), join({":", "-np", "1"}, c.other)), QUERN_MPIRUN);
    EXPECT_NE(server->wait(), 0);
    const std::string log = server->log();
    const size_t sentence = log.find("\nquern: process 1 (");
    ASSERT_NE(sentence, std::string::npos) << log;
    EXPECT_THAT(log.substr(sentence + 1, log.find('\n', sentence + 1) - sentence - 1), HasSubstr(c.wanted));
    EXPECT_THAT(log, Not(HasSubstr("listening")));
  }
}

bool between_hosts() { return std::getenv("QUERN_MPIRUN_OPTIONS") != nullptr; }

/// What becomes of a request that runs, of those that come later, and of all processes, when process 1 gets a signal.
struct Loss {
  Result<HttpReply> running = Error{};
  HttpReply health;
  Result<HttpReply> late = Error{};
  std::string log;
  int exit_code = -1;
};
class LostProcess : public SeveralHosts {
 protected:
  Loss lose(int signal, const Words& options, const std::string& timeout_seconds = "3", bool look = true) {
    const auto server = start(2, serve({"--collective-timeout", timeout_seconds}), options);
    Loss loss;
    if (!server->wait_for_log("ready: tiny")) {
      ADD_FAILURE() << server->log();
      return loss;
    }
    const std::vector<pid_t> pids = pids_of(*server, 2);
    const HttpAddress address = address_of(server->log());
    std::jthread running([&] {
      loss.running = complete(address, 8000);
    });
    while (metric(address, "vllm:num_requests_running") != 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(kill(pids[1], signal), 0);
    running.join();
    if (look) {
      if (const Result<HttpReply> health = http_call(address, {.path = "/health"}); health) loss.health = *health;
      loss.late = complete(address, 2);
    }
    loss.exit_code = server->wait();
    loss.log = server->log();
    for (const pid_t pid : pids) wait_for_end_of(pid);
    return loss;
  }
  static void expect_told(const Loss& loss) {
    const auto reason = AllOf(HasSubstr("process 1 ("), HasSubstr("rank 1"), HasSubstr("transport mpi"), HasSubstr(" s"));
    ASSERT_OK(loss.running);
    EXPECT_EQ(loss.running->status, 500);
    EXPECT_THAT(loss.running->body, reason);
    EXPECT_NE(loss.exit_code, 0);
    EXPECT_THAT(loss.log, AllOf(HasSubstr("the engine failed: process 1 ("), Not(HasSubstr("still waits"))));
  }
};

TEST_F(LostProcess, ThatIsKilledIsNamedAndEverythingEnds) {
  // mpirun asks the others for their end so many seconds after it has seen one die, and kills them after as many again.
  const Loss loss = lose(SIGKILL, {"--mca", "odls_base_sigkill_timeout", "8"});
  if (between_hosts() && !loss.running) {
    EXPECT_NE(loss.exit_code, 0);
    GTEST_SKIP() << "mpirun has killed process 0 without asking it first, as it does between hosts at times (docs/scaling.md): " << loss.running.error().message;
  }
  expect_told(loss);
  EXPECT_EQ(loss.health.status, 503);
  EXPECT_THAT(loss.health.body, HasSubstr("process 1 ("));
  ASSERT_OK(loss.late);
  EXPECT_EQ(loss.late->status, 503);
}

/// Long before its silence alone would tell: by the request to end, which mpirun sends because of it.
TEST_F(LostProcess, ThatIsKilledIsNamedInTheTimeThatMpirunGrants) {
  if (between_hosts())
    GTEST_SKIP() << "between hosts, mpirun was seen to kill process 0 without asking it first (docs/scaling.md); a deadline shorter than its grace is what tells there";
  expect_told(lose(SIGKILL, {"--mca", "odls_base_sigkill_timeout", "5"}, "300", false));
}

TEST_F(LostProcess, ThatHangsIsNamedAndEverythingEnds) {
  const Loss loss = lose(SIGSTOP, {});
  expect_told(loss);
  EXPECT_EQ(loss.health.status, 503);
  ASSERT_OK(loss.running);
  EXPECT_THAT(loss.running->body, HasSubstr("nothing was heard of it for "));
  ASSERT_OK(loss.late);
  EXPECT_EQ(loss.late->status, 503);
}

}  // namespace
}  // namespace quern::app
