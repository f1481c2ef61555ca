#pragma once

#include <string>
#include <string_view>

#include "server/http_message.h"

namespace quern::server {

/// "chatcmpl-" and 32 random hexadecimal digits.
std::string new_request_id(std::string_view prefix);

/// What a client may call its request: 1 to 128 printable ASCII characters, no space.
bool is_request_id(std::string_view id);

/// The request's X-Request-Id. Empty when there is none, or one that cannot be repeated in headers and logs.
std::string_view client_request_id(const HttpRequest& request);

/// Adds a header to whatever kind of answer it is, unless it has one of that name.
void add_header(HttpAnswer& answer, std::string_view name, std::string_view value);

}  // namespace quern::server
