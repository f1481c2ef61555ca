#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/endpoints.h"
#include "server/http_message.h"

namespace quern::server {

struct ApiOptions {
  std::vector<std::string> api_keys;         // empty: everybody may ask
  std::vector<std::string> allowed_origins;  // web pages that may ask from a browser; "*": all; empty: none
  std::string version;
};

/// Routes requests to endpoints, once their key and method are right. Thread-safe.
class Api {
 public:
  explicit Api(ApiOptions options) : options_(std::move(options)) {}

  /// From here on the API answers for this model; before, endpoints that need it are 503.
  void set_service(ServicePtr service);
  void set_draining() { draining_ = true; }

  HttpAnswer handle(const HttpRequest& request) const;

 private:
  [[nodiscard]] HttpAnswer route(const HttpRequest& request, const ServicePtr& service) const;
  [[nodiscard]] bool authorized(const HttpRequest& request) const;
  void add_cors(const HttpRequest& request, HttpAnswer& answer) const;
  [[nodiscard]] HttpResponse health(const ServicePtr& service) const;
  [[nodiscard]] HttpResponse ready(const ServicePtr& service) const;

  ApiOptions options_;
  mutable std::mutex mutex_;
  ServicePtr service_;  // under mutex_
  std::atomic<bool> draining_{false};
};

}  // namespace quern::server
