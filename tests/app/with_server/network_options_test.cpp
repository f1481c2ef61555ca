#include "app/with_server/network_options.h"

#include <sys/stat.h>

#include <cstdlib>

#include "base/file.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Network : public ::testing::Test {
 protected:
  void SetUp() override { ::unsetenv("QUERN_API_KEY"); }
  void TearDown() override { ::unsetenv("QUERN_API_KEY"); }
  /// Gives one option a value; what is wrong with it, or nothing.
  std::string give(const std::string& name, std::string_view value) {
    for (OptionGroup& group : groups_) {
      for (Option& option : group.options) {
        const std::vector<std::string_view> names = split_at_commas(option.names);
        if (std::ranges::find(names, name) == names.end()) continue;
        const Result<void> done = option.set(value);
        return done ? "" : done.error().message;
      }
    }
    return "there is no " + name;
  }
  std::filesystem::path file(const std::string& name, const std::string& text) {
    const auto path = folder_.path() / name;
    EXPECT_OK(write_file(path, text));
    ::chmod(path.c_str(), 0600);
    return path;
  }
  /// What server_options complains about.
  std::string complaint() {
    const auto result = server_options(options_);
    return result ? "" : result.error().message;
  }

  TemporaryFolder folder_;
  NetworkOptions options_;
  std::vector<OptionGroup> groups_ = network_groups(options_);
};

TEST_F(Network, KeysComeFromOptionsAndFilesInOrder) {
  EXPECT_EQ(give("--api-key", "one"), "");
  EXPECT_EQ(give("--api-key-file", file("keys", "# of our team\n two \r\n\nthree").string()), "");
  EXPECT_EQ(give("--api-key", "four,five"), "");  // a comma is part of a key
  ::setenv("QUERN_API_KEY", "six", 1);
  const auto keys = collect_api_keys(options_);
  ASSERT_OK(keys);
  EXPECT_THAT(*keys, ElementsAre("one", "four,five", "two", "three"));
}

TEST_F(Network, TheEnvironmentIsAskedOnlyWhereNothingElseWasSaid) {
  EXPECT_TRUE(collect_api_keys(options_)->empty());
  ::setenv("QUERN_API_KEY", "from the environment", 1);
  EXPECT_THAT(*collect_api_keys(options_), ElementsAre("from the environment"));
  ::setenv("QUERN_API_KEY", "", 1);
  EXPECT_TRUE(collect_api_keys(options_)->empty());
}

TEST_F(Network, AKeyFileThatGivesNoKeyIsAnError) {
  options_.api_key_files = {folder_.path() / "missing"};
  EXPECT_THAT(complaint(), HasSubstr("--api-key-file"));
  options_.api_key_files = {file("empty", "\n# nothing\n")};
  EXPECT_THAT(complaint(), HasSubstr("has no key"));
}

TEST_F(Network, ListsAreTakenAsVllmAndAsPeopleWriteThem) {
  EXPECT_EQ(give("--allowed-origins", R"(["http://a.example", "http://b.example"])"), "");
  EXPECT_THAT(options_.cors.allowed_origins, ElementsAre("http://a.example", "http://b.example"));
  EXPECT_EQ(give("--allowed-origins", "http://c.example"), "");
  EXPECT_THAT(options_.cors.allowed_origins, ElementsAre("http://a.example", "http://b.example", "http://c.example"));
  EXPECT_EQ(give("--allowed-methods", "GET, PUT"), "");  // instead of the default
  EXPECT_THAT(options_.cors.allowed_methods, ElementsAre("GET", "PUT"));
  EXPECT_EQ(give("--disable-access-log-for-endpoints", "/health,/metrics"), "");
  EXPECT_THAT(options_.paths_not_logged, ElementsAre("/health", "/metrics"));
  for (const char* bad : {"[1]", "[", "a,,b", ",", R"([""])"}) EXPECT_NE(give("--allowed-headers", bad), "") << bad;
}

TEST_F(Network, WhatDoesNotBelongTogetherIsRefused) {
  options_.tls.key_file = "key.pem";
  EXPECT_THAT(complaint(), HasSubstr("--ssl-certfile"));
  options_.tls.certificate_file = "cert.pem";
  EXPECT_EQ(complaint(), "");
  options_.unix_socket = "/tmp/socket";
  EXPECT_THAT(complaint(), HasSubstr("--uds"));
}

TEST_F(Network, LimitsReachTheServer) {
  for (const auto& [name, text] : {std::pair("--client-timeout", "1.5"), {"--keep-alive-timeout", "2"}, {"--max-connections", "10"},
                                   {"--max-header-size", "8K"}, {"--max-body-size", "1M"}, {"--max-requests-per-key", "3"},
                                   {"--request-timeout", "60"}, {"--first-token-timeout", "0.25"}, {"--api-key", "key"}}) {
    EXPECT_EQ(give(name, text), "") << name;
  }
  const auto result = server_options(options_);
  ASSERT_OK(result);
  EXPECT_EQ(result->http.progress_timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(result->http.idle_timeout, std::chrono::seconds(2));
  EXPECT_EQ(result->http.max_connections, 10);
  EXPECT_EQ(result->http.max_head_bytes, 8192U);
  EXPECT_EQ(result->http.max_body_bytes, size_t{1} << 20);
  EXPECT_EQ(result->api.max_requests_per_key, 3);
  EXPECT_EQ(time_limits(options_).total, std::chrono::seconds(60));
  EXPECT_EQ(time_limits(options_).first_token, std::chrono::milliseconds(250));
  for (const auto& [name, text] : {std::pair("--client-timeout", "0"), {"--max-connections", "0"}, {"--port", "65536"}, {"--request-timeout", "-1"},
                                   {"--max-requests-per-key", "0"}, {"--ssl-cert-reqs", "3"}}) {
    EXPECT_NE(give(name, text), "") << name;
  }
  options_.max_header_size = 100;
  EXPECT_THAT(complaint(), HasSubstr("--max-header-size"));
}

TEST_F(Network, TheAccessLogIsOnUntilItIsSwitchedOff) {
  EXPECT_EQ(server_options(options_)->access_log.target, "stdout");
  EXPECT_EQ(give("--disable-uvicorn-access-log", ""), "");
  EXPECT_EQ(server_options(options_)->access_log.target, "");
}

TEST_F(Network, TheLogNamesWhereToAsk) {
  EXPECT_EQ(url_of(options_, 8000), "http://127.0.0.1:8000");
  options_.host = "::1";
  EXPECT_EQ(url_of(options_, 8000), "http://[::1]:8000");
  options_.tls.certificate_file = "cert.pem";
  EXPECT_EQ(url_of(options_, 8000), "https://[::1]:8000");
  options_.unix_socket = "/run/quern.sock";
  EXPECT_EQ(url_of(options_, 0), "http+unix:/run/quern.sock");
}

}  // namespace
}  // namespace quern::app
