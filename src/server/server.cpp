#include "server/server.h"

#include "base/log.h"
#include "server/error_body.h"

namespace quern::server {

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options) {
  std::unique_ptr<Server> server(new Server(options.api));
  Api& api = server->api_;
  ASSIGN_OR_RETURN(server->http_, HttpServer::start(
                                      options.http, [&api](const HttpRequest& request) { return api.handle(request); },
                                      [](int status, std::string_view message) { return error_response(status, message); }));
  server->port_ = server->http_->port();
  const std::string& host = options.http.host;
  const bool local = host == "localhost" || host == "::1" || host.starts_with("127.");
  if (!local && options.api.api_keys.empty()) {
    log_warning("ANYONE who reaches {}:{} can use this server: it listens beyond this machine and has no --api-key", host, server->port());
  }
  return Result<std::unique_ptr<Server>>(std::move(server));
}

Server::~Server() = default;

void Server::set_ready(ServerContext context) { api_.set_service(std::make_shared<Service>(std::move(context))); }

void Server::drain_and_stop(std::chrono::milliseconds timeout) {
  if (http_ == nullptr) return;
  api_.set_draining();
  http_->drain_and_stop(timeout);
  http_.reset();  // and with it the answers that were cut off
}

}  // namespace quern::server
