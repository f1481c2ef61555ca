#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/api.h"
#include "server/endpoints.h"
#include "server/http_server.h"

namespace quern::server {

struct ServerOptions {
  HttpOptions http;
  ApiOptions api;
};

/// The OpenAI-compatible HTTP API of one model. Thread-safe.
class Server {
 public:
  /// Listens at once: /health answers, everything that needs the model is 503 until set_ready().
  /// Errors: see HttpServer::start. Warns when strangers can reach it without a key.
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options);
  ~Server();

  void set_ready(ServerContext context);
  [[nodiscard]] uint16_t port() const { return port_; }
  /// No new connections or requests; returns when the answers under way are sent, or `timeout` has passed and they were cut off.
  /// Afterwards nothing here uses the engine any more.
  void drain_and_stop(std::chrono::milliseconds timeout);

 private:
  explicit Server(ApiOptions options) : api_(std::move(options)) {}
  Api api_;
  std::unique_ptr<HttpServer> http_;
  uint16_t port_ = 0;
};

}  // namespace quern::server
