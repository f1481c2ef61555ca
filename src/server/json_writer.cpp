#include "server/json_writer.h"

#include <fmt/format.h>

#include <iterator>

#include "base/json.h"
#include "text/utf8.h"

namespace quern::server {

void append_json_string(std::string& out, std::string_view text) {
  std::string repaired;
  if (!text::is_valid_utf8(text)) {
    repaired = text::to_valid_utf8(text);
    text = repaired;
  }
  out.push_back('"');
  append_json_escaped(out, text);
  out.push_back('"');
}

void append_json_integers(std::string& out, std::span<const int32_t> values) {
  out.push_back('[');
  for (size_t i = 0; i < values.size(); ++i) fmt::format_to(std::back_inserter(out), "{}{}", i == 0 ? "" : ",", values[i]);
  out.push_back(']');
}

}  // namespace quern::server
