#pragma once

#include <string>

#include "base/json.h"
#include "base/result.h"
#include "text/jinja_ast.h"

namespace quern::text::jinja {

/// Runs a parsed template with the members of `context`, an object, as its variables.
/// Errors: kInvalidArgument; what raise_exception says comes as it is, everything else as "template line 12: ...".
Result<std::string> run_template(const Block& block, const Json& context, const RenderLimits& limits);

}  // namespace quern::text::jinja
