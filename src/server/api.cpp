#include "server/api.h"

#include <algorithm>
#include <array>

#include "server/error_body.h"

namespace quern::server {
namespace {

using Endpoint = HttpAnswer (*)(const ServicePtr&, const HttpRequest&);

struct Route {
  std::string_view method;
  std::string_view path;  // one that ends with '/' stands for everything below it
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
};

const Route* find_route(std::string_view path) {
  for (const Route& route : kRoutes) {
    if (path == route.path || (route.path.ends_with('/') && path.starts_with(route.path))) return &route;
  }
  return nullptr;
}

/// Takes the same time for every wrong key of one length.
bool equal_keys(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  return difference == 0;
}

HttpResponse json_response(int status, Json body) { return HttpResponse{status, dump_json(body)}; }

}  // namespace

void Api::set_service(ServicePtr service) {
  const std::lock_guard lock(mutex_);
  service_ = std::move(service);
}

HttpAnswer Api::handle(const HttpRequest& request) const {
  const ServicePtr service = [this] {
    const std::lock_guard lock(mutex_);
    return service_;
  }();
  HttpAnswer answer = route(request, service);
  if (const auto* response = std::get_if<HttpResponse>(&answer); response != nullptr && service != nullptr) {
    service->metrics.count_http_response(response->status);
  }
  add_cors(request, answer);
  return answer;
}

HttpAnswer Api::route(const HttpRequest& request, const ServicePtr& service) const {
  const Route* route = find_route(request.path);
  if (route == nullptr)
    return error_response(
        make_error(ErrorCode::kNotFound, "there is no {} here; docs/http-api.md lists what is", request.path.substr(0, 256)));
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
    if (request.path == "/version") return json_response(200, {{"version", options_.version}});
    HttpResponse response;
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    if (service != nullptr) response.body = service->metrics.expose(service->context.engine->stats());
    return response;
  }
  if (!authorized(request)) {
    return error_response(
        make_error(ErrorCode::kUnauthenticated, "the API key is missing or wrong; send it as \"Authorization: Bearer KEY\""),
        "invalid_api_key");
  }
  if (service == nullptr) return error_response(make_error(ErrorCode::kUnavailable, "the model is still loading"));
  if (draining_) return error_response(make_error(ErrorCode::kUnavailable, "the server is shutting down"));
  return route->endpoint(service, request);
}

bool Api::authorized(const HttpRequest& request) const {
  if (options_.api_keys.empty()) return true;
  constexpr std::string_view kScheme = "Bearer ";
  std::string_view header = request.header("Authorization");
  if (header.size() < kScheme.size() || !equals_ignoring_case(header.substr(0, kScheme.size()), kScheme)) return false;
  header.remove_prefix(kScheme.size());
  bool found = false;
  for (const std::string& key : options_.api_keys) found = equal_keys(header, key) || found;
  return found;
}

void Api::add_cors(const HttpRequest& request, HttpAnswer& answer) const {
  const std::string_view origin = request.header("Origin");
  if (origin.empty()) return;
  const bool allowed = std::ranges::any_of(options_.allowed_origins, [&](const std::string& o) { return o == "*" || o == origin; });
  if (!allowed) return;
  std::vector<std::pair<std::string, std::string>> headers{{"Access-Control-Allow-Origin", std::string(origin)},
                                                           {"Vary", "Origin"},
                                                           {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                                                           {"Access-Control-Allow-Headers", "Authorization, Content-Type"}};
  if (auto* response = std::get_if<HttpResponse>(&answer)) {
    response->headers.insert(response->headers.end(), headers.begin(), headers.end());
  } else if (auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&answer)) {
    (*deferred)->headers = std::move(headers);
  } else {
    std::get<std::unique_ptr<EventStream>>(answer)->headers = std::move(headers);
  }
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
  if (service == nullptr) return error_response(make_error(ErrorCode::kUnavailable, "the model is still loading"));
  if (draining_) return error_response(make_error(ErrorCode::kUnavailable, "the server is shutting down"));
  HttpResponse response = health(service);
  if (response.status == 200) response.body = R"({"status":"ready"})";
  return response;
}

}  // namespace quern::server
