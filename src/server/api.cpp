#include "server/api.h"

#include <algorithm>
#include <array>

#include "server/error_body.h"
#include "server/page.h"
#include "server/trace_context.h"

namespace quern::server {
namespace {

using Endpoint = HttpAnswer (*)(const ServicePtr&, const HttpRequest&);

struct Route {
  std::string_view method;
  std::string_view path;  // one that ends with '/' stands for everything below it; "/" only for itself
  Endpoint endpoint;      // null: answered by Api itself, also before a model is loaded and without a key
};

constexpr std::array kRoutes{
    Route{"POST", "/v1/chat/completions", chat_completions},
    Route{"POST", "/v1/completions", completions},
    Route{"GET", "/v1/models", list_models},
    Route{"GET", "/v1/models/", get_model},
    Route{"POST", "/tokenize", tokenize},
    Route{"POST", "/detokenize", detokenize},
    Route{"GET", "/health", nullptr},
    Route{"GET", "/ready", nullptr},
    Route{"GET", "/version", nullptr},
    Route{"GET", "/metrics", nullptr},
    Route{"GET", "/", nullptr},
    Route{"GET", "/page/", nullptr},
};

const Route* find_route(std::string_view path) {
  for (const Route& route : kRoutes) {
    if (path == route.path || (route.path.size() > 1 && route.path.ends_with('/') && path.starts_with(route.path))) return &route;
  }
  return nullptr;
}

HttpResponse json_response(int status, Json body) { return HttpResponse{status, dump_json(body)}; }

HttpResponse wrong_key() {
  return error_response(make_error(ErrorCode::kUnauthenticated,
                                   "the API key is missing or wrong; send it as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\""),
                        "invalid_api_key");
}

bool has_body(const HttpRequest& request) {
  const std::string_view length = request.header("Content-Length");
  return !request.header("Transfer-Encoding").empty() || length.find_first_not_of('0') != std::string_view::npos;
}

}  // namespace

Result<std::unique_ptr<Api>> Api::make(ApiOptions options) {
  ASSIGN_OR_RETURN(ApiKeys keys, ApiKeys::make(options.api_keys));
  ASSIGN_OR_RETURN(Cors cors, Cors::make(options.cors));
  if (options.max_requests_per_key > 0 && keys.empty()) {
    return invalid_argument("--max-requests-per-key needs keys to tell clients apart; --api-key or --api-key-file gives them");
  }
  options.api_keys.clear();
  return std::unique_ptr<Api>(new Api(std::move(options), std::move(keys), std::move(cors)));
}

void Api::set_server_stats(std::function<std::pair<HttpStats, uint64_t>()> http_stats_and_dropped_lines) {
  const std::lock_guard lock(mutex_);
  server_stats_ = std::move(http_stats_and_dropped_lines);
}

void Api::set_service(ServicePtr service) {
  const std::lock_guard lock(mutex_);
  service_ = std::move(service);
}

void Api::set_loading(LoadingState state) {
  const std::lock_guard lock(mutex_);
  loading_ = std::move(state);
}

HttpAnswer Api::handle(const HttpRequest& request) const {
  const ServicePtr service = [this] {
    const std::lock_guard lock(mutex_);
    return service_;
  }();
  HttpAnswer answer = HttpResponse{};
  if (auto preflight = cors_.preflight(request)) {
    answer = std::move(*preflight);
  } else {
    answer = route(request, service);
    add_headers(request, answer);
  }
  if (const auto* response = std::get_if<HttpResponse>(&answer); response != nullptr && service != nullptr) {
    service->metrics.count_http_response(response->status);
  }
  return answer;
}

std::optional<HttpResponse> Api::admit(const HttpRequest& request) const {
  if (authorized(request)) return std::nullopt;
  const Route* route = find_route(request.path);
  const bool keyed = route != nullptr && route->endpoint != nullptr && request.method != "OPTIONS";
  if (!keyed && !has_body(request)) return std::nullopt;
  HttpAnswer answer = wrong_key();
  if (route != nullptr) request.facts->route = route->path;
  add_headers(request, answer);
  return std::get<HttpResponse>(std::move(answer));
}

HttpAnswer Api::route(const HttpRequest& request, const ServicePtr& service) const {
  const auto not_found = [&request] {
    return error_response(
        make_error(ErrorCode::kNotFound, "there is no {} here; docs/http-api.md lists what is", request.path.substr(0, 256)));
  };
  const Route* route = find_route(request.path);
  if (route == nullptr) return not_found();
  request.facts->route = route->path;
  const std::string allow = route->method == "GET" ? "GET, HEAD, OPTIONS" : "POST, OPTIONS";
  if (request.method == "OPTIONS") {
    HttpResponse response{204, ""};
    response.headers.emplace_back("Allow", allow);
    return response;
  }
  if (request.method != route->method && !(request.method == "HEAD" && route->method == "GET")) {
    HttpResponse response = error_response(405, fmt::format("{} does not answer {}, only {}", route->path, request.method, allow));
    response.headers.emplace_back("Allow", allow);
    return response;
  }
  if (route->endpoint == nullptr) {
    if (request.path == "/health") return health(service);
    if (request.path == "/ready") return ready(service);
    if (route->path == "/" || route->path == "/page/") {
      std::optional<HttpResponse> page = options_.page ? page_response(request) : std::nullopt;
      return page ? *std::move(page) : not_found();
    }
    if (request.path == "/version") return json_response(200, {{"version", options_.version}});
    return metrics(service);
  }
  if (!authorized(request)) return wrong_key();
  if (service == nullptr) return error_response(make_error(ErrorCode::kUnavailable, "the model is still loading"));
  if (draining_) return error_response(make_error(ErrorCode::kUnavailable, "the server is shutting down"));
  std::shared_ptr<const void> place;
  if (slots_.limit() > 0) {
    place = slots_.take(static_cast<size_t>(request.facts->key_idx));
    if (place == nullptr) {
      http_metrics_.count_key_refused(request.facts->key_idx);
      return error_response(429, fmt::format("this key has {} requests under way, which is its limit", slots_.limit()), "rate_limit_exceeded");
    }
  }
  HttpAnswer answer = route->endpoint(service, request);
  if (auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&answer)) (*deferred)->held = std::move(place);
  if (auto* stream = std::get_if<std::unique_ptr<EventStream>>(&answer)) (*stream)->held = std::move(place);
  return answer;
}

