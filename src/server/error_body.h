#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "base/result.h"
#include "server/http_message.h"

namespace quern::server {

/// Whose clients an endpoint is for: the shape of its errors.
enum class Dialect : uint8_t { kOpenAi, kAnthropic };

/// The HTTP status that an error's code stands for.
int http_status(ErrorCode code);

/// {"error": {"message", "type", "param", "code"}}, as OpenAI's clients expect it. `code` is the machine-readable name, null when empty.
Json error_body(const Error& error, std::string_view code = {});
HttpResponse error_response(const Error& error, std::string_view code = {});
/// In the shape that the clients of `dialect` expect; Anthropic's is {"type": "error", "error": {"type", "message"}} and has no code.
HttpResponse error_response(Dialect dialect, const Error& error, std::string_view code = {});
Json anthropic_error_body(const Error& error);
/// For statuses that no ErrorCode stands for, such as 405 and 429.
HttpResponse error_response(Dialect dialect, int status, std::string_view message, std::string_view code = {});
HttpResponse error_response(int status, std::string_view message, std::string_view code = {});

}  // namespace quern::server
