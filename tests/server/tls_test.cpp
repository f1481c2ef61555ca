#include "server/tls.h"

#include <fmt/format.h>
#include <openssl/ssl.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "base/file.h"
#include "http_client.h"
#include "server/http_server.h"
#include "support/test_support.h"
#include "test_certificates.h"

namespace quern::server {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Says something, then nothing more until it is destroyed.
class Endless final : public EventStream {
 public:
  explicit Endless(std::atomic<int>& alive) : alive_(alive) { ++alive_; }
  ~Endless() override { --alive_; }
  void on_ready(std::function<void()>) override {}
  bool read(std::string& out) override {
    out += "data: x\n\n";
    return true;
  }

 private:
  std::atomic<int>& alive_;
};

class Tls : public ::testing::Test {
 protected:
  void start(HttpOptions options = {}) {
    options.port = 0;
    if (!options.tls.enabled()) options.tls = server_tls();
    auto server = HttpServer::start(
        options,
        [this](const HttpRequest& request) -> HttpAnswer {
          if (request.path == "/endless") return std::unique_ptr<EventStream>(std::make_unique<Endless>(alive_));
          return HttpResponse{200, request.method + " " + request.path + " " + request.body};
        },
        [](int status, std::string_view message) { return HttpResponse{status, std::string(message)}; });
    ASSERT_OK(server);
    server_ = std::move(*server);
  }
  [[nodiscard]] TlsOptions server_tls() const {
    TlsOptions tls;
    tls.certificate_file = own_.certificate;
    tls.key_file = own_.key;
    return tls;
  }
  [[nodiscard]] uint16_t port() const { return server_->port(); }
  /// Whether a client with these credentials gets an answer.
  bool is_answered(const ClientTls& tls) {
    HttpClient client(port(), tls);
    return client.connected() && client.send_request("GET", "/a", "") && client.read_response().has_value();
  }
  /// What is wrong with these files.
  static std::string fault(const TlsOptions& options) {
    const auto context = make_tls_context(options);
    return context ? "" : context.error().message;
  }

