#include "server/http_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "http_client.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

/// Counts the answers that are alive, and lets a test wait for that number.
class Counter {
 public:
  void add(int amount) {
    {
      const std::lock_guard lock(mutex_);
      value_ += amount;
    }
    changed_.notify_all();
  }
  /// False after ten seconds.
  bool wait_for(int value) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return value_ == value; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int value_ = 0;
};

/// What the server has reported.
class Exchanges {
 public:
  void add(const HttpExchange& exchange) {
    {
      const std::lock_guard lock(mutex_);
      all_.push_back(exchange);
    }
    changed_.notify_all();
  }
  /// The first that `matches`; an empty one after ten seconds.
  template <class Predicate>
  HttpExchange wait_for(Predicate matches) {
    std::unique_lock lock(mutex_);
    HttpExchange found;
    changed_.wait_for(lock, std::chrono::seconds(10), [&] {
      const auto at = std::ranges::find_if(all_, matches);
      if (at == all_.end()) return false;
      found = *at;
      return true;
    });
    return found;
  }
  HttpExchange of_path(std::string_view path) {
    return wait_for([&](const HttpExchange& exchange) { return exchange.path == path; });
  }
  size_t size() {
    const std::lock_guard lock(mutex_);
    return all_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<HttpExchange> all_;
};

/// Never ready.
class EternalResponse final : public DeferredResponse {
 public:
  explicit EternalResponse(Counter& alive) : alive_(alive) { alive_.add(1); }
  ~EternalResponse() override { alive_.add(-1); }
  void on_ready(std::function<void()>) override {}
  std::optional<HttpResponse> poll() override { return std::nullopt; }

 private:
  Counter& alive_;
};

/// Ready as soon as another thread has come by.
class LaterResponse final : public DeferredResponse {
 public:
  void on_ready(std::function<void()> wake) override {
    thread_ = std::jthread([this, wake = std::move(wake)] {
      ready_ = true;
      wake();
    });
  }
  std::optional<HttpResponse> poll() override {
    if (!ready_) return std::nullopt;
    return HttpResponse{200, R"("later")"};
  }

 private:
  std::atomic<bool> ready_{false};
  std::jthread thread_;
};

/// `count` events of `size` bytes, always ready; then it waits for ever if told so.
class Flood final : public EventStream {
 public:
  Flood(Counter& alive, int count, size_t size, bool then_wait) : alive_(alive), left_(count), size_(size), then_wait_(then_wait) {
    alive_.add(1);
  }
  ~Flood() override { alive_.add(-1); }
  void on_ready(std::function<void()> wake) override { wake_ = std::move(wake); }
  bool read(std::string& out) override {
    if (left_ > 0) {
      --left_;
      bytes_given += size_;
      out += "data: " + std::string(size_, 'x') + "\n\n";
      wake_();
    }
    return left_ > 0 || then_wait_;
  }

  static inline std::atomic<size_t> bytes_given{0};  // by all of them