bool Api::authorized(const HttpRequest& request) const {
  if (keys_.empty()) return true;
  const std::optional<int32_t> idx = keys_.find(request);
  request.facts->key_idx = idx.value_or(-1);
  return idx.has_value();
}

/// What an answer says beside its content: to pages in browsers, and to whoever follows a trace.
void Api::add_headers(const HttpRequest& request, HttpAnswer& answer) const {
  auto& headers = headers_of(answer);
  for (auto& header : cors_.headers(request)) headers.push_back(std::move(header));
  if (const auto sender = TraceContext::parse(request.header("traceparent"))) {
    const TraceContext ours = sender->child();
    request.facts->trace_id = ours.trace_id;
    request.facts->span_id = ours.span_id;
    headers.emplace_back("traceparent", ours.traceparent());
  }
}

HttpResponse Api::metrics(const ServicePtr& service) const {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  if (service != nullptr) response.body = service->metrics.expose(service->context.engine->stats());
  const auto stats = [this] {
    const std::lock_guard lock(mutex_);
    return server_stats_ ? server_stats_() : std::pair<HttpStats, uint64_t>();
  }();
  response.body += http_metrics_.expose(stats.first, stats.second);
  return response;
}

HttpResponse Api::health(const ServicePtr& service) const {
  if (service != nullptr) {
    if (const auto failure = service->context.engine->failure()) {
      return error_response(make_error(ErrorCode::kUnavailable, "the engine has failed: {}", failure->message));
    }
  }
  return json_response(200, {{"status", "ok"}});
}

HttpResponse Api::ready(const ServicePtr& service) const {
  if (service == nullptr) return loading();
  if (draining_) return error_response(make_error(ErrorCode::kUnavailable, "the server is shutting down"));
  HttpResponse response = health(service);
  if (response.status == 200) response.body = R"({"status":"ready"})";
  return response;
}

HttpResponse Api::loading() const {
  const Error error = make_error(ErrorCode::kUnavailable, "the model is still loading");
  Json body = error_body(error, {});
  body["status"] = "loading";
  {
    const std::lock_guard lock(mutex_);
    body["phase"] = loading_.phase;
    body["fraction"] = loading_.fraction;
  }
  HttpResponse response = error_response(error);  // its status and headers
  response.body = dump_json(body);
  return response;
}

}  // namespace quern::server
