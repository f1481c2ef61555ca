#include "server/http_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "base/log.h"

// Goals: thousands of idle or streaming connections on one or two threads; nothing a client does stalls another; a client that leaves
// is noticed while its answer is made. Non-goals: HTTP/2 and TLS (a proxy in front does both), serving files.
//
// One coroutine per connection, on a strand of its own; the only file that includes Asio and Beast, and where their exceptions end.

namespace quern::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::awaitable;
using asio::redirect_error;
using asio::use_awaitable;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
using Strand = asio::strand<asio::io_context::executor_type>;
using StrandSocket = asio::basic_stream_socket<tcp, Strand>;
using StrandTimer = asio::basic_waitable_timer<Clock, asio::wait_traits<Clock>, Strand>;

constexpr size_t kWritePiece = size_t{256} << 10;     // progress of a large response is watched in pieces of this size
constexpr std::chrono::milliseconds kLinger{2'000};   // how long unread input of a refused request is swallowed
constexpr std::chrono::milliseconds kHangUpPoll{50};  // looking for a hang-up behind unread, pipelined input

class Connection;

/// Wakes may come from any thread at any time, also when the server is gone.
struct WakeGate {
  std::mutex mutex;
  bool open = true;
};

/// What connections share. Members are destroyed bottom up: the io_context, and with it every connection, goes first.
struct Shared {
  HttpOptions options;
  HttpServer::Handler handler;
  HttpServer::ErrorResponse error_response;
  std::shared_ptr<WakeGate> gate = std::make_shared<WakeGate>();
  std::atomic<bool> draining{false};
  std::mutex mutex;
  std::condition_variable connection_gone;
  std::unordered_set<Connection*> connections;  // under mutex
  asio::thread_pool handlers;
  asio::io_context io;

  explicit Shared(const HttpOptions& o)
      : options(o), handlers(static_cast<size_t>(std::max(o.num_handler_threads, 1))), io(std::max(o.num_io_threads, 1)) {}
};

std::string render_head(int status, std::string_view content_type, const std::vector<std::pair<std::string, std::string>>& headers,
                        bool keep_alive) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\nServer: quern\r\n", status, http_reason(status));
  if (!content_type.empty()) head += fmt::format("Content-Type: {}\r\n", content_type);
  for (const auto& [name, value] : headers) head += fmt::format("{}: {}\r\n", name, value);
  head += keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  return head;
}

