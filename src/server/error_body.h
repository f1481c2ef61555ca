#pragma once

#include <string>

#include "base/json.h"
#include "base/result.h"
#include "server/http_message.h"

namespace quern::server {

/// The HTTP status that an error's code stands for.
int http_status(ErrorCode code);

/// {"error": {"message", "type", "param", "code"}}, as OpenAI's clients expect it. `code` is the machine-readable name, null when empty.
Json error_body(const Error& error, std::string_view code = {});
HttpResponse error_response(const Error& error, std::string_view code = {});
/// For statuses that no ErrorCode stands for, such as 405.
HttpResponse error_response(int status, std::string_view message, std::string_view code = {});

}  // namespace quern::server
