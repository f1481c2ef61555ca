#pragma once

#include <array>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include "server/http_server.h"
#include "server/http_stream.h"

// Only this header, its source, http_stream.h and http_server.cpp include Asio and Beast; their exceptions end there.

namespace quern::server {

class HttpConnection;

/// Wakes may come from any thread at any time, also when the server is gone.
struct WakeGate {
  std::mutex mutex;
  bool open = true;
};

/// What connections share. Members are destroyed bottom up: the io_context, and with it every connection, goes first.
struct HttpShared {
  HttpOptions options;
  HttpServer::Handler handler;
  HttpServer::ErrorResponse error_response;
  HttpServer::Gate admit;
  HttpServer::Observer observer;
  std::atomic<std::shared_ptr<boost::asio::ssl::context>> tls;  // null: plain HTTP
  std::shared_ptr<WakeGate> gate = std::make_shared<WakeGate>();
  std::atomic<bool> draining{false};
  std::atomic<uint64_t> accepted{0}, refused{0}, handshakes_failed{0};
  std::mutex mutex;
  std::condition_variable connection_gone;
  std::unordered_set<HttpConnection*> connections;  // under mutex
  boost::asio::thread_pool handlers;
  boost::asio::io_context io;

  explicit HttpShared(const HttpOptions& o);
};

/// Head and body as they go over the wire.
std::string render_response(const HttpResponse& response, bool keep_alive, bool with_body);

/// One connection, from the handshake to its end: a coroutine on a strand of its own.
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(HttpStream::Socket socket, HttpShared& shared);
  ~HttpConnection();
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  void start();
  /// Any thread: an idle connection is closed, one with an answer under way after that answer.
  void drain();

 private:
  template <class T>
  using awaitable = boost::asio::awaitable<T>;
  using error_code = boost::system::error_code;
  using Clock = std::chrono::steady_clock;
  using Timer = boost::asio::basic_waitable_timer<Clock, boost::asio::wait_traits<Clock>, HttpStream::Strand>;
  using Self = std::shared_ptr<HttpConnection>;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  /// What happens when the deadline passes.
  enum class Phase {
    kIdle,     // between requests, or lingering: the connection ends
    kReceive,  // the request is answered with 408
    kSend,     // the connection ends: the client takes too little
  };

  awaitable<void> run(Self);
  awaitable<bool> handshake();
  awaitable<bool> serve_one();
  awaitable<bool> receive_body(Parser& parser);
  awaitable<bool> respond(bool keep_alive, bool http11);
  awaitable<bool> send_stream(EventStream& stream, bool chunked, bool keep_alive);
  awaitable<bool> send(const std::string& text);
  awaitable<void> refuse(error_code ec);
  awaitable<void> refuse(HttpResponse response);
  awaitable<void> linger();
  awaitable<void> watch_hang_up(Self, uint64_t watch);
  awaitable<void> watch_deadline(Self);
  awaitable<void> woken(Clock::time_point until = Clock::time_point::max());

  void take_head(const Parser::value_type& head);
  [[nodiscard]] HttpAnswer answer_request() const;
  void call_handler();
  std::function<void()> make_wake();
  void wake();
  void set_deadline(Phase phase, std::chrono::milliseconds timeout);
  void set_no_deadline() { deadline_ = Clock::time_point::max(); }
  void end_with(HttpOutcome outcome);
  void report();
  void close();

  HttpShared& shared_;
  HttpStream stream_;
  std::string client_;
  Timer wake_timer_, deadline_timer_, watch_timer_;
  boost::beast::flat_buffer buffer_;
  HttpRequest request_;
  std::optional<HttpAnswer> answer_;
  HttpExchange exchange_;                  // of the request at hand
  Clock::time_point begun_;                // and when its head was complete
  bool in_exchange_ = false;               // it is not reported yet
  Clock::time_point deadline_ = Clock::time_point::max();
  Phase phase_ = Phase::kIdle;
  uint64_t watch_id_ = 0;
  bool idle_ = true;  // between requests: nothing of the next one has arrived
  bool too_slow_ = false;  // the deadline of receiving has passed
  bool woken_ = false;
  bool closed_ = false;
};

}  // namespace quern::server
