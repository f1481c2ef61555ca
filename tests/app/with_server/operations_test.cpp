#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>

#include "app/program.h"
#include "app/with_server/service_notifier.h"
#include "app/with_server/tiny_checkpoint.h"
#include "base/file.h"
#include "base/json.h"
#include "http_client.h"
#include "support/test_support.h"
#include "test_certificates.h"

// `quern serve` as a service manager and an administrator see it.

namespace quern::app {
namespace {

using quern::testing::BackgroundProgram;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using quern::testing::write_tiny_checkpoint;
using server::HttpClient;
using ::testing::HasSubstr;
using ::testing::Not;

/// The socket of a service manager.
class Manager {
 public:
  explicit Manager(std::string address) {
    socket_ = ::socket(AF_UNIX, SOCK_DGRAM, 0);
    ::setenv("NOTIFY_SOCKET", address.c_str(), 1);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    address.copy(name.sun_path, sizeof(name.sun_path) - 1);
    if (address[0] == '@') name.sun_path[0] = '\0';
    EXPECT_EQ(::bind(socket_, reinterpret_cast<const sockaddr*>(&name), static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size())), 0);
  }
  ~Manager() {
    ::close(socket_);
    for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) ::unsetenv(name);
  }
  /// The next message that has a line beginning with `text`.
  std::string wait_for(std::string_view text) {
    std::array<char, 4096> message;
    while (true) {
      const ssize_t size = ::recv(socket_, message.data(), message.size(), 0);
      if (size < 0) return {};
      const std::string got = "\n" + std::string(message.data(), static_cast<size_t>(size));
      if (got.find("\n" + std::string(text)) != std::string::npos) return got.substr(1);
    }
  }
  /// How many messages with such a line are waiting.
  int count(std::string_view text) {
    int found = 0;
    std::array<char, 4096> message;
    for (ssize_t size = 0; (size = ::recv(socket_, message.data(), message.size(), MSG_DONTWAIT)) >= 0;) {
      const std::string got = "\n" + std::string(message.data(), static_cast<size_t>(size));
      if (got.find("\n" + std::string(text)) != std::string::npos) ++found;
    }
    return found;
  }

 private:
  int socket_ = -1;
};

class Operations : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    write_tiny_checkpoint(folder_->path() / "tiny");
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::vector<std::string> arguments(const std::vector<std::string>& more) {
    std::vector<std::string> all = {"serve",  (folder_->path() / "tiny").string(), "--threads", "1", "--max-num-seqs", "2", "--max-model-len",
                                    "1024", "--kv-cache-memory-bytes",           "8M"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static uint16_t port_of(const BackgroundProgram& server) {
    const std::string log = server.log();
    return static_cast<uint16_t>(std::stoi(log.substr(log.find("://127.0.0.1:") + 13)));
  }
  static std::string path(const std::string& name) { return (folder_->path() / name).string(); }
  static bool is_answered(HttpClient&& client) {
    const std::string body = R"({"prompt": [72, 101], "max_tokens": 2, "ignore_eos": true})";
    if (!client.connected() || !client.send_request("POST", "/v1/completions", body)) return false;
    const auto response = client.read_response();
    return response && response->status == 200;
  }
  static std::unique_ptr<TemporaryFolder> folder_;
};
std::unique_ptr<TemporaryFolder> Operations::folder_;

TEST_F(Operations, TellsTheServiceManagerFromTheStartToTheEnd) {
  Manager manager(path("notify"));
  ::setenv("WATCHDOG_USEC", "300000", 1);
  BackgroundProgram server(arguments({"--port", "0", "--served-model-name", "mill"}));
  EXPECT_THAT(manager.wait_for("STATUS=loading"), HasSubstr("EXTEND_TIMEOUT_USEC="));
  const std::string ready = manager.wait_for("READY=1");
  EXPECT_THAT(ready, HasSubstr("STATUS=serving mill at http://127.0.0.1:"));
  EXPECT_TRUE(is_answered(HttpClient(port_of(server))));
  manager.wait_for("WATCHDOG=1");
  manager.wait_for("WATCHDOG=1");
  server.send(SIGTERM);
  EXPECT_THAT(manager.wait_for("STOPPING=1"), HasSubstr("STATUS="));
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Operations, TheWatchdogHearsNothingFromAServerThatIsNotWell) {
  Manager manager("@quern-test-" + std::to_string(::getpid()));  // an abstract socket
  ::setenv("WATCHDOG_USEC", "30000", 1);
  ::setenv("WATCHDOG_PID", std::to_string(::getpid()).c_str(), 1);
  ServiceNotifier notifier(std::chrono::milliseconds(100));
  manager.wait_for("WATCHDOG=1");
  // It falls silent: sooner or later a good while passes without a word.
  int heard = 1;
  for (int i = 0; i < 100 && heard > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    heard = manager.count("WATCHDOG=1");
  }
  EXPECT_EQ(heard, 0);
  notifier.well();
  manager.wait_for("WATCHDOG=1");
}

TEST_F(Operations, TheWatchdogOfAnotherProcessIsLeftAlone) {
  Manager manager(path("other"));
  ::setenv("WATCHDOG_USEC", "1000", 1);
  ::setenv("WATCHDOG_PID", "1", 1);
  ServiceNotifier notifier;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  notifier.status("two\nlines");
  EXPECT_EQ(manager.wait_for("STATUS="), "STATUS=two lines");
  EXPECT_EQ(manager.count("WATCHDOG=1"), 0);
}

TEST_F(Operations, BadTlsFilesAreNamedBeforeTheModelLoads) {
  const server::CertificateFiles one = server::make_certificate(folder_->path(), "one"), two = server::make_certificate(folder_->path(), "two");
  for (const auto& [certificate, key, said] : {std::tuple(path("no.crt"), one.key.string(), "no.crt"),
                                               {one.certificate.string(), two.key.string(), "not that of the certificate"},
                                               {one.key.string(), one.key.string(), "no certificate in PEM format"}}) {
    const auto result = run_quern(arguments({"--port", "0", "--ssl-certfile", certificate, "--ssl-keyfile", key}));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.log, HasSubstr(said));
    EXPECT_THAT(result.log, Not(HasSubstr("loading weights")));
  }
}

