#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/access_log.h"
#include "server/api.h"
#include "server/endpoints.h"
#include "server/http_server.h"

namespace quern::server {

struct ServerOptions {
  HttpOptions http;
  ApiOptions api;
  AccessLogOptions access_log{.target = "", .left_out = {}};  // none
};

/// The OpenAI-compatible HTTP API of one model. Thread-safe.
class Server {
 public:
  /// Listens at once: /health answers, everything that needs the model is 503 until set_ready().
  /// Errors: see HttpServer::start, Api::make and AccessLog::open. Warns when strangers can reach it without a key.
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options);
  ~Server();

  /// What /ready says until then. Any thread.
  void set_loading(LoadingState state) { api_->set_loading(std::move(state)); }
  void set_ready(ServerContext context);
  [[nodiscard]] uint16_t port() const { return port_; }  // 0 for a socket file
  /// Opens the access log again, and reads the TLS files again; a certificate that is not good is logged, and the old one stays. Any thread.
  void reopen_files();
  /// No new connections or requests; returns when the answers under way are sent, or `timeout` has passed and they were cut off.
  /// Afterwards nothing here uses the engine any more.
  void drain_and_stop(std::chrono::milliseconds timeout);

 private:
  Server() = default;
  std::unique_ptr<AccessLog> access_log_;  // null: none
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpServer> http_;
  uint16_t port_ = 0;
};

}  // namespace quern::server
