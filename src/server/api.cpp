#include "server/api.h"

#include <algorithm>
#include <array>

#include "server/error_body.h"
#include "server/page.h"
#include "server/request_id.h"
#include "server/route.h"
#include "server/trace_context.h"

namespace quern::server {
namespace {

constexpr std::array kRoutes{
    Route{"POST", "/v1/chat/completions", chat_completions, "A conversation, written by the model's chat template", describe_chat, "chat"},
    Route{"POST", "/v1/chat/completions/render", render_chat_completion, "The prompt of such a conversation, as text and token ids", describe_chat, "chat"},
    Route{"POST", "/v1/completions", completions, "A prompt as it stands: text or token ids", describe_completion, "completion"},
    Route{"POST", "/v1/completions/render", render_completion, "The prompts of such a request, as text and token ids", describe_completion, "completion"},
    Route{"POST", "/v1/responses", create_response, "OpenAI's Responses", describe_response, "responses"},
    Route{"POST", "/v1/responses/input_tokens", count_response_tokens, "How many tokens such a request has", describe_response, "responses"},
    Route{"GET", "/v1/responses/{response_id}/input_items", list_input_items, "What a stored response was made from"},
    Route{"GET", "/v1/responses/{response_id}", get_response, "A stored response"},
    Route{"DELETE", "/v1/responses/{response_id}", delete_response, "Forgets a stored response"},
    Route{"POST", "/v1/messages", create_message, "Anthropic's Messages", describe_message, "anthropic", Dialect::kAnthropic},
    Route{"POST", "/v1/messages/count_tokens", count_message_tokens, "How many tokens such a request has", describe_token_count, "anthropic",
          Dialect::kAnthropic},
    Route{"GET", "/v1/models", list_models, "The served names"},
    Route{"GET", "/v1/models/{model}", get_model, "One of them"},
    Route{"POST", "/tokenize", tokenize, "Text or messages to token ids", describe_tokenize, "tokenize"},
    Route{"POST", "/detokenize", detokenize, "Token ids to text", describe_detokenize, "detokenize"},
    Route{"GET", "/health", nullptr, "Whether the process can serve"},
    Route{"GET", "/ready", nullptr, "Whether requests are taken"},
    Route{"GET", "/version", nullptr, "The program's version"},
    Route{"GET", "/metrics", nullptr, "Prometheus text"},
    Route{"GET", "/openapi.json", nullptr, "This document"},
    Route{"GET", "/", nullptr, "The page to chat in a browser"},
    Route{"GET", "/page/", nullptr},
};

bool answers(const Route& route, std::string_view method) { return method == route.method || (method == "HEAD" && route.method == "GET"); }

/// What a path answers to, as the Allow header has it; empty: there is no such path.
std::string allowed_methods(std::string_view path) {
  std::string methods;
  for (const Route& route : kRoutes) {
    if (matches(route.path, path)) methods += route.method == "GET" ? "GET, HEAD, " : fmt::format("{}, ", route.method);
  }
  return methods.empty() ? methods : methods + "OPTIONS";
}

/// The first route of the path, or of path and method.
const Route* find_route(std::string_view path, std::optional<std::string_view> method) {
  const auto* found = std::ranges::find_if(kRoutes, [&](const Route& r) { return matches(r.path, path) && (!method || answers(r, *method)); });
  return found == kRoutes.end() ? nullptr : found;
}

HttpResponse json_response(int status, Json body) { return HttpResponse{status, dump_json(body)}; }

HttpResponse not_found(const HttpRequest& request) {
  return error_response(make_error(ErrorCode::kNotFound, "there is no {} here; /openapi.json lists what is", request.path.substr(0, 256)));
}

HttpResponse wrong_key(Dialect dialect) {
  return error_response(dialect, make_error(ErrorCode::kUnauthenticated,
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
  const std::string_view id = client_request_id(request);
  const std::string told = id.empty() ? new_request_id("") : std::string(id);
  add_header(answer, "X-Request-Id", told);
  if (matches("/v1/messages/", request.path + "/")) add_header(answer, "request-id", told);  // Anthropic's name
  if (request.facts->request_id.empty()) request.facts->request_id = told;
  return answer;
}

std::optional<HttpResponse> Api::admit(const HttpRequest& request) const {
  if (authorized(request)) return std::nullopt;
  const Route* route = find_route(request.path, {});
  const bool keyed = route != nullptr && route->endpoint != nullptr && request.method != "OPTIONS";
  if (!keyed && !has_body(request)) return std::nullopt;
  HttpAnswer answer = wrong_key(route == nullptr ? Dialect::kOpenAi : route->dialect);
  if (route != nullptr) request.facts->route = route->path;
  add_headers(request, answer);
  return std::get<HttpResponse>(std::move(answer));
}

HttpAnswer Api::route(const HttpRequest& request, const ServicePtr& service) const {
  const Route* of_path = find_route(request.path, {});
  if (of_path == nullptr) return not_found(request);
  request.facts->route = of_path->path;
  const Route* route = find_route(request.path, request.method);
  if (route == nullptr) {
    const std::string allow = allowed_methods(request.path);
    HttpResponse response{204, ""};
    if (request.method != "OPTIONS") response = error_response(405, fmt::format("{} does not answer {}, only {}", of_path->path, request.method, allow));
    response.headers.emplace_back("Allow", allow);
    return response;
  }
  request.facts->route = route->path;
  if (route->endpoint == nullptr) return answer_itself(request, service);
  if (!authorized(request)) return wrong_key(route->dialect);
  if (service == nullptr) return error_response(route->dialect, make_error(ErrorCode::kUnavailable, "the model is still loading"));
  if (draining_) return error_response(route->dialect, make_error(ErrorCode::kUnavailable, "the server is shutting down"));
  std::shared_ptr<const void> place;
  if (slots_.limit() > 0) {
    place = slots_.take(static_cast<size_t>(request.facts->key_idx));
    if (place == nullptr) {
      http_metrics_.count_key_refused(request.facts->key_idx);
      return error_response(route->dialect, 429, fmt::format("this key has {} requests under way, which is its limit", slots_.limit()), "rate_limit_exceeded");
    }
  }
  HttpAnswer answer = route->endpoint(service, request);
  if (auto* deferred = std::get_if<std::unique_ptr<DeferredResponse>>(&answer)) (*deferred)->held = std::move(place);
  if (auto* stream = std::get_if<std::unique_ptr<EventStream>>(&answer)) (*stream)->held = std::move(place);
  return answer;
}

HttpResponse Api::answer_itself(const HttpRequest& request, const ServicePtr& service) const {
  if (request.path == "/health") return health(service);
  if (request.path == "/ready") return ready(service);
  if (request.path == "/version") return json_response(200, {{"version", options_.version}});
  if (request.path == "/openapi.json") return json_response(200, openapi_document(kRoutes, options_.version));
  if (request.path == "/" || request.path.starts_with("/page/")) {
    std::optional<HttpResponse> page = options_.page ? page_response(request) : std::nullopt;
    return page ? *std::move(page) : not_found(request);
  }
  return metrics(service);
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
  if (service != nullptr) response.body = service->metrics.expose(service->context.engine->stats(), service->constraints.stats(), service->context.engine->failure().has_value());
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
