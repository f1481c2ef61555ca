#include "server/http_server.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <thread>

#include "base/log.h"
#include "server/http_connection.h"
#include "server/listener.h"

// Listening, accepting and stopping; a connection is http_connection.h.

namespace quern::server {
namespace {

namespace asio = boost::asio;
using asio::awaitable;
using asio::redirect_error;
using asio::use_awaitable;
using boost::system::error_code;

class BeastServer final : public HttpServer {
 public:
  BeastServer(const HttpOptions& options, Handler handler, ErrorResponse error_response, Gate admit, Observer observer)
      : shared_(options), acceptor_(asio::make_strand(shared_.io.get_executor())) {
    shared_.handler = std::move(handler);
    shared_.error_response = std::move(error_response);
    shared_.admit = std::move(admit);
    shared_.observer = std::move(observer);
  }
  ~BeastServer() override { stop(); }

  Result<void> listen() {
    const HttpOptions& options = shared_.options;
    RETURN_IF_ERROR(reload_tls());
    ASSIGN_OR_RETURN(Listener listener, options.unix_socket.empty() ? Listener::tcp(options.host, options.port)
                                                                    : Listener::unix_socket(options.unix_socket));
    port_ = listener.port();
    error_code ec;
    acceptor_.assign(asio::generic::stream_protocol(listener.family(), 0), listener.release(), ec);
    if (ec) return make_error(ErrorCode::kInternal, "cannot use the listening socket: {}", ec.message());
    listener_.emplace(std::move(listener));
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

  Result<void> reload_tls() override {
    if (!shared_.options.tls.enabled()) return {};
    ASSIGN_OR_RETURN(TlsContext tls, make_tls_context(shared_.options.tls));
    shared_.tls = std::make_shared<asio::ssl::context>(tls.release());
    return {};
  }

  [[nodiscard]] HttpStats stats() const override {
    HttpStats stats{.accepted = shared_.accepted, .refused = shared_.refused, .handshakes_failed = shared_.handshakes_failed};
    const std::lock_guard lock(shared_.mutex);
    stats.connections = static_cast<int64_t>(shared_.connections.size());
    return stats;
  }

  void drain_and_stop(std::chrono::milliseconds timeout) override {
    shared_.draining = true;
    asio::post(acceptor_.get_executor(), [this] {
      error_code ignored;
      acceptor_.close(ignored);
    });
    std::vector<std::shared_ptr<HttpConnection>> connections;  // released without the lock, which the last owner takes
    {
      const std::lock_guard lock(shared_.mutex);
      for (HttpConnection* connection : shared_.connections) connections.push_back(connection->weak_from_this().lock());
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
      HttpStream::Socket socket(asio::make_strand(shared_.io.get_executor()));
      co_await acceptor_.async_accept(socket, redirect_error(use_awaitable, ec));
      if (!acceptor_.is_open()) co_return;
      if (ec) {  // out of file descriptors, most likely: let some connections end
        log_warning("cannot accept a connection: {}", ec.message());
        asio::basic_waitable_timer<std::chrono::steady_clock, asio::wait_traits<std::chrono::steady_clock>, HttpStream::Strand> pause(
            acceptor_.get_executor(), std::chrono::milliseconds(100));
        co_await pause.async_wait(redirect_error(use_awaitable, ec));
        continue;
      }
      const bool full = [this] {
        const std::lock_guard lock(shared_.mutex);
        return std::cmp_greater_equal(shared_.connections.size(), shared_.options.max_connections);
      }();
      if (full) {
        ++shared_.refused;
        if (shared_.options.tls.enabled()) continue;  // nothing can be said without a handshake
        const std::string text = render_response(shared_.error_response(503, "too many connections"), false, true);
        socket.non_blocking(true, ec);
        socket.write_some(asio::buffer(text), ec);  // a fresh socket has room for it
        continue;
      }
      ++shared_.accepted;
      std::make_shared<HttpConnection>(std::move(socket), shared_)->start();
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
    listener_.reset();
  }

  mutable HttpShared shared_;
  asio::basic_socket_acceptor<asio::generic::stream_protocol, HttpStream::Strand> acceptor_;
  std::optional<Listener> listener_;  // whose socket file it is
  uint16_t port_ = 0;
  std::vector<std::jthread> threads_;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpOptions& options, Handler handler, ErrorResponse error_response, Gate gate,
                                                      Observer observer) {
  auto server = std::make_unique<BeastServer>(options, std::move(handler), std::move(error_response), std::move(gate), std::move(observer));
  RETURN_IF_ERROR(server->listen());
  return Result<std::unique_ptr<HttpServer>>(std::move(server));
}

}  // namespace quern::server
