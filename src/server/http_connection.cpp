#include "server/http_connection.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>

#include "base/log.h"

// Goals: thousands of idle or streaming connections on one or two threads; nothing a client does stalls another or costs more memory than
// its limits say; a client that leaves is noticed while its answer is made. Non-goals: HTTP/2 (a proxy in front does it), serving files.

namespace quern::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::redirect_error;
using asio::use_awaitable;

constexpr size_t kPiece = size_t{64} << 10;           // progress of a large body or response is watched in pieces of this size
constexpr std::chrono::milliseconds kLinger{2'000};   // how long unread input of a refused request is swallowed
constexpr std::chrono::milliseconds kHangUpPoll{50};  // looking for a hang-up behind unread, pipelined input
constexpr int kClientLeftStatus = 499;                // for the log only: nginx's number

std::string_view view(boost::beast::string_view text) { return {text.data(), text.size()}; }

std::string render_head(int status, std::string_view content_type, const std::vector<std::pair<std::string, std::string>>& headers,
                        bool keep_alive) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\nServer: quern\r\n", status, http_reason(status));
  if (!content_type.empty()) head += fmt::format("Content-Type: {}\r\n", content_type);
  for (const auto& [name, value] : headers) head += fmt::format("{}: {}\r\n", name, value);
  head += keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  return head;
}

std::string peer_name(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return fmt::format("{}:{}", ::inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size()), ntohs(v4.sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    return fmt::format("[{}]:{}", ::inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size()), ntohs(v6.sin6_port));
  }
  return "unix";
}

/// Two readers of one stream must agree where a request ends, or a second one can be smuggled through a proxy: what is ambiguous is
/// refused. Empty when the framing is clear.
std::string framing_fault(const http::request_parser<http::string_body>::value_type& head) {
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

}  // namespace

HttpShared::HttpShared(const HttpOptions& o)
    : options(o), handlers(static_cast<size_t>(std::max(o.num_handler_threads, 1))), io(std::max(o.num_io_threads, 1)) {}

std::string render_response(const HttpResponse& response, bool keep_alive, bool with_body) {
  const bool has_body = response.status != 204 && response.status != 304;
  std::string text = render_head(response.status, has_body ? response.content_type : "", response.headers, keep_alive);
  if (has_body) text += fmt::format("Content-Length: {}\r\n", response.body.size());
  text += "\r\n";
  if (with_body && has_body) text += response.body;
  return text;
}

HttpConnection::HttpConnection(HttpStream::Socket socket, HttpShared& shared)
    : shared_(shared),
      stream_(std::move(socket)),
      client_(peer_name(stream_.socket().native_handle())),
      wake_timer_(stream_.get_executor()),
      deadline_timer_(stream_.get_executor()),
      watch_timer_(stream_.get_executor()) {}

HttpConnection::~HttpConnection() {
  if (exchange_.outcome == HttpOutcome::kComplete) exchange_.outcome = HttpOutcome::kCutOff;
  report();
  const std::lock_guard lock(shared_.mutex);
  shared_.connections.erase(this);
  shared_.connection_gone.notify_all();
}

void HttpConnection::start() {
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.connections.insert(this);
  }
  error_code ignored;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);  // not of socket files
  stream_.socket().set_option(asio::socket_base::send_buffer_size(static_cast<int>(shared_.options.send_buffer_bytes)), ignored);
  set_deadline(Phase::kIdle, shared_.options.idle_timeout);
  asio::co_spawn(
      stream_.get_executor(), [self = shared_from_this()] { return self->watch_deadline(self); }, asio::detached);
  asio::co_spawn(
      stream_.get_executor(), [self = shared_from_this()] { return self->run(self); },
      [self = shared_from_this()](std::exception_ptr) { self->close(); });
}

void HttpConnection::drain() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    if (self->idle_) self->close();
  });
}

auto HttpConnection::run(Self) -> awaitable<void> {
  bool more = true;
  if (shared_.tls.load() != nullptr) more = co_await handshake();
  while (more && !closed_) {
    more = co_await serve_one();
    if (closed_ && exchange_.outcome == HttpOutcome::kComplete) exchange_.outcome = HttpOutcome::kClientLeft;
    report();
    answer_.reset();  // cancels what still runs
  }
  if (stream_.tls() && !closed_) {  // so that the client can tell the end from a cut
    set_deadline(Phase::kIdle, kLinger);
    error_code ec;
    co_await stream_.async_shutdown(redirect_error(use_awaitable, ec));
  }
  close();
}

