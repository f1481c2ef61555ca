#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "text/grammar.h"
#include "text/json_grammar.h"

namespace quern::text {

/// Values that satisfy the schema, as JSON (json_schema.h says what is understood). Properties come in the order in which the schema lists
/// them, then those that it only requires, then others; names and texts of enum, const and pattern have only the escapes that they need.
/// `field` names the request's field in errors.
Result<NodeId> json_schema_node(Grammar& grammar, const Json& schema, std::string_view field, const JsonStyle& style);

/// The parameters of a tool call that satisfy the function's schema, in the form of model-spec.md 4.4:
///   <parameter=NAME>\nVALUE\n</parameter>\n ...
/// Strings stand as they are, all other values as JSON, so that ToolCallParser reads arguments that satisfy the schema.
Result<NodeId> tool_arguments_node(Grammar& grammar, const Json& schema, std::string_view field);
/// Any parameters in that form.
NodeId any_tool_arguments_node(Grammar& grammar);

}  // namespace quern::text