 private:
  Counter& alive_;
  int left_;
  size_t size_;
  bool then_wait_;
  std::function<void()> wake_;
};

class HttpServerTest : public ::testing::Test {
 protected:
  void start(HttpOptions options = {}, HttpServer::Gate gate = {}) {
    options.port = 0;
    auto server = HttpServer::start(
        options, [this](const HttpRequest& request) { return answer(request); },
        [](int status, std::string_view message) {
          return HttpResponse{status, fmt::format("{{\"error\":\"{}\"}}", message)};
        },
        std::move(gate), [this](const HttpExchange& exchange) { exchanges_.add(exchange); });
    ASSERT_OK(server);
    server_ = std::move(*server);
  }
  HttpAnswer answer(const HttpRequest& request) {
    if (request.path == "/eternal") return std::unique_ptr<DeferredResponse>(std::make_unique<EternalResponse>(alive_));
    if (request.path == "/later") return std::unique_ptr<DeferredResponse>(std::make_unique<LaterResponse>());
    if (request.path == "/stream") return std::unique_ptr<EventStream>(std::make_unique<Flood>(alive_, 10, 5, false));
    if (request.path == "/stream-and-wait") return std::unique_ptr<EventStream>(std::make_unique<Flood>(alive_, 1, 5, true));
    if (request.path == "/flood") return std::unique_ptr<EventStream>(std::make_unique<Flood>(alive_, 1 << 30, 65536, false));
    if (request.path == "/throw") throw std::bad_alloc();
    ++handled_;
    return HttpResponse{200, fmt::format("{} {} {} {}", request.method, request.path, request.query, request.body)};
  }
  std::optional<ClientResponse> get(std::string_view target) { return HttpClient::fetch(server_->port(), "GET", target); }
  /// What the server answers to these bytes on a connection of their own; its status, or 0 when it just closes.
  int status_of(std::string_view bytes) {
    HttpClient client(server_->port());
    client.send(bytes);
    const auto response = client.read_response();
    return response ? response->status : 0;
  }

  Counter alive_;
  Exchanges exchanges_;
  std::atomic<int> handled_{0};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersRequestsOnOneConnectionInOrder) {
  start();
  HttpClient client(server_->port());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.send_request("POST", fmt::format("/echo/{}?q={}", i, i), fmt::format("body {}", i)));
    const auto response = client.read_response();
    ASSERT_TRUE(response);
    EXPECT_EQ(response->status, 200);
    EXPECT_EQ(response->body, fmt::format("POST /echo/{} q={} body {}", i, i, i));
    EXPECT_EQ(response->header("connection"), "keep-alive");
  }
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrderAlsoBehindAStream) {
  start();
  HttpClient client(server_->port());
  std::string text;
  for (const char* path : {"/stream", "/a", "/later", "/b"}) text += fmt::format("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", path);
  ASSERT_TRUE(client.send(text));
  const auto stream = client.read_response(), a = client.read_response(), later = client.read_response(), b = client.read_response();
  ASSERT_TRUE(stream && a && later && b);
  EXPECT_EQ(stream->events().size(), 10U);
  EXPECT_EQ(stream->header("Content-Type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(a->body, "GET /a  ");
  EXPECT_EQ(later->body, R"("later")");
  EXPECT_EQ(b->body, "GET /b  ");
}

TEST_F(HttpServerTest, UnderstandsChunkedBodiesAndExpectContinue) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send("POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"));
  auto response = client.read_response();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->body, "POST /c  abcde");
  ASSERT_TRUE(client.send("POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"));
  ASSERT_TRUE(client.read_until("HTTP/1.1 100 Continue\r\n\r\n"));
  ASSERT_TRUE(client.send("wait"));
  response = client.read_response();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->body, "POST /e  wait");
}

TEST_F(HttpServerTest, HeadHasTheHeadersOfGetAndNoBody) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send_request("HEAD", "/x", ""));
  const auto head = client.read_response(true);
  ASSERT_TRUE(head);
  EXPECT_EQ(head->header("Content-Length"), std::to_string(std::string("HEAD /x  ").size()));
  ASSERT_TRUE(client.send_request("GET", "/y", ""));  // the next response begins right behind
  const auto get = client.read_response();
  ASSERT_TRUE(get);
  EXPECT_EQ(get->body, "GET /y  ");
}

TEST_F(HttpServerTest, Http10ClientsGetStreamsWithoutChunks) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send("GET /stream HTTP/1.0\r\n\r\n"));
  const auto response = client.read_response();
  ASSERT_TRUE(response);
  EXPECT_EQ(response->header("Transfer-Encoding"), "");
  EXPECT_EQ(response->events().size(), 10U);
}

