#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace quern::text {

/// The regular expression of a string format of JSON schema (date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri).
std::optional<std::string> format_pattern(std::string_view format);
/// Formats that say how a value is meant and allow every value of the type.
bool is_free_format(std::string_view format);
/// For errors.
std::string known_formats();

}  // namespace quern::text