/// False when the connection shall end.
auto HttpConnection::handshake() -> awaitable<bool> {
  constexpr unsigned char kTlsHandshake = 22;
  error_code ec;
  co_await stream_.socket().async_wait(asio::socket_base::wait_read, redirect_error(use_awaitable, ec));
  unsigned char first = 0;
  if (ec || closed_ || ::recv(stream_.socket().native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) co_return false;
  set_deadline(Phase::kIdle, shared_.options.progress_timeout);
  if (first != kTlsHandshake) {
    ++shared_.handshakes_failed;
    if (first >= 'A' && first <= 'Z') co_await refuse(shared_.error_response(400, "this port speaks TLS; use https://"));
    co_return false;
  }
  stream_.use_tls(*shared_.tls.load());  // OpenSSL counts who uses its context: a new one may take its place meanwhile
  co_await stream_.async_handshake(redirect_error(use_awaitable, ec));
  if (ec) {
    ++shared_.handshakes_failed;
    log_debug("{}: TLS handshake failed: {}", client_, ec.message());
    co_return false;
  }
  co_return true;
}

/// One request and its answer; false when the connection shall end.
auto HttpConnection::serve_one() -> awaitable<bool> {
  Parser parser;
  parser.header_limit(static_cast<uint32_t>(shared_.options.max_head_bytes));
  parser.body_limit(shared_.options.max_body_bytes);
  error_code ec;
  if (buffer_.size() == 0) {
    idle_ = true;
    if (shared_.draining) co_return false;
    set_deadline(Phase::kIdle, shared_.options.idle_timeout);
    const size_t received = co_await stream_.async_read_some(buffer_.prepare(4096), redirect_error(use_awaitable, ec));
    buffer_.commit(received);
    if (ec || closed_) co_return false;
  }
  idle_ = too_slow_ = false;
  set_deadline(Phase::kReceive, shared_.options.progress_timeout);
  co_await http::async_read_header(stream_, buffer_, parser, redirect_error(use_awaitable, ec));
  if (ec || too_slow_) {
    co_await refuse(ec);
    co_return false;
  }
  take_head(parser.get());
  if (request_.headers.size() > shared_.options.max_headers) {
    co_await refuse(shared_.error_response(431, fmt::format("the request has more than {} headers", shared_.options.max_headers)));
    co_return false;
  }
  if (const std::string fault = framing_fault(parser.get()); !fault.empty()) {
    co_await refuse(shared_.error_response(400, fault));
    co_return false;
  }
  std::optional<HttpResponse> refusal = shared_.admit ? shared_.admit(request_) : std::nullopt;
  if (refusal && !parser.is_done()) {
    co_await refuse(std::move(*refusal));
    co_return false;
  }
  if (!parser.is_done()) {
    const bool received = co_await receive_body(parser);
    if (!received) co_return false;
  }
  exchange_.bytes_received = request_.body.size();

  set_no_deadline();
  const uint64_t watch = ++watch_id_;
  asio::co_spawn(
      stream_.get_executor(), [self = shared_from_this(), watch] { return self->watch_hang_up(self, watch); }, asio::detached);
  if (refusal) {
    answer_ = std::move(*refusal);
  } else {
    call_handler();
  }
  while (!answer_ && !closed_) co_await woken();
  bool keep_alive = false;
  if (!closed_) keep_alive = co_await respond(parser.keep_alive(), parser.get().version() >= 11);
  ++watch_id_;  // the watch of this answer ends
  watch_timer_.cancel();
  if (closed_) co_return false;
  stream_.socket().cancel(ec);
  co_return keep_alive;
}

/// False when the connection shall end; the client has been told why.
auto HttpConnection::receive_body(Parser& parser) -> awaitable<bool> {
  if (equals_ignoring_case(request_.header("Expect"), "100-continue")) {
    const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    const bool sent = co_await send(go_on);
    if (!sent) co_return false;
  }
  error_code ec;
  set_deadline(Phase::kReceive, shared_.options.progress_timeout);
  for (size_t mark = 0; !parser.is_done();) {
    co_await http::async_read_some(stream_, buffer_, parser, redirect_error(use_awaitable, ec));
    if (ec || too_slow_) {
      co_await refuse(ec);
      co_return false;
    }
    if (parser.get().body().size() - mark < kPiece) continue;
    mark = parser.get().body().size();
    set_deadline(Phase::kReceive, shared_.options.progress_timeout);
  }
  request_.body = std::move(parser.get().body());
  co_return true;
}

/// Sends the answer; false when the connection shall end behind it.
auto HttpConnection::respond(bool keep_alive, bool http11) -> awaitable<bool> {
  keep_alive = keep_alive && !shared_.draining;
  if (auto* stream = std::get_if<std::unique_ptr<EventStream>>(&*answer_)) {
    exchange_.status = 200;
    keep_alive = keep_alive && http11;
    const bool sent = co_await send_stream(**stream, http11, keep_alive);
    co_return sent && keep_alive;
  }
  std::optional<HttpResponse> response;
  if (auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&*answer_)) {
    (*deferred)->on_ready(make_wake());
    while (!closed_ && !(response = (*deferred)->poll())) co_await woken((*deferred)->deadline());
    if (closed_) co_return false;
    keep_alive = keep_alive && !shared_.draining;
    response->headers.insert(response->headers.end(), (*deferred)->headers.begin(), (*deferred)->headers.end());
  } else {
    response = std::move(std::get<HttpResponse>(*answer_));
  }
  exchange_.status = response->status;
  const std::string text = render_response(*response, keep_alive, request_.method != "HEAD");
  const bool sent = co_await send(text);
  co_return sent && keep_alive;
}

