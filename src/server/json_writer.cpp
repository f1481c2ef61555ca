#include "server/json_writer.h"

#include <fmt/format.h>

#include <iterator>

#include "text/utf8.h"

namespace quern::server {

void append_json_string(std::string& out, std::string_view text) {
  std::string repaired;
  if (!text::is_valid_utf8(text)) {
    repaired = text::to_valid_utf8(text);
    text = repaired;
  }
  out.push_back('"');
  size_t plain = 0;  // text[plain, i) needs no escape
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    out.append(text, plain, i - plain);
    plain = i + 1;
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default: fmt::format_to(std::back_inserter(out), "\\u{:04x}", c);
    }
  }
  out.append(text, plain, text.size() - plain);
  out.push_back('"');
}

void append_json_integers(std::string& out, std::span<const int32_t> values) {
  out.push_back('[');
  for (size_t i = 0; i < values.size(); ++i) fmt::format_to(std::back_inserter(out), "{}{}", i == 0 ? "" : ",", values[i]);
  out.push_back(']');
}

}  // namespace quern::server