TEST_F(Operations, ServesHttps) {
  const server::CertificateFiles files = server::make_certificate(folder_->path(), "server");
  BackgroundProgram server(arguments({"--port", "0", "--ssl-certfile", files.certificate.string(), "--ssl-keyfile", files.key.string()}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  EXPECT_THAT(server.log(), HasSubstr("https://127.0.0.1:"));
  EXPECT_TRUE(is_answered(HttpClient(port_of(server), server::ClientTls{})));
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Operations, ServesASocketFileAlsoAfterACrash) {
  const std::string socket = path("quern.sock");
  {
    BackgroundProgram crashed(arguments({"--uds", socket}));
    ASSERT_TRUE(crashed.wait_for_log("ready: ")) << crashed.log();
    EXPECT_TRUE(is_answered(HttpClient(std::filesystem::path(socket))));
    const auto second = run_quern(arguments({"--uds", socket}));  // while the first lives
    EXPECT_EQ(second.exit_code, 1);
    EXPECT_THAT(second.log, HasSubstr("another server listens there"));
    crashed.send(SIGKILL);
    crashed.wait();
  }
  ASSERT_TRUE(std::filesystem::exists(socket));
  BackgroundProgram server(arguments({"--uds", socket}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  EXPECT_TRUE(is_answered(HttpClient(std::filesystem::path(socket))));
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST_F(Operations, RotatesItsAccessLogOnAUserSignal) {
  const std::string log = path("access.log"), old = path("access.log.1");
  const auto wait_for_line = [](const std::string& file) {
    Result<std::string> text = read_file(file);
    while (!text || text->empty()) text = read_file(file);
    return *text;
  };
  BackgroundProgram server(arguments({"--port", "0", "--access-log", log}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  EXPECT_TRUE(is_answered(HttpClient(port_of(server))));
  const Json line = Json::parse(wait_for_line(log));
  EXPECT_EQ(line["path"], "/v1/completions");
  EXPECT_EQ(line["completion_tokens"], 2);
  std::filesystem::rename(log, old);
  server.send(SIGUSR1);
  while (!std::filesystem::exists(log)) EXPECT_TRUE(is_answered(HttpClient(port_of(server))));
  server.send(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

TEST_F(Operations, MakesRoomForItsConnectionsOrSaysThatThereIsNone) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{.rlim_cur = 256, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  {
    BackgroundProgram server(arguments({"--port", "0", "--max-connections", "500"}));
    ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
    EXPECT_THAT(HttpClient::fetch(port_of(server), "GET", "/metrics")->body, HasSubstr("\nprocess_max_fds 756\n"));
    EXPECT_THAT(server.log(), Not(HasSubstr("--max-connections")));
  }
  {
    BackgroundProgram server(arguments({"--port", "0", "--max-connections", "1000000"}));
    ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
    if (before.rlim_max < 1'000'256) {
      EXPECT_THAT(server.log(), HasSubstr("fewer than --max-connections 1000000 needs"));
    }
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(Operations, KeysInFilesAreAskedForAndNeverTold) {
  const std::string keys = path("keys");
  ASSERT_OK(write_file(keys, "hidden-key\n"));
  BackgroundProgram server(arguments({"--port", "0", "--api-key-file", keys}));
  ASSERT_TRUE(server.wait_for_log("ready: ")) << server.log();
  EXPECT_EQ(HttpClient::fetch(port_of(server), "GET", "/v1/models")->status, 401);
  EXPECT_EQ(HttpClient::fetch(port_of(server), "GET", "/v1/models", "", "Authorization: Bearer hidden-key\r\n")->status, 200);
  EXPECT_THAT(server.log(), HasSubstr("every user of this machine can read the keys"));
  EXPECT_THAT(server.log(), Not(HasSubstr("hidden-key")));
}

}  // namespace
}  // namespace quern::app
