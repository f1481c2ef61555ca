#pragma once

#include <optional>
#include <string_view>

#include "server/json_fields.h"
#include "text/output_grammar.h"

namespace quern::server {

/// What the members of a request say about the form of its content: OpenAI's response_format, vLLM's structured_outputs and guided_json,
/// guided_regex, guided_choice, guided_grammar. At most one of them; faults are left in `fields`.
std::optional<text::ContentFormat> read_content_format(JsonFields& fields);

/// One format object, as response_format has it, or with name, schema and strict beside its type, as Responses' text.format and Messages'
/// output_format have it: {"type": "text" | "json_object" | "json_schema" | "regex" | "grammar" ...}. `name` is where it stands in the request.
std::optional<text::ContentFormat> read_format_object(const Json& format, std::string_view name, JsonFields& fields);

}  // namespace quern::server