auto HttpConnection::send_stream(EventStream& stream, bool chunked, bool keep_alive) -> awaitable<bool> {
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
      if (!sent) co_return false;
      text.clear();
    }
    if (more) co_await woken(stream.deadline());
    if (closed_) co_return false;
  }
  co_return true;
}

/// Writes all of `text`; false when the client is gone or takes too little.
auto HttpConnection::send(const std::string& text) -> awaitable<bool> {
  for (size_t begin = 0; begin < text.size() && !closed_; begin += kPiece) {
    set_deadline(Phase::kSend, shared_.options.progress_timeout);
    error_code ec;
    const asio::const_buffer piece = asio::buffer(text.data() + begin, std::min(kPiece, text.size() - begin));
    const size_t written = co_await asio::async_write(stream_, piece, redirect_error(use_awaitable, ec));
    exchange_.bytes_sent += written;
    if (ec && !closed_) end_with(HttpOutcome::kClientLeft);
  }
  set_no_deadline();
  co_return !closed_;
}

/// Answers a request that cannot be read further; the connection must end then.
auto HttpConnection::refuse(error_code ec) -> awaitable<void> {
  if (closed_) co_return;
  const HttpOptions& options = shared_.options;
  if (too_slow_) {
    co_await refuse(shared_.error_response(408, fmt::format("the request did not arrive within {:g} s", options.progress_timeout.count() / 1e3)));
  } else if (ec == http::error::body_limit) {
    co_await refuse(shared_.error_response(413, fmt::format("the request body is larger than the limit of {} bytes", options.max_body_bytes)));
  } else if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
    co_await refuse(shared_.error_response(431, fmt::format("the request's headers are larger than the limit of {} bytes", options.max_head_bytes)));
  } else if (ec != http::error::end_of_stream && ec != http::error::partial_message &&
             ec.category() == http::make_error_code(http::error::bad_method).category()) {
    co_await refuse(shared_.error_response(400, fmt::format("malformed HTTP request: {}", ec.message())));
  }
}
auto HttpConnection::refuse(HttpResponse response) -> awaitable<void> {
  if (!in_exchange_) {  // not even its head was readable
    exchange_ = HttpExchange{};
    exchange_.facts = std::make_shared<RequestFacts>();
    begun_ = Clock::now();
    in_exchange_ = true;
  }
  exchange_.status = response.status;
  const std::string text = render_response(response, false, request_.method != "HEAD");
  const bool sent = co_await send(text);
  if (!sent) co_return;
  report();
  co_await linger();
}

/// Closing with unread input would reset the connection and could take the response with it.
auto HttpConnection::linger() -> awaitable<void> {
  error_code ec;
  if (!stream_.tls()) stream_.socket().shutdown(asio::socket_base::shutdown_send, ec);
  set_deadline(Phase::kIdle, kLinger);
  std::array<char, 16384> sink;
  while (!ec && !closed_) co_await stream_.async_read_some(asio::buffer(sink), redirect_error(use_awaitable, ec));
  close();
}

void HttpConnection::take_head(const Parser::value_type& head) {
  request_ = HttpRequest{};
  request_.method = view(head.method_string());
  std::string_view target = view(head.target());
  if (const size_t scheme = target.find("://"); !target.starts_with('/') && scheme != std::string_view::npos) {
    const size_t path = target.find('/', scheme + 3);  // absolute form, as sent to proxies
    target = path == std::string_view::npos ? "/" : target.substr(path);
  }
  if (const size_t question = target.find('?'); question != std::string_view::npos) {
    request_.query = target.substr(question + 1);
    target = target.substr(0, question);
  }
  request_.path = percent_decode(target);
  for (const auto& field : head) request_.headers.emplace_back(view(field.name_string()), view(field.value()));
  exchange_ = HttpExchange{};
  exchange_.method = request_.method;
  exchange_.path = request_.path;
  exchange_.facts = request_.facts;
  begun_ = Clock::now();
  in_exchange_ = true;
}

HttpAnswer HttpConnection::answer_request() const {
  try {
    return shared_.handler(request_);
  } catch (const std::exception& e) {  // std::bad_alloc of an enormous request
    log_error("{} {}: {}", request_.method, request_.path, e.what());
    return shared_.error_response(500, "internal error");
  }
}

