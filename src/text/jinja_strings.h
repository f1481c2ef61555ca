#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "text/utf8.h"

// Python's view of a string, as a sequence of code points, over valid UTF-8.

namespace quern::text::jinja {

void append_code_point(std::string& out, char32_t code_point);

template <class Visit>
void for_each_character(std::string_view text, Visit&& visit) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = code_point_at(text, at).length;
    visit(text.substr(at, length));
    at += length;
  }
}

/// Number of code points.
size_t count_characters(std::string_view text);
/// Byte offset of the code point number `index`; text.size() at or past the end.
size_t byte_offset(std::string_view text, size_t index);

/// str.isspace, str.isprintable for one code point.
bool is_space(char32_t code_point);
bool is_printable(char32_t code_point);
bool is_letter(char32_t code_point);
bool is_digit(char32_t code_point);
/// Lu, Ll, Lt and other letters with case.
bool is_cased(char32_t code_point);
bool is_upper(char32_t code_point);
bool is_lower(char32_t code_point);

/// str.upper, lower, capitalize, title: full Unicode mappings of no particular language.
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string capitalized(std::string_view text);
std::string titled(std::string_view text);

/// str.isupper or islower: at least one character with case, all of them in the wanted one.
bool all_in_case(std::string_view text, bool upper);

/// What remains without the characters of `set` at the ends; an empty view in `set` means white space.
std::string_view strip_left(std::string_view text, std::string_view set = {});
std::string_view strip_right(std::string_view text, std::string_view set = {});
inline std::string_view strip(std::string_view text, std::string_view set = {}) { return strip_right(strip_left(text, set), set); }

}  // namespace quern::text::jinja
