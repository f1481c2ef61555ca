#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace quern::server {

/// Appends `text` as a JSON string with its quotes. What is not UTF-8 becomes U+FFFD, as in dump_json. One pass, for the path
/// that every token takes.
void append_json_string(std::string& out, std::string_view text);
/// Appends [1,2,3].
void append_json_integers(std::string& out, std::span<const int32_t> values);

}  // namespace quern::server
