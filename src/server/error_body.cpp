#include "server/error_body.h"

namespace quern::server {
namespace {

std::string_view error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 408: return "timeout_error";
    case 429: return "rate_limit_error";
    case 500: return "server_error";
    case 503: return "service_unavailable_error";
    case 504: return "timeout_error";
    default: return "invalid_request_error";
  }
}

std::string_view anthropic_error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 500: return "api_error";
    case 408:
    case 504: return "timeout_error";
    case 503: return "overloaded_error";
    default: return "invalid_request_error";
  }
}

Json make_body(int status, std::string_view message, std::string_view field, std::string_view code) {
  Json error;
  error["message"] = message;
  error["type"] = error_type(status);
  error["param"] = field.empty() ? Json() : Json(field);
  error["code"] = code.empty() ? Json() : Json(code);
  Json body;
  body["error"] = std::move(error);
  return body;
}

Json make_anthropic_body(int status, std::string_view message) {
  Json body;
  body["type"] = "error";
  body["error"] = {{"type", anthropic_error_type(status)}, {"message", message}};
  return body;
}

}  // namespace

int http_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return 400;
    case ErrorCode::kUnsupported: return 400;
    case ErrorCode::kUnauthenticated: return 401;
    case ErrorCode::kNotFound: return 404;
    case ErrorCode::kResourceExhausted: return 503;
    case ErrorCode::kUnavailable: return 503;
    case ErrorCode::kCancelled: return 504;  // by a time limit of the server: a client that left reads no status
    case ErrorCode::kInternal: return 500;
  }
  CHECK_UNREACHABLE();
}

Json error_body(const Error& error, std::string_view code) { return make_body(http_status(error.code), error.message, error.field, code); }

Json anthropic_error_body(const Error& error) { return make_anthropic_body(http_status(error.code), error.message); }

HttpResponse error_response(const Error& error, std::string_view code) { return error_response(Dialect::kOpenAi, error, code); }

HttpResponse error_response(Dialect dialect, const Error& error, std::string_view code) {
  HttpResponse response{http_status(error.code), dump_json(dialect == Dialect::kAnthropic ? anthropic_error_body(error) : error_body(error, code))};
  if (response.status == 503) response.headers.emplace_back("Retry-After", "1");
  if (response.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

HttpResponse error_response(Dialect dialect, int status, std::string_view message, std::string_view code) {
  HttpResponse response{status, dump_json(dialect == Dialect::kAnthropic ? make_anthropic_body(status, message) : make_body(status, message, {}, code))};
  if (status == 503 || status == 429) response.headers.emplace_back("Retry-After", "1");
  return response;
}

HttpResponse error_response(int status, std::string_view message, std::string_view code) { return error_response(Dialect::kOpenAi, status, message, code); }

}  // namespace quern::server
