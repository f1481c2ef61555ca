#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/strand.hpp>
#include <memory>
#include <utility>

namespace quern::server {

/// The bytes of one connection: over TCP or a socket file, plain or through TLS. Models Asio's AsyncReadStream and AsyncWriteStream. All of
/// it runs on the connection's strand.
class HttpStream {
 public:
  using Strand = boost::asio::strand<boost::asio::io_context::executor_type>;
  using Socket = boost::asio::basic_stream_socket<boost::asio::generic::stream_protocol, Strand>;
  using executor_type = Strand;

  explicit HttpStream(Socket socket) : socket_(std::move(socket)) {}

  /// From here on everything goes through TLS; handshake next.
  void use_tls(boost::asio::ssl::context& context) { tls_ = std::make_unique<Tls>(socket_, context); }
  [[nodiscard]] bool tls() const { return tls_ != nullptr; }

  template <class Token>
  auto async_handshake(Token&& token) {
    return tls_->async_handshake(boost::asio::ssl::stream_base::server, std::forward<Token>(token));
  }
  /// Tells the peer that nothing more follows, and waits for the same from it.
  template <class Token>
  auto async_shutdown(Token&& token) {
    return tls_->async_shutdown(std::forward<Token>(token));
  }
  template <class Buffers, class Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_read_some(buffers, std::forward<Token>(token));
    return socket_.async_read_some(buffers, std::forward<Token>(token));
  }
  template <class Buffers, class Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    if (tls_) return tls_->async_write_some(buffers, std::forward<Token>(token));
    return socket_.async_write_some(buffers, std::forward<Token>(token));
  }

  executor_type get_executor() { return socket_.get_executor(); }
  Socket& socket() { return socket_; }

 private:
  using Tls = boost::asio::ssl::stream<Socket&>;
  Socket socket_;
  std::unique_ptr<Tls> tls_;
};

}  // namespace quern::server
