#include "text/jinja_strings.h"

#include <unicode/bytestream.h>
#include <unicode/casemap.h>
#include <unicode/uchar.h>

#include "base/check.h"

namespace quern::text::jinja {
namespace {

icu::StringPiece piece(std::string_view text) { return {text.data(), static_cast<int32_t>(text.size())}; }

/// Title case of the one code point in `character`.
std::string title_of(std::string_view character) {
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  UErrorCode status = U_ZERO_ERROR;
  icu::CaseMap::utf8ToTitle("", U_TITLECASE_WHOLE_STRING | U_TITLECASE_NO_BREAK_ADJUSTMENT, nullptr, piece(character), sink, nullptr,
                            status);
  CHECK(U_SUCCESS(status));
  return out;
}

bool in_set(std::string_view character, std::string_view set) {
  if (set.empty()) return is_space(code_point_at(character, 0).value);
  return set.find(character) != std::string_view::npos;
}

}  // namespace

void append_code_point(std::string& out, char32_t c) {
  const auto byte = [&](char32_t b) { out += static_cast<char>(b); };
  if (c < 0x80) {
    byte(c);
  } else if (c < 0x800) {
    byte(0xC0 | c >> 6), byte(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
  } else {
    byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 0x3F)), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
  }
}

size_t count_characters(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (c & 0xC0) != 0x80;
  return count;
}

size_t byte_offset(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += code_point_at(text, at).length;
  return at;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & (U_GC_C_MASK | U_GC_Z_MASK)) == 0;
}

bool is_letter(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0; }
bool is_digit(char32_t c) {
  const auto type = static_cast<UNumericType>(u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_NUMERIC_TYPE));
  return type == U_NT_DECIMAL || type == U_NT_DIGIT;
}
bool is_upper(char32_t c) { return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_UPPERCASE) != 0; }
bool is_lower(char32_t c) { return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_LOWERCASE) != 0; }
bool is_cased(char32_t c) { return is_upper(c) || is_lower(c) || u_charType(static_cast<UChar32>(c)) == U_TITLECASE_LETTER; }

std::string to_upper(std::string_view text) {
  std::string out;
  icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  icu::CaseMap::utf8ToUpper("", 0, piece(text), sink, nullptr, status);
  CHECK(U_SUCCESS(status));
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  icu::CaseMap::utf8ToLower("", 0, piece(text), sink, nullptr, status);
  CHECK(U_SUCCESS(status));
  return out;
}

std::string capitalized(std::string_view text) {
  if (text.empty()) return {};
  const size_t first = code_point_at(text, 0).length;
  return title_of(text.substr(0, first)) + to_lower(text).substr(to_lower(text.substr(0, first)).size());
}

std::string titled(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    while (at < text.size()) {
      const CodePoint c = code_point_at(text, at);
      if (!is_cased(c.value)) break;
      at += c.length;
    }
    if (at > begin) {
      out += capitalized(text.substr(begin, at - begin));
    } else {
      at += code_point_at(text, at).length;
      out += text.substr(begin, at - begin);
    }
  }
  return out;
}

bool all_in_case(std::string_view text, bool upper) {
  bool some = false, other = false;
  for_each_character(text, [&](std::string_view character) {
    const char32_t c = code_point_at(character, 0).value;
    if (!is_cased(c)) return;
    (upper ? is_upper(c) : is_lower(c)) ? some = true : other = true;
  });
  return some && !other;
}

std::string_view strip_left(std::string_view text, std::string_view set) {
  while (!text.empty()) {
    const size_t length = code_point_at(text, 0).length;
    if (!in_set(text.substr(0, length), set)) break;
    text.remove_prefix(length);
  }
  return text;
}

std::string_view strip_right(std::string_view text, std::string_view set) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while ((text[begin] & 0xC0) == 0x80) --begin;
    if (!in_set(text.substr(begin), set)) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

}  // namespace quern::text::jinja
