#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/api_keys.h"
#include "server/cors.h"
#include "server/endpoints.h"
#include "server/http_message.h"
#include "server/http_metrics.h"
#include "server/request_slots.h"

namespace quern::server {

struct ApiOptions {
  std::vector<std::string> api_keys;     // empty: everybody may ask
  int32_t max_requests_per_key = 0;      // answered at once; one more is 429; 0: any number
  CorsOptions cors;
  std::string version;
  bool page = true;  // the chat page at "/"
};

/// How far a model's start has come; /ready tells it.
struct LoadingState {
  std::string phase = "starting";  // starting, loading_weights, starting_engine
  double fraction = 0;             // of this phase, 0 to 1
};

/// Routes requests to endpoints, once their key and method are right. Thread-safe.
class Api {
 public:
  /// Errors: keys and origins that cannot be meant.
  static Result<std::unique_ptr<Api>> make(ApiOptions options);

  /// From here on the API answers for this model; before, endpoints that need it are 503.
  void set_service(ServicePtr service);
  /// Before that: what /ready says meanwhile. Any thread.
  void set_loading(LoadingState state);
  void set_draining() { draining_ = true; }
  /// Where /metrics gets what only the server knows.
  void set_server_stats(std::function<std::pair<HttpStats, uint64_t>()> http_stats_and_dropped_lines);

  HttpAnswer handle(const HttpRequest& request) const;
  /// Looks at a request before its body is read: strangers get no memory for theirs.
  [[nodiscard]] std::optional<HttpResponse> admit(const HttpRequest& request) const;
  void observe(const HttpExchange& exchange) { http_metrics_.observe(exchange); }

 private:
  Api(ApiOptions options, ApiKeys keys, Cors cors)
      : options_(std::move(options)), keys_(std::move(keys)), cors_(std::move(cors)), slots_(options_.max_requests_per_key, keys_.size()) {}
  [[nodiscard]] HttpAnswer route(const HttpRequest& request, const ServicePtr& service) const;
  [[nodiscard]] HttpResponse answer_itself(const HttpRequest& request, const ServicePtr& service) const;
  [[nodiscard]] bool authorized(const HttpRequest& request) const;
  void add_headers(const HttpRequest& request, HttpAnswer& answer) const;
  [[nodiscard]] HttpResponse metrics(const ServicePtr& service) const;
  [[nodiscard]] HttpResponse health(const ServicePtr& service) const;
  [[nodiscard]] HttpResponse ready(const ServicePtr& service) const;
  [[nodiscard]] HttpResponse loading() const;

  ApiOptions options_;
  ApiKeys keys_;
  Cors cors_;
  RequestSlots slots_;
  mutable HttpMetrics http_metrics_;
  mutable std::mutex mutex_;
  ServicePtr service_;    // under mutex_
  std::function<std::pair<HttpStats, uint64_t>()> server_stats_;  // under mutex_
  LoadingState loading_;  // under mutex_
  std::atomic<bool> draining_{false};
};

}  // namespace quern::server
