#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/result.h"

namespace quern {

/// Keeps the order of keys: tool schemas must render in the order in which the client wrote them.
using Json = nlohmann::ordered_json;

/// Parses one JSON document. `what` names it in the error. Nesting deeper than 200 levels is refused.
Result<Json> parse_json(std::string_view text, std::string_view what);
Result<Json> read_json_file(const std::filesystem::path& path);

/// For objects with very many members, such as a tokenizer's vocabulary: `Json` looks for a key by walking all keys.
using SortedJson = nlohmann::json;
Result<SortedJson> parse_sorted_json(std::string_view text, std::string_view what);

/// Compact text; invalid UTF-8 becomes U+FFFD instead of an exception.
std::string dump_json(const Json& value);
/// Appends `text`, UTF-8, with what JSON strings escape; without quotes. One pass, for paths that every token takes.
void append_json_escaped(std::string& out, std::string_view text);

}  // namespace quern