void HttpConnection::call_handler() {
  if (request_.body.empty()) {  // a probe or a scrape must not wait for other people's prompts
    answer_ = answer_request();
    return;
  }
  asio::post(shared_.handlers, [self = shared_from_this()]() mutable {
    HttpAnswer answer = self->answer_request();
    HttpConnection& connection = *self;
    asio::post(connection.stream_.get_executor(), [owner = std::move(self), ready = std::move(answer)]() mutable {
      if (owner->closed_) return;  // dropping the answer cancels it
      owner->answer_ = std::move(ready);
      owner->wake();
    });
  });
}

/// Ends the connection when the peer hangs up while an answer is being made.
auto HttpConnection::watch_hang_up(Self, uint64_t watch) -> awaitable<void> {
  while (watch == watch_id_ && !closed_) {
    error_code ec;
    co_await stream_.socket().async_wait(asio::socket_base::wait_read, redirect_error(use_awaitable, ec));
    if (ec || watch != watch_id_ || closed_) co_return;
    pollfd state{stream_.socket().native_handle(), POLLRDHUP, 0};
    if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
      end_with(HttpOutcome::kClientLeft);
      co_return;
    }
    // Input of a pipelined request; it stays where it is until its turn.
    watch_timer_.expires_after(kHangUpPoll);
    co_await watch_timer_.async_wait(redirect_error(use_awaitable, ec));
  }
}

/// Acts when the deadline passes. The timer may run before the deadline, never after it.
auto HttpConnection::watch_deadline(Self) -> awaitable<void> {
  while (!closed_) {
    const Clock::time_point now = Clock::now();
    error_code ec;
    if (now >= deadline_) {
      if (phase_ != Phase::kReceive) {
        end_with(phase_ == Phase::kSend ? HttpOutcome::kClientSlow : HttpOutcome::kClientLeft);
        co_return;
      }
      exchange_.outcome = HttpOutcome::kClientSlow;
      too_slow_ = true;
      set_no_deadline();
      stream_.socket().cancel(ec);  // whoever reads wakes up
    }
    deadline_timer_.expires_at(std::min(deadline_, now + shared_.options.progress_timeout));
    co_await deadline_timer_.async_wait(redirect_error(use_awaitable, ec));
  }
}

void HttpConnection::set_deadline(Phase phase, std::chrono::milliseconds timeout) {
  phase_ = phase;
  deadline_ = Clock::now() + timeout;
  if (deadline_ < deadline_timer_.expiry()) deadline_timer_.cancel();
}

/// A wake that may be called on any thread, also when this connection or the server is gone.
std::function<void()> HttpConnection::make_wake() {
  auto pending = std::make_shared<std::atomic<bool>>(false);
  return [gate = shared_.gate, weak = weak_from_this(), pending] {
    if (pending->exchange(true)) return;
    const std::lock_guard lock(gate->mutex);
    if (!gate->open) return;
    // The posted function takes the reference along: a connection never ends on the thread of its waker.
    if (Self self = weak.lock()) {
      HttpConnection& connection = *self;
      asio::post(connection.stream_.get_executor(), [owner = std::move(self), pending] {
        pending->store(false);
        owner->wake();
      });
    }
  };
}

void HttpConnection::wake() {
  woken_ = true;
  wake_timer_.cancel();
}

auto HttpConnection::woken(Clock::time_point until) -> awaitable<void> {
  if (!woken_ && !closed_) {
    wake_timer_.expires_at(until);
    error_code ec;
    co_await wake_timer_.async_wait(redirect_error(use_awaitable, ec));
  }
  woken_ = false;
}

void HttpConnection::end_with(HttpOutcome outcome) {
  exchange_.outcome = outcome;
  close();
}

/// Tells the observer of the request at hand, once.
void HttpConnection::report() {
  if (!in_exchange_) return;
  in_exchange_ = false;
  if (!shared_.observer) return;
  if (exchange_.status == 0) {
    exchange_.status = kClientLeftStatus;
    if (exchange_.outcome == HttpOutcome::kComplete) exchange_.outcome = HttpOutcome::kClientLeft;
  }
  exchange_.client = client_;
  exchange_.seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  if (answer_ && request_.facts) {
    if (const auto* stream = std::get_if<std::unique_ptr<EventStream>>(&*answer_)) (*stream)->describe(*request_.facts);
    if (const auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&*answer_)) (*deferred)->describe(*request_.facts);
  }
  shared_.observer(exchange_);
}

void HttpConnection::close() {
  if (closed_) return;
  closed_ = true;
  error_code ignored;
  stream_.socket().shutdown(asio::socket_base::shutdown_both, ignored);
  stream_.socket().close(ignored);
  wake_timer_.cancel();
  deadline_timer_.cancel();
  watch_timer_.cancel();
}

}  // namespace quern::server
