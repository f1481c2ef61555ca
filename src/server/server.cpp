#include "server/server.h"

#include "base/log.h"
#include "server/error_body.h"

namespace quern::server {

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options) {
  std::unique_ptr<Server> server(new Server());
  ASSIGN_OR_RETURN(server->api_, Api::make(options.api));
  if (!options.access_log.target.empty()) {
    ASSIGN_OR_RETURN(server->access_log_, AccessLog::open(options.access_log));
  }
  Api& api = *server->api_;
  AccessLog* const log = server->access_log_.get();
  ASSIGN_OR_RETURN(server->http_, HttpServer::start(
                                      options.http, [&api](const HttpRequest& request) { return api.handle(request); },
                                      [](int status, std::string_view message) { return error_response(status, message); },
                                      [&api](const HttpRequest& request) { return api.admit(request); },
                                      [&api, log](const HttpExchange& exchange) {
                                        api.observe(exchange);
                                        if (log != nullptr) log->write(exchange);
                                      }));
  HttpServer* const http = server->http_.get();
  api.set_server_stats([http, log] { return std::pair(http->stats(), log == nullptr ? uint64_t{0} : log->num_dropped()); });
  server->port_ = server->http_->port();
  const std::string& host = options.http.host;
  const bool local = !options.http.unix_socket.empty() || host == "localhost" || host == "::1" || host.starts_with("127.");
  if (!local && options.api.api_keys.empty()) {
    log_warning("ANYONE who reaches {}:{} can use this server: it listens beyond this machine and has no --api-key", host, server->port());
  }
  if (!local && !options.api.api_keys.empty() && !options.http.tls.enabled()) {
    log_warning("keys and texts cross the network READABLE: there is no --ssl-certfile; put a proxy with TLS in front, or give one");
  }
  return Result<std::unique_ptr<Server>>(std::move(server));
}

Server::~Server() = default;

void Server::set_ready(ServerContext context) { api_->set_service(std::make_shared<Service>(std::move(context))); }

void Server::reopen_files() {
  if (access_log_) access_log_->reopen();
  if (http_ == nullptr) return;
  if (Result<void> done = http_->reload_tls(); !done) log_error("the certificate stays as it is: {}", done.error().message);
}

void Server::drain_and_stop(std::chrono::milliseconds timeout) {
  if (http_ == nullptr) return;
  api_->set_draining();
  http_->drain_and_stop(timeout);
  api_->set_server_stats({});
  http_.reset();  // and with it the answers that were cut off
}

}  // namespace quern::server