std::string render_response(const HttpResponse& response, bool keep_alive, bool with_body) {
  std::string text = render_head(response.status, response.status == 204 ? "" : response.content_type, response.headers, keep_alive);
  if (response.status != 204) text += fmt::format("Content-Length: {}\r\n", response.body.size());
  text += "\r\n";
  if (with_body && response.status != 204) text += response.body;
  return text;
}

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(StrandSocket socket, Shared& shared)
      : shared_(shared),
        socket_(std::move(socket)),
        wake_timer_(socket_.get_executor()),
        deadline_timer_(socket_.get_executor()),
        watch_timer_(socket_.get_executor()) {}
  ~Connection() {
    const std::lock_guard lock(shared_.mutex);
    shared_.connections.erase(this);
    shared_.connection_gone.notify_all();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start() {
    {
      const std::lock_guard lock(shared_.mutex);
      shared_.connections.insert(this);
    }
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    deadline_ = Clock::now() + shared_.options.idle_timeout;
    asio::co_spawn(
        socket_.get_executor(), [self = shared_from_this()] { return self->watch_deadline(self); }, asio::detached);
    asio::co_spawn(
        socket_.get_executor(), [self = shared_from_this()] { return self->run(self); },
        [self = shared_from_this()](std::exception_ptr) { self->close(); });
  }

  /// Any thread: an idle connection is closed, one with an answer under way after that answer.
  void drain() {
    asio::post(socket_.get_executor(), [self = shared_from_this()] {
      if (self->idle_) self->close();
    });
  }

 private:
  using Self = std::shared_ptr<Connection>;
  using Parser = http::request_parser<http::string_body>;

  awaitable<void> run(Self) {
    bool more = true;
    while (more && !closed_) more = co_await serve_one();
    close();
  }

  /// One request and its answer; false when the connection shall end.
  awaitable<bool> serve_one() {
    Parser parser;
    parser.header_limit(static_cast<uint32_t>(shared_.options.max_head_bytes));
    parser.body_limit(shared_.options.max_body_bytes);
    error_code ec;
    idle_ = buffer_.size() == 0;
    if (idle_ && shared_.draining) co_return false;
    set_deadline(shared_.options.idle_timeout);
    co_await http::async_read_header(socket_, buffer_, parser, redirect_error(use_awaitable, ec));
    idle_ = false;
    if (ec) {
      co_await refuse(ec);
      co_return false;
    }
    const std::string framing_fault = check_framing(parser.get());
    if (!framing_fault.empty()) {
      co_await refuse(400, framing_fault);
      co_return false;
    }
    if (!parser.is_done() && equals_ignoring_case(view(parser.get()[http::field::expect]), "100-continue")) {
      const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
      if (!co_await send(go_on)) co_return false;
    }
    while (!parser.is_done()) {
      set_deadline(shared_.options.progress_timeout);
      co_await http::async_read_some(socket_, buffer_, parser, redirect_error(use_awaitable, ec));
      if (ec) {
        co_await refuse(ec);
        co_return false;
      }
    }
    const bool http11 = parser.get().version() >= 11;
    bool keep_alive = parser.keep_alive();
    take_request(parser);

    set_no_deadline();
    const uint64_t watch = ++watch_id_;
    asio::co_spawn(
        socket_.get_executor(), [self = shared_from_this(), watch] { return self->watch_hang_up(self, watch); }, asio::detached);
    call_handler();
    while (!answer_ && !closed_) co_await woken();
    if (closed_) co_return false;
    HttpAnswer answer = std::move(*answer_);
    answer_.reset();
    keep_alive = keep_alive && !shared_.draining;
    if (auto* stream = std::get_if<std::unique_ptr<EventStream>>(&answer)) {
      keep_alive = keep_alive && http11;
      co_await send_stream(**stream, http11, keep_alive);
    } else {
      if (auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&answer)) {
        std::optional<HttpResponse> response;
        (*deferred)->on_ready(make_wake());
        while (!closed_ && !(response = (*deferred)->poll())) co_await woken();
        if (closed_) co_return false;
        keep_alive = keep_alive && !shared_.draining;
        response->headers.insert(response->headers.end(), (*deferred)->headers.begin(), (*deferred)->headers.end());
        answer = std::move(*response);
      }
      const std::string text = render_response(std::get<HttpResponse>(answer), keep_alive, request_.method != "HEAD");
      co_await send(text);
    }
    ++watch_id_;  // the watch of this answer ends
    watch_timer_.cancel();
    if (closed_) co_return false;
    socket_.cancel(ec);
    co_return keep_alive;
  }

  awaitable<void> send_stream(EventStream& stream, bool chunked, bool keep_alive) {
    std::string text = render_head(200, "text/event-stream; charset=utf-8", stream.headers, keep_alive);
    text += "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
    text += chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
    stream.on_ready(make_wake());
    std::string events;
    for (bool more = true; more;) {
      events.clear();
      more = stream.read(events);
      if (chunked && !events.empty()) {
        text += fmt::format("{:x}\r\n", events.size());
        text += events;
        text += "\r\n";
      } else {
        text += events;
      }
      if (chunked && !more) text += "0\r\n\r\n";
      if (!text.empty()) {
        const bool sent = co_await send(text);
        if (!sent) co_return;
        text.clear();
      }
      if (more) co_await woken();
      if (closed_) co_return;
    }
  }

  /// Writes all of `text`; false when the client is gone or takes nothing for the progress timeout.
  awaitable<bool> send(const std::string& text) {
    for (size_t begin = 0; begin < text.size() && !closed_; begin += kWritePiece) {
      set_deadline(shared_.options.progress_timeout);
      error_code ec;
      const asio::const_buffer piece = asio::buffer(text.data() + begin, std::min(kWritePiece, text.size() - begin));
      co_await asio::async_write(socket_, piece, redirect_error(use_awaitable, ec));
      if (ec) close();
    }
    set_no_deadline();
    co_return !closed_;
  }

  /// Answers a request that cannot be read further; the connection must end then.
  awaitable<void> refuse(error_code ec) {
    if (ec == http::error::body_limit) {
      co_await refuse(413, fmt::format("the request body is larger than the limit of {} bytes", shared_.options.max_body_bytes));
    } else if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
      co_await refuse(431, fmt::format("the request's headers are larger than the limit of {} bytes", shared_.options.max_head_bytes));
    } else if (ec != http::error::end_of_stream && ec != http::error::partial_message &&
               ec.category() == http::make_error_code(http::error::bad_method).category()) {
      co_await refuse(400, fmt::format("malformed HTTP request: {}", ec.message()));
    }
  }
  awaitable<void> refuse(int status, std::string message) {
    const std::string text = render_response(shared_.error_response(status, message), false, true);
    const bool sent = co_await send(text);
    if (!sent) co_return;
    // Closing with unread input would reset the connection and could take the response with it.
    error_code ec;
    socket_.shutdown(tcp::socket::shutdown_send, ec);
    set_deadline(kLinger);
    std::array<char, 16384> sink;
    while (!ec && !closed_) co_await socket_.async_read_some(asio::buffer(sink), redirect_error(use_awaitable, ec));
  }

  /// Two readers of one stream must agree where a request ends, or a second one can be smuggled through a proxy: what is ambiguous is
  /// refused.
  static std::string check_framing(const Parser::value_type& head) {
    const auto count = [&](http::field field) {
      const auto range = head.equal_range(field);
      return std::distance(range.first, range.second);
    };
    const auto transfer_encodings = count(http::field::transfer_encoding);
    if (transfer_encodings > 0) {
      if (count(http::field::content_length) > 0) return "both Content-Length and Transfer-Encoding are given";
      if (transfer_encodings > 1 || !equals_ignoring_case(view(head[http::field::transfer_encoding]), "chunked") || head.version() < 11) {
        return "the only supported Transfer-Encoding is chunked, with HTTP/1.1";
      }
    }
    if (count(http::field::content_length) > 1 ||
        view(head[http::field::content_length]).find_first_not_of("0123456789") != std::string_view::npos) {
      return "Content-Length has to be one number";
    }
    if (head.version() >= 11 && count(http::field::host) != 1) return "an HTTP/1.1 request needs exactly one Host header";
    return {};
  }

  static std::string_view view(boost::beast::string_view text) { return {text.data(), text.size()}; }

  void take_request(Parser& parser) {
    auto message = parser.release();
    request_ = HttpRequest{};
    request_.method = view(message.method_string());
    std::string_view target = view(message.target());
    if (const size_t scheme = target.find("://"); !target.starts_with('/') && scheme != std::string_view::npos) {
      const size_t path = target.find('/', scheme + 3);  // absolute form, as sent to proxies
      target = path == std::string_view::npos ? "/" : target.substr(path);
    }
    if (const size_t question = target.find('?'); question != std::string_view::npos) {
      request_.query = target.substr(question + 1);
      target = target.substr(0, question);
    }
    request_.path = percent_decode(target);
    for (const auto& field : message) request_.headers.emplace_back(view(field.name_string()), view(field.value()));
    request_.body = std::move(message.body());
  }

  HttpAnswer answer_request() const {
    try {
      return shared_.handler(request_);
    } catch (const std::exception& e) {  // std::bad_alloc of an enormous request
      log_error("{} {}: {}", request_.method, request_.path, e.what());
      return shared_.error_response(500, "internal error");
    }
  }

  void call_handler() {
    if (request_.body.empty()) {  // a probe or a scrape must not wait for other people's prompts
      answer_ = answer_request();
      return;
    }
    asio::post(shared_.handlers, [self = shared_from_this()]() mutable {
      HttpAnswer answer = self->answer_request();
      Connection& connection = *self;
      asio::post(connection.socket_.get_executor(), [owner = std::move(self), ready = std::move(answer)]() mutable {
        if (owner->closed_) return;  // dropping the answer cancels it
        owner->answer_ = std::move(ready);
        owner->wake();
      });
    });
  }

  /// Ends the connection when the peer hangs up while an answer is being made.
  awaitable<void> watch_hang_up(Self, uint64_t watch) {
    while (watch == watch_id_ && !closed_) {
      error_code ec;
      co_await socket_.async_wait(tcp::socket::wait_read, redirect_error(use_awaitable, ec));
      if (ec || watch != watch_id_ || closed_) co_return;
      pollfd state{socket_.native_handle(), POLLRDHUP, 0};
      if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
        close();
        co_return;
      }
      // Input of a pipelined request; it stays where it is until its turn.
      watch_timer_.expires_after(kHangUpPoll);
      co_await watch_timer_.async_wait(redirect_error(use_awaitable, ec));
    }
  }

  /// Ends the connection when the deadline passes. The timer may run before the deadline, never after it.
  awaitable<void> watch_deadline(Self) {
    while (!closed_) {
      const Clock::time_point now = Clock::now();
      if (now >= deadline_) {
        close();
        co_return;
      }
      deadline_timer_.expires_at(std::min(deadline_, now + shared_.options.progress_timeout));
      error_code ec;
      co_await deadline_timer_.async_wait(redirect_error(use_awaitable, ec));
    }
  }
  void set_deadline(std::chrono::milliseconds timeout) {
    deadline_ = Clock::now() + timeout;
    if (deadline_ < deadline_timer_.expiry()) deadline_timer_.cancel();
  }
  void set_no_deadline() { deadline_ = Clock::time_point::max(); }

  /// A wake that may be called on any thread, also when this connection or the server is gone.
  std::function<void()> make_wake() {
    auto pending = std::make_shared<std::atomic<bool>>(false);
    return [gate = shared_.gate, weak = weak_from_this(), pending] {
      if (pending->exchange(true)) return;
      const std::lock_guard lock(gate->mutex);
      if (!gate->open) return;
      // The posted function takes the reference along: a connection never ends on the thread of its waker.
      if (Self self = weak.lock()) {
        Connection& connection = *self;
        asio::post(connection.socket_.get_executor(), [owner = std::move(self), pending] {
          pending->store(false);
          owner->wake();
        });
      }
    };
  }
  void wake() {
    woken_ = true;
    wake_timer_.cancel();
  }
  awaitable<void> woken() {
    if (!woken_ && !closed_) {
      wake_timer_.expires_at(Clock::time_point::max());
      error_code ec;
      co_await wake_timer_.async_wait(redirect_error(use_awaitable, ec));
    }
    woken_ = false;
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_both, ignored);
    socket_.close(ignored);
    wake_timer_.cancel();
    deadline_timer_.cancel();
    watch_timer_.cancel();
  }

  Shared& shared_;
  StrandSocket socket_;
  StrandTimer wake_timer_, deadline_timer_, watch_timer_;
  boost::beast::flat_buffer buffer_;
  HttpRequest request_;
  std::optional<HttpAnswer> answer_;
  Clock::time_point deadline_ = Clock::time_point::max();
  uint64_t watch_id_ = 0;
  bool idle_ = true;  // between requests: nothing of the next one has arrived
  bool woken_ = false;
  bool closed_ = false;
};