  TemporaryFolder folder_;
  CertificateFiles own_ = make_certificate(folder_.path(), "own");
  std::atomic<int> alive_{0};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(Tls, AnswersManyRequestsOnOneConnection) {
  start();
  HttpClient client(port(), ClientTls{});
  ASSERT_TRUE(client.connected());
  const std::string large(3'000'000, 'b');
  for (const std::string& body : {std::string("small"), large, std::string("again")}) {
    ASSERT_TRUE(client.send_request("POST", "/a", body));
    const auto response = client.read_response();
    ASSERT_TRUE(response);
    EXPECT_EQ(response->body, "POST /a " + body);
  }
  ASSERT_TRUE(client.send("GET /b HTTP/1.1\r\nHost: x\r\n\r\nGET /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));  // pipelined
  EXPECT_EQ(client.read_response()->body, "GET /b ");
  EXPECT_EQ(client.read_response()->body, "GET /c ");
  EXPECT_TRUE(client.at_clean_end()) << "an end that cannot be told from a cut";
}

TEST_F(Tls, DropsTheAnswerOfAClientThatLeaves) {
  start();
  {
    HttpClient client(port(), ClientTls{});
    ASSERT_TRUE(client.send_request("POST", "/endless", "{}"));
    ASSERT_TRUE(client.read_until("data: x"));
    EXPECT_EQ(alive_, 1);
  }
  while (alive_ != 0) std::this_thread::yield();
}

TEST_F(Tls, PlaintextIsToldToUseHttps) {
  start();
  const auto response = HttpClient::fetch(port(), "GET", "/a");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 400);
  EXPECT_THAT(response->body, HasSubstr("https://"));
  EXPECT_EQ(server_->stats().handshakes_failed, 1U);
  EXPECT_TRUE(is_answered({}));
}

TEST_F(Tls, AHalfOpenHandshakeHoldsUpNobodyAndEnds) {
  HttpOptions options;
  options.num_io_threads = 1;
  options.progress_timeout = std::chrono::milliseconds(500);
  start(options);
  HttpClient silent(port()), half(port());
  ASSERT_TRUE(half.send(std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11)));  // the beginning of a ClientHello
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(is_answered({}));
  EXPECT_TRUE(half.at_end());
}

TEST_F(Tls, AHalfOpenHandshakeDoesNotDelayTheEnd) {
  HttpOptions options;
  options.progress_timeout = std::chrono::hours(1);
  start(options);
  HttpClient half(port());
  ASSERT_TRUE(half.send(std::string_view("\x16\x03\x01\x02\x00\x01", 6)));
  while (server_->stats().connections == 0) std::this_thread::yield();
  server_->drain_and_stop(std::chrono::hours(1));
  EXPECT_TRUE(half.at_end());
}

TEST_F(Tls, GarbageEndsTheConnection) {
  start();
  for (const std::string_view bytes : {std::string_view("\x16\x03\x01\x00\x05hello", 10), std::string_view("\x80\x2e\x01", 3), std::string_view("\0\0", 2)}) {
    HttpClient client(port());
    client.send(bytes);
    client.finish_sending();
    while (client.read_until("never")) {
    }
  }
  EXPECT_TRUE(is_answered({}));
  EXPECT_EQ(server_->stats().handshakes_failed, 3U);
}

TEST_F(Tls, OldVersionsAreRefused) {
  start();
  EXPECT_FALSE(is_answered({.certificate_file = {}, .key_file = {}, .max_version = TLS1_1_VERSION}));
  EXPECT_TRUE(is_answered({.certificate_file = {}, .key_file = {}, .max_version = TLS1_2_VERSION}));
}

TEST_F(Tls, ChecksCertificatesOfClients) {
  const CertificateFiles authority = make_certificate(folder_.path(), "authority");
  const CertificateFiles friendly = make_certificate(folder_.path(), "friend", {.signer = &authority, .expired = false, .passphrase = {}});
  const CertificateFiles stranger = make_certificate(folder_.path(), "stranger");
  for (const bool required : {true, false}) {
    HttpOptions options;
    options.tls = server_tls();
    options.tls.ca_file = authority.certificate;
    options.tls.client_certificates = required ? ClientCertificates::kRequired : ClientCertificates::kOptional;
    start(options);
    EXPECT_TRUE(is_answered({friendly.certificate, friendly.key}));
    EXPECT_FALSE(is_answered({stranger.certificate, stranger.key}));
    EXPECT_EQ(is_answered({}), !required);
  }
}

TEST_F(Tls, ARenewedCertificateIsTakenAndABadOneIsNot) {
  start();
  HttpClient before(port(), ClientTls{});
  ASSERT_TRUE(before.connected());
  const std::string old_name = before.peer_name();
  EXPECT_EQ(old_name, "own");
  const CertificateFiles renewed = make_certificate(folder_.path(), "renewed");
  std::filesystem::copy_file(renewed.certificate, own_.certificate, std::filesystem::copy_options::overwrite_existing);
  EXPECT_FALSE(server_->reload_tls()) << "the key is still that of the old one";
  EXPECT_EQ(HttpClient(port(), ClientTls{}).peer_name(), "own");
  std::filesystem::copy_file(renewed.key, own_.key, std::filesystem::copy_options::overwrite_existing);
  ASSERT_OK(server_->reload_tls());
  EXPECT_EQ(HttpClient(port(), ClientTls{}).peer_name(), "renewed");
  ASSERT_TRUE(before.send_request("GET", "/still", ""));  // and those that are open go on
  EXPECT_TRUE(before.read_response());
}

TEST_F(Tls, ConnectionsOverTheLimitAreClosed) {
  HttpOptions options;
  options.max_connections = 1;
  start(options);
  HttpClient first(port(), ClientTls{});
  ASSERT_TRUE(first.connected());
  EXPECT_FALSE(HttpClient(port(), ClientTls{}).connected());
  EXPECT_EQ(server_->stats().refused, 1U);
}

TEST_F(Tls, BadFilesAreNamedWithWhatIsWrong) {
  TlsOptions options = server_tls();
  EXPECT_EQ(fault(options), "");
  options.certificate_file = folder_.path() / "missing.crt";
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-certfile"), HasSubstr("missing.crt")));
  options.certificate_file = folder_.path();
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-certfile"), HasSubstr("is a directory")));
  options.certificate_file = folder_.path() / "text";
  ASSERT_OK(write_file(options.certificate_file, "not a certificate"));
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-certfile"), HasSubstr("no certificate in PEM format")));
  options.certificate_file = own_.key;
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-certfile"), HasSubstr("no certificate in PEM format")));

  options = server_tls();
  options.key_file = folder_.path() / "missing.key";
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-keyfile"), HasSubstr("missing.key")));
  options.key_file = folder_.path() / "text";
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-keyfile"), HasSubstr("no private key in PEM format")));
  options.key_file = make_certificate(folder_.path(), "other").key;
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-keyfile"), HasSubstr("not that of the certificate")));
  const CertificateFiles locked = make_certificate(folder_.path(), "locked", {.signer = nullptr, .expired = false, .passphrase = "word"});
  options.certificate_file = locked.certificate;
  options.key_file = locked.key;
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-keyfile"), HasSubstr("encrypted")));

  options = server_tls();
  options.key_file.clear();
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-certfile"), HasSubstr("--ssl-keyfile names a file of its own")));
  const std::filesystem::path both = folder_.path() / "both.pem";
  ASSERT_OK(write_file(both, *read_file(own_.certificate) + *read_file(own_.key)));
  options.certificate_file = both;
  EXPECT_EQ(fault(options), "");

  options = server_tls();
  options.client_certificates = ClientCertificates::kRequired;
  EXPECT_THAT(fault(options), HasSubstr("--ssl-ca-certs"));
  options.ca_file = folder_.path() / "text";
  EXPECT_THAT(fault(options), AllOf(HasSubstr("--ssl-ca-certs"), HasSubstr("no certificate in PEM format")));
  EXPECT_EQ(fault({.certificate_file = make_certificate(folder_.path(), "old", {.signer = nullptr, .expired = true, .passphrase = {}}).certificate,
                   .key_file = folder_.path() / "old.key",
                   .ca_file = {}}),
            "");  // a warning
}

}  // namespace
}  // namespace quern::server
