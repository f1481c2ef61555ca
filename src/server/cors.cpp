#include "server/cors.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "server/error_body.h"

namespace quern::server {
namespace {

constexpr std::string_view kMaxAge = "600";  // seconds that a browser may remember a preflight
constexpr std::string_view kExposed = "X-Request-Id, traceparent, Retry-After";

bool contains(const std::vector<std::string>& list, std::string_view word) {
  return std::ranges::any_of(list, [&](const std::string& entry) { return entry == "*" || equals_ignoring_case(entry, word); });
}

std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ') || text.starts_with('\t')) text.remove_prefix(1);
  while (text.ends_with(' ') || text.ends_with('\t')) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> words(std::string_view list) {
  std::vector<std::string_view> result;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (const std::string_view word = trimmed(list.substr(0, comma)); !word.empty()) result.push_back(word);
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return result;
}

}  // namespace

Result<Cors> Cors::make(CorsOptions options) {
  for (const std::string& origin : options.allowed_origins) {
    if (origin == "*" || origin == "null") continue;
    const size_t scheme = origin.find("://");
    if (scheme == std::string::npos || scheme == 0 || scheme + 3 == origin.size() || origin.find('/', scheme + 3) != std::string::npos) {
      return invalid_argument("--allowed-origins: '{}' is not an origin; one looks like https://app.example or http://localhost:3000, without a path",
                              origin);
    }
  }
  if (options.allow_credentials && std::ranges::find(options.allowed_origins, "*") != options.allowed_origins.end()) {
    return invalid_argument("--allow-credentials: with every origin allowed, any web page could act for its visitors; name the origins");
  }
  Cors cors;
  cors.options_ = std::move(options);
  return cors;
}

bool Cors::allows_origin(std::string_view origin) const {
  return std::ranges::any_of(options_.allowed_origins, [&](const std::string& entry) { return entry == "*" || entry == origin; });
}

std::optional<HttpResponse> Cors::preflight(const HttpRequest& request) const {
  const std::string_view origin = request.header("Origin"), method = request.header("Access-Control-Request-Method");
  if (request.method != "OPTIONS" || origin.empty() || method.empty()) return std::nullopt;
  const auto refuse = [&](std::string message) {
    HttpResponse response = error_response(403, message);
    response.headers.emplace_back("Vary", "Origin");
    return response;
  };
  if (!allows_origin(origin)) return refuse(fmt::format("pages of {} may not ask here (--allowed-origins)", origin.substr(0, 256)));
  if (!contains(options_.allowed_methods, method)) return refuse(fmt::format("pages may not use {} here (--allowed-methods)", method.substr(0, 64)));
  const std::string_view wanted = request.header("Access-Control-Request-Headers");
  for (const std::string_view header : words(wanted)) {
    if (!contains(options_.allowed_headers, header)) {
      return refuse(fmt::format("pages may not send {} here (--allowed-headers)", header.substr(0, 64)));
    }
  }
  HttpResponse response{204, ""};
  response.headers = headers(request);
  // "*" in these two does not cover Authorization, nor anything with credentials: what was asked for is named.
  const bool all_methods = contains(options_.allowed_methods, "*");
  response.headers.emplace_back("Access-Control-Allow-Methods",
                                all_methods ? std::string(method) : fmt::format("{}", fmt::join(options_.allowed_methods, ", ")));
  if (!wanted.empty()) response.headers.emplace_back("Access-Control-Allow-Headers", wanted);
  response.headers.emplace_back("Access-Control-Max-Age", kMaxAge);
  return response;
}

Cors::Headers Cors::headers(const HttpRequest& request) const {
  if (options_.allowed_origins.empty()) return {};
  Headers headers{{"Vary", "Origin"}};
  const std::string_view origin = request.header("Origin");
  if (origin.empty() || !allows_origin(origin)) return headers;
  headers.emplace_back("Access-Control-Allow-Origin", origin);
  headers.emplace_back("Access-Control-Expose-Headers", kExposed);
  if (options_.allow_credentials) headers.emplace_back("Access-Control-Allow-Credentials", "true");
  return headers;
}

}  // namespace quern::server