TEST_F(HttpServerTest, RefusesAmbiguousFraming) {
  start();
  // What a proxy and we could read differently: a second request could hide in the difference.
  const std::string hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n";
  for (const char* headers :
       {"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n", "Content-Length: +5\r\n", "Content-Length: -1\r\n", "Content-Length: 5, 5\r\n",
        "Content-Length: 0x5\r\n", "Content-Length: 99999999999999999999999\r\n", "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: identity\r\n", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: xchunked\r\n", "Content-Length : 5\r\n"}) {
    EXPECT_EQ(status_of(fmt::format("POST /p HTTP/1.1\r\nHost: x\r\n{}\r\n0\r\n\r\n{}", headers, hidden)), 400) << headers;
  }
  EXPECT_EQ(status_of("POST /p HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\n\r\n"), 400) << "no Host";
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/9.9\r\nHost: x\r\n\r\n"), 400);
  EXPECT_EQ(handled_, 0);
}

TEST_F(HttpServerTest, RefusesWhatIsTooLargeAndTheClientCanReadWhy) {
  HttpOptions options;
  options.max_body_bytes = 1000;
  options.max_head_bytes = 4000;
  start(options);
  EXPECT_EQ(HttpClient::fetch(server_->port(), "POST", "/p", std::string(1000, 'a'))->status, 200);
  const auto large = HttpClient::fetch(server_->port(), "POST", "/p", std::string(3'000'000, 'a'));
  ASSERT_TRUE(large);
  EXPECT_EQ(large->status, 413);
  EXPECT_THAT(large->body, ::testing::HasSubstr("1000 bytes"));
  EXPECT_EQ(status_of(fmt::format("POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{}\r\n0\r\n\r\n", 2000,
                                  std::string(2000, 'a'))),
            413);
  EXPECT_EQ(HttpClient::fetch(server_->port(), "GET", "/p", "", "X: " + std::string(5000, 'a') + "\r\n")->status, 431);
}

TEST_F(HttpServerTest, DropsTheAnswerOfAClientThatLeaves) {
  start();
  for (const char* path : {"/eternal", "/stream-and-wait"}) {
    HttpClient client(server_->port());
    ASSERT_TRUE(client.send_request("POST", path, "{}"));
    ASSERT_TRUE(alive_.wait_for(1)) << path;
    client.close();
    EXPECT_TRUE(alive_.wait_for(0)) << path;
  }
}

TEST_F(HttpServerTest, NoticesAHangUpBehindAPipelinedRequest) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send_request("POST", "/eternal", "{}"));
  ASSERT_TRUE(alive_.wait_for(1));
  ASSERT_TRUE(client.send_request("GET", "/next", ""));
  client.close();
  EXPECT_TRUE(alive_.wait_for(0));
  EXPECT_EQ(handled_, 0);
}

TEST_F(HttpServerTest, DisconnectsAClientThatDoesNotRead) {
  HttpOptions options;
  options.progress_timeout = std::chrono::milliseconds(300);
  start(options);
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send_request("GET", "/flood", ""));
  ASSERT_TRUE(alive_.wait_for(1));
  EXPECT_TRUE(alive_.wait_for(0));
}

TEST_F(HttpServerTest, ClosesConnectionsThatStayIdleOrStopMidRequest) {
  HttpOptions options;
  options.idle_timeout = options.progress_timeout = std::chrono::milliseconds(200);
  start(options);
  HttpClient idle(server_->port()), half_head(server_->port()), half_body(server_->port());
  ASSERT_TRUE(half_head.send("GET / HT"));
  ASSERT_TRUE(half_body.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc"));
  EXPECT_TRUE(idle.at_end());
  for (HttpClient* half : {&half_head, &half_body}) {
    const auto response = half->read_response();
    ASSERT_TRUE(response);
    EXPECT_EQ(response->status, 408);
    EXPECT_THAT(response->body, ::testing::HasSubstr("within 0.2 s"));
    EXPECT_TRUE(half->at_end());
  }
}

TEST_F(HttpServerTest, AHandlerThatRunsOutOfMemoryCostsOneRequest) {
  start();
  EXPECT_EQ(HttpClient::fetch(server_->port(), "POST", "/throw", "x")->status, 500);
  EXPECT_EQ(get("/throw")->status, 500);
  EXPECT_EQ(get("/fine")->status, 200);
}

TEST_F(HttpServerTest, LimitsConnections) {
  HttpOptions options;
  options.max_connections = 2;
  start(options);
  HttpClient first(server_->port()), second(server_->port());
  ASSERT_TRUE(first.send_request("GET", "/a", "") && first.read_response());
  ASSERT_TRUE(second.send_request("GET", "/a", "") && second.read_response());
  HttpClient third(server_->port());
  const auto refused = third.read_response();
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 503);
}