class BeastServer final : public HttpServer {
 public:
  BeastServer(const HttpOptions& options, Handler handler, ErrorResponse error_response)
      : shared_(options), acceptor_(asio::make_strand(shared_.io.get_executor())) {
    shared_.handler = std::move(handler);
    shared_.error_response = std::move(error_response);
  }
  ~BeastServer() override { stop(); }

  Result<void> listen() {
    const HttpOptions& options = shared_.options;
    error_code ec;
    tcp::resolver resolver(shared_.io);
    const auto endpoints = resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, ec);
    if (ec || endpoints.empty()) return invalid_argument("--host {}: not an address of this machine ({})", options.host, ec.message());
    const tcp::endpoint endpoint = endpoints.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
    if (ec == asio::error::address_in_use) {
      return invalid_argument("cannot listen on {}:{}: the port is in use by another program; choose another with --port", options.host,
                              options.port);
    }
    if (ec) return invalid_argument("cannot listen on {}:{}: {}", options.host, options.port, ec.message());
    port_ = acceptor_.local_endpoint(ec).port();
    asio::co_spawn(
        acceptor_.get_executor(), [this] { return accept(); }, asio::detached);
    for (int32_t i = 0; i < std::max(options.num_io_threads, 1); ++i) {
      threads_.emplace_back([this, i] {
        pthread_setname_np(pthread_self(), fmt::format("quern-http-{}", i).c_str());
        shared_.io.run();
      });
    }
    return {};
  }

  [[nodiscard]] uint16_t port() const override { return port_; }

  void drain_and_stop(std::chrono::milliseconds timeout) override {
    shared_.draining = true;
    asio::post(acceptor_.get_executor(), [this] {
      error_code ignored;
      acceptor_.close(ignored);
    });
    std::vector<std::shared_ptr<Connection>> connections;  // released without the lock, which the last owner takes
    {
      const std::lock_guard lock(shared_.mutex);
      for (Connection* connection : shared_.connections) connections.push_back(connection->weak_from_this().lock());
    }
    for (const auto& connection : connections) {
      if (connection) connection->drain();  // null: on its way out
    }
    connections.clear();
    {
      std::unique_lock lock(shared_.mutex);
      shared_.connection_gone.wait_for(lock, timeout, [&] { return shared_.connections.empty(); });
    }
    stop();
  }

 private:
  awaitable<void> accept() {
    while (acceptor_.is_open()) {
      error_code ec;
      StrandSocket socket(asio::make_strand(shared_.io.get_executor()));
      co_await acceptor_.async_accept(socket, redirect_error(use_awaitable, ec));
      if (!acceptor_.is_open()) co_return;
      if (ec) {  // out of file descriptors, most likely: let some connections end
        log_warning("cannot accept a connection: {}", ec.message());
        StrandTimer pause(acceptor_.get_executor(), std::chrono::milliseconds(100));
        co_await pause.async_wait(redirect_error(use_awaitable, ec));
        continue;
      }
      const bool full = [this] {
        const std::lock_guard lock(shared_.mutex);
        return std::cmp_greater_equal(shared_.connections.size(), shared_.options.max_connections);
      }();
      if (full) {
        const std::string text = render_response(shared_.error_response(503, "too many connections"), false, true);
        socket.non_blocking(true, ec);
        socket.write_some(asio::buffer(text), ec);  // a fresh socket has room for it
        continue;
      }
      std::make_shared<Connection>(std::move(socket), shared_)->start();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(shared_.gate->mutex);
      shared_.gate->open = false;
    }
    shared_.io.stop();
    threads_.clear();
    shared_.handlers.join();
  }

  Shared shared_;
  asio::basic_socket_acceptor<tcp, Strand> acceptor_;
  uint16_t port_ = 0;
  std::vector<std::jthread> threads_;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpOptions& options, Handler handler, ErrorResponse error_response) {
  auto server = std::make_unique<BeastServer>(options, std::move(handler), std::move(error_response));
  RETURN_IF_ERROR(server->listen());
  return Result<std::unique_ptr<HttpServer>>(std::move(server));
}

}  // namespace quern::server
