#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "text/jinja_value.h"

namespace quern::text::jinja {

/// A Jinja template as chat templates use it, in the environment that Hugging Face transformers gives them:
/// trim_blocks, lstrip_blocks, break and continue, {% generation %}, raise_exception, strftime_now, tojson without HTML escapes.
/// Not supported: inheritance, includes, imports, recursive loops, string formatting with % and format().
/// Immutable; any number of threads may render at the same time.
class Template {
 public:
  /// Errors: kInvalidArgument, "line 12: ..."; unknown tags, filters and tests are found here.
  static Result<Template> parse(std::string_view source);
  /// The text with the members of the object `context` as variables.
  /// Errors: kInvalidArgument; exactly the template's words when it calls raise_exception, else "template line 12: ...".
  [[nodiscard]] Result<std::string> render(const Json& context, const RenderLimits& limits = {}) const;

 private:
  struct Tree;
  explicit Template(std::shared_ptr<const Tree> tree) : tree_(std::move(tree)) {}
  std::shared_ptr<const Tree> tree_;
};

}  // namespace quern::text::jinja