TEST_F(HttpServerTest, SaysThatThePortIsInUseInOneSentence) {
  start();
  HttpOptions options;
  options.port = server_->port();
  const auto second = HttpServer::start(
      options, [](const HttpRequest&) { return HttpResponse{}; }, [](int status, std::string_view) { return HttpResponse{status}; });
  ASSERT_FALSE(second);
  EXPECT_EQ(
      second.error().message,
      fmt::format("cannot listen on 127.0.0.1:{}: the port is in use by another program; choose another with --port", server_->port()));
}

TEST_F(HttpServerTest, SaysThatAHostIsNotOfThisMachine) {
  HttpOptions options;
  options.host = "no.such.host.invalid";
  const auto server = HttpServer::start(
      options, [](const HttpRequest&) { return HttpResponse{}; }, [](int status, std::string_view) { return HttpResponse{status}; });
  ASSERT_FALSE(server);
  EXPECT_THAT(server.error().message, ::testing::HasSubstr("--host no.such.host.invalid"));
}

TEST_F(HttpServerTest, DrainingEndsIdleConnectionsAndLetsAnswersFinish) {
  start();
  HttpClient idle(server_->port()), busy(server_->port());
  ASSERT_TRUE(idle.send_request("GET", "/a", "") && idle.read_response());
  ASSERT_TRUE(busy.send_request("GET", "/flood", ""));
  ASSERT_TRUE(alive_.wait_for(1));
  std::jthread drain([&] { server_->drain_and_stop(std::chrono::seconds(20)); });
  EXPECT_TRUE(idle.at_end());
  EXPECT_TRUE(busy.read_until("data: "));  // still served
  busy.close();                            // the last connection: draining ends
  drain.join();
  EXPECT_TRUE(alive_.wait_for(0));
  EXPECT_FALSE(HttpClient(server_->port()).connected());
}

TEST_F(HttpServerTest, DrainingCutsOffWhatTakesLongerThanItsTimeout) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send_request("POST", "/eternal", "{}"));
  ASSERT_TRUE(alive_.wait_for(1));
  server_->drain_and_stop(std::chrono::milliseconds(50));
  server_.reset();
  EXPECT_TRUE(alive_.wait_for(0));
  EXPECT_TRUE(client.at_end());
}

TEST_F(HttpServerTest, ASlowReaderCostsABoundedBufferAndSlowsDownNobody) {
  HttpOptions options;
  options.num_io_threads = 1;
  options.progress_timeout = std::chrono::milliseconds(400);
  options.send_buffer_bytes = 64 << 10;
  start(options);
  Flood::bytes_given = 0;
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 4; ++i) {
    slow.push_back(std::make_unique<HttpClient>(server_->port()));
    ASSERT_TRUE(slow.back()->send_request("GET", "/flood", ""));
    ASSERT_TRUE(slow.back()->read_until("data: "));
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(get("/fast")->status, 200);
  EXPECT_TRUE(alive_.wait_for(0));  // all of them dropped
  // Most of it lies in the clients' own receive buffers, which Linux lets grow to 6 MB.
  EXPECT_LT(Flood::bytes_given, slow.size() * (size_t{8} << 20));
  const HttpExchange exchange = exchanges_.of_path("/flood");
  EXPECT_EQ(exchange.outcome, HttpOutcome::kClientSlow);
  EXPECT_EQ(exchange.status, 200);
  EXPECT_GT(exchange.bytes_sent, 0U);
}

