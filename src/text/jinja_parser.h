#pragma once

#include <string_view>

#include "base/result.h"
#include "text/jinja_ast.h"

namespace quern::text::jinja {

/// The statements of a template. Unknown tags, filters and tests are errors here, not when rendering.
/// Errors: kInvalidArgument, "line 12: ...".
Result<Block> parse_template(std::string_view source);

}  // namespace quern::text::jinja
