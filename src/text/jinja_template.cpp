#include "text/jinja_template.h"

#include "text/jinja_interpreter.h"
#include "text/jinja_parser.h"

namespace quern::text::jinja {

struct Template::Tree {
  Block block;
};

Result<Template> Template::parse(std::string_view source) {
  ASSIGN_OR_RETURN(Block block, parse_template(source));
  return Template(std::make_shared<const Tree>(Tree{std::move(block)}));
}

Result<std::string> Template::render(const Json& context, const RenderLimits& limits) const {
  CHECK(context.is_object());
  return run_template(tree_->block, context, limits);
}

}  // namespace quern::text::jinja