TEST_F(HttpServerTest, AClientThatDripsItsBodyIsToldThatItIsTooSlow) {
  HttpOptions options;
  options.progress_timeout = std::chrono::milliseconds(300);
  start(options);
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send("POST /drip HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"));
  std::atomic<bool> answered{false};
  std::jthread drip([&] {
    while (!answered && client.send("x")) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  const auto response = client.read_response();
  answered = true;
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 408);
  EXPECT_EQ(exchanges_.of_path("/drip").outcome, HttpOutcome::kClientSlow);
  EXPECT_EQ(handled_, 0);
}

TEST_F(HttpServerTest, ALargeBodyThatMovesIsNotTooSlow) {
  HttpOptions options;
  options.progress_timeout = std::chrono::seconds(5);
  start(options);
  const std::string body(4'000'000, 'b');
  const auto response = HttpClient::fetch(server_->port(), "POST", "/large", body);
  ASSERT_TRUE(response);
  EXPECT_EQ(response->body.size(), body.size() + std::string("POST /large  ").size());
  EXPECT_EQ(exchanges_.of_path("/large").bytes_received, body.size());
}

TEST_F(HttpServerTest, LimitsTheNumberOfHeaders) {
  HttpOptions options;
  options.max_headers = 20;
  start(options);
  std::string headers;
  for (int i = 0; i < 19; ++i) headers += fmt::format("X-{}: a\r\n", i);
  EXPECT_EQ(HttpClient::fetch(server_->port(), "GET", "/p", "", headers)->status, 200);  // with Host: 20
  EXPECT_EQ(HttpClient::fetch(server_->port(), "GET", "/p", "", headers + "Y: a\r\n")->status, 431);
}

TEST_F(HttpServerTest, WhatTheGateRefusesIsNotRead) {
  const auto gate = [](const HttpRequest& request) -> std::optional<HttpResponse> {
    EXPECT_TRUE(request.body.empty());
    if (request.header("Key") == "good") return std::nullopt;
    return HttpResponse{401, "stranger"};
  };
  start({}, gate);
  EXPECT_EQ(HttpClient::fetch(server_->port(), "POST", "/p", "body", "Key: good\r\n")->body, "POST /p  body");
  const auto refused = HttpClient::fetch(server_->port(), "POST", "/q", std::string(20'000'000, 'a'));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 401);
  EXPECT_EQ(refused->header("Connection"), "close");
  EXPECT_EQ(exchanges_.of_path("/q").bytes_received, 0U);
  HttpClient waiting(server_->port());  // does not get to send it
  ASSERT_TRUE(waiting.send("POST /r HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"));
  ASSERT_TRUE(waiting.read_until("\r\n"));
  const auto told = waiting.read_response();
  ASSERT_TRUE(told);
  EXPECT_THAT(told->head, ::testing::StartsWith("HTTP/1.1 401"));
  HttpClient bodiless(server_->port());  // its connection can stay
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(bodiless.send_request("GET", "/s", ""));
    EXPECT_EQ(bodiless.read_response()->status, 401);
  }
  EXPECT_EQ(handled_, 1);
}

