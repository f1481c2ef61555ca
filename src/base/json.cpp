#include "base/json.h"

#include <fmt/format.h>

#include <iterator>

#include "base/file.h"

namespace quern {
namespace {

constexpr int kMaxDepth = 200;

template <class AnyJson>
Result<AnyJson> parse(std::string_view text, std::string_view what) {
  bool too_deep = false;
  const typename AnyJson::parser_callback_t limit_depth = [&](int depth, typename AnyJson::parse_event_t, AnyJson&) {
    too_deep = too_deep || depth > kMaxDepth;
    return !too_deep;
  };
  try {
    AnyJson value = AnyJson::parse(text.begin(), text.end(), limit_depth);
    if (too_deep) return invalid_argument("{}: JSON is nested deeper than {} levels", what, kMaxDepth);
    return value;
  } catch (const typename AnyJson::exception& e) {
    // nlohmann prefixes "[json.exception...] "; the rest is a plain sentence.
    std::string_view reason = e.what();
    if (const size_t end = reason.find("] "); end != std::string_view::npos) reason.remove_prefix(end + 2);
    return invalid_argument("{}: not valid JSON: {}", what, reason);
  }
}

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view what) { return parse<Json>(text, what); }

Result<SortedJson> parse_sorted_json(std::string_view text, std::string_view what) { return parse<SortedJson>(text, what); }

Result<Json> read_json_file(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(path));
  return parse_json(text, path.string());
}

std::string dump_json(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

void append_json_escaped(std::string& out, std::string_view text) {
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
}

}  // namespace quern
