#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"

namespace quern::text {

/// The text of a message's content: a string, or a list of text parts (of any of OpenAI's names), concatenated.
/// Errors: kInvalidArgument, kUnsupported for a part that is no text; they name `field` and the part.
Result<std::string> content_text(const Json& content, const std::string& field);

/// Makes text of a request harmless: no added-token literal in what it returns is recognised as a token.
using EscapeText = std::function<std::string(std::string_view)>;

/// The messages of a chat request in the one form that templates get to see:
///   role       system, user, assistant or tool; developer becomes system
///   system     all of them merged, with an empty line between, into one in front
///   content    a string; lists of text parts are concatenated. Absent in an assistant message without content
///   tool_calls arguments are objects, also where the request has JSON in a string; absent instead of empty
///   tool       results that follow an assistant message stand in the order of its calls, since templates do not show the ids
///   reasoning  as `reasoning_content`, whether the request calls it that or `reasoning`; absent instead of null
/// Members that we do not know are kept, unless null. Errors: kInvalidArgument, kUnsupported for what is not text; the field names the
/// member.
Result<Json> normalize_messages(const Json& messages);

/// null, or the tools as they are when they are an array of objects.
Result<Json> normalize_tools(const Json& tools);

/// All strings and keys of `value` escaped.
Json escape_strings(const Json& value, const EscapeText& escape);
/// All strings of normalized messages escaped, but for the think and tool-call tags in the content of assistant messages,
/// which the template parses.
Json escape_messages(const Json& messages, const EscapeText& escape);

}  // namespace quern::text