TEST_F(HttpServerTest, Http10KeepsAConnectionWhenAskedTo) {
  start();
  HttpClient client(server_->port());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(client.send("GET /ten HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
    const auto response = client.read_response();
    ASSERT_TRUE(response);
    EXPECT_EQ(response->header("Connection"), "keep-alive");
  }
  ASSERT_TRUE(client.send("GET /ten HTTP/1.0\r\n\r\n"));
  ASSERT_TRUE(client.read_response());
  EXPECT_TRUE(client.at_end());
}

TEST_F(HttpServerTest, ReportsEveryRequestOnceWithWhatBecameOfIt) {
  start();
  ASSERT_TRUE(HttpClient::fetch(server_->port(), "POST", "/complete?secret=1", "body"));
  const HttpExchange complete = exchanges_.of_path("/complete");
  EXPECT_EQ(complete.method, "POST");
  EXPECT_EQ(complete.status, 200);
  EXPECT_EQ(complete.outcome, HttpOutcome::kComplete);
  EXPECT_EQ(complete.bytes_received, 4U);
  EXPECT_GT(complete.bytes_sent, 50U);
  EXPECT_THAT(complete.client, ::testing::StartsWith("127.0.0.1:"));
  {
    HttpClient leaves(server_->port());
    ASSERT_TRUE(leaves.send_request("POST", "/eternal", "{}"));
    ASSERT_TRUE(alive_.wait_for(1));
  }
  EXPECT_EQ(exchanges_.of_path("/eternal").status, 499);
  EXPECT_EQ(exchanges_.of_path("/eternal").outcome, HttpOutcome::kClientLeft);
  {
    HttpClient leaves(server_->port());
    ASSERT_TRUE(leaves.send_request("GET", "/stream-and-wait", ""));
    ASSERT_TRUE(leaves.read_until("data: "));
  }
  EXPECT_EQ(exchanges_.of_path("/stream-and-wait").status, 200);
  EXPECT_EQ(exchanges_.of_path("/stream-and-wait").outcome, HttpOutcome::kClientLeft);
  EXPECT_EQ(status_of("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(exchanges_.wait_for([](const HttpExchange& e) { return e.status == 400; }).method, "");
  {
    HttpClient leaves(server_->port());
    ASSERT_TRUE(leaves.send("POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc"));
    leaves.finish_sending();
    EXPECT_TRUE(leaves.at_end());
  }
  EXPECT_EQ(exchanges_.of_path("/half").outcome, HttpOutcome::kClientLeft);
  EXPECT_EQ(exchanges_.size(), 5U);
}

TEST_F(HttpServerTest, ReportsWhatItCutOff) {
  start();
  HttpClient client(server_->port());
  ASSERT_TRUE(client.send_request("GET", "/stream-and-wait", ""));
  ASSERT_TRUE(client.read_until("data: "));
  server_->drain_and_stop(std::chrono::milliseconds(20));
  server_.reset();
  EXPECT_EQ(exchanges_.of_path("/stream-and-wait").outcome, HttpOutcome::kCutOff);
  EXPECT_EQ(exchanges_.size(), 1U);
}

TEST_F(HttpServerTest, ListensOnASocketFile) {
  const quern::testing::TemporaryFolder folder;
  HttpOptions options;
  options.unix_socket = (folder.path() / "socket").string();
  start(options);
  EXPECT_EQ(server_->port(), 0);
  HttpClient client(folder.path() / "socket");
  for (const char* path : {"/a", "/later"}) {
    ASSERT_TRUE(client.send_request("POST", path, "x"));
    ASSERT_TRUE(client.read_response());
  }
  EXPECT_EQ(exchanges_.of_path("/a").client, "unix");
  ASSERT_TRUE(client.send_request("POST", "/eternal", "{}"));
  ASSERT_TRUE(alive_.wait_for(1));
  client.close();
  EXPECT_TRUE(alive_.wait_for(0));  // a hang-up is seen here too
  server_->drain_and_stop(std::chrono::seconds(10));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "socket"));
}

TEST(PercentDecode, LeavesMalformedEscapesAlone) {
  EXPECT_EQ(percent_decode("/a%2Fb%20c"), "/a/b c");
  EXPECT_EQ(percent_decode("%"), "%");
  EXPECT_EQ(percent_decode("%4"), "%4");
  EXPECT_EQ(percent_decode("%zz%41"), "%zzA");
}

}  // namespace
}  // namespace quern::server
