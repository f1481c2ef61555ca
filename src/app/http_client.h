#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "app/http_response.h"
#include "base/result.h"

// A small HTTP/1.1 client for load generation and chat: many exchanges on one thread by poll(2), the body seen as it streams.

namespace quern::app {

/// Where a server listens; resolved once.
class HttpAddress {
 public:
  /// "http://host:port/prefix", "host:port", or "http+unix:/path" of a socket file; https is refused (put the load generator behind the same
  /// proxy).
  static Result<HttpAddress> parse(std::string_view url);

  [[nodiscard]] const std::string& host() const { return host_; }
  [[nodiscard]] const std::string& prefix() const { return prefix_; }  // of paths; no slash at its end

 private:
  friend class HttpExchange;
  std::string host_;  // with the port, as in the Host header
  std::string prefix_;
  int family_ = 0;
  std::vector<uint8_t> socket_address_;
};

struct HttpCall {
  std::string method = "GET", path = "/";
  std::vector<std::string> headers;  // "Name: value"
  std::string body;                  // JSON when not empty
};

/// One request and its answer on a connection of its own. Used by one thread; destroying it closes the connection.
class HttpExchange {
 public:
  /// Begins to connect and returns.
  static Result<std::unique_ptr<HttpExchange>> start(const HttpAddress& address, const HttpCall& call, HttpResponseReader::OnBody on_body);
  ~HttpExchange();
  HttpExchange(const HttpExchange&) = delete;
  HttpExchange& operator=(const HttpExchange&) = delete;

  /// What to poll for.
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] short events() const;
  /// Goes on as far as it can without waiting. True when the answer is complete.
  Result<bool> advance();
  [[nodiscard]] const HttpResponseReader& response() const { return reader_; }

 private:
  HttpExchange(int fd, std::string request, HttpResponseReader::OnBody on_body)
      : fd_(fd), outgoing_(std::move(request)), reader_(std::move(on_body)) {}
  int fd_;
  bool connected_ = false;
  std::string outgoing_;
  size_t sent_ = 0;
  HttpResponseReader reader_;
};

/// Polls `exchanges` for at most `timeout_ms`; null entries are skipped. Returns the indices of those that can go on.
std::vector<size_t> poll_exchanges(const std::vector<HttpExchange*>& exchanges, int timeout_ms);

struct HttpReply {
  int status = 0;
  std::string body;
};
/// One exchange from begin to end.
Result<HttpReply> http_call(const HttpAddress& address, const HttpCall& call);

}  // namespace quern::app
