#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "text/decimal_grammar.h"
#include "text/finite_automaton.h"
#include "text/tool_schemas.h"

namespace quern::text {

/// A schema and where it stands, as in "#/properties/name".
struct SchemaPlace {
  const Json* schema = nullptr;
  std::string path;
};
/// Schemas that all have to hold.
using Conjunction = std::vector<SchemaPlace>;

/// What one schema says of an object's members.
struct ObjectPart {
  std::vector<std::pair<std::string, SchemaPlace>> properties;
  std::vector<std::pair<std::string, SchemaPlace>> patterns;
  std::optional<SchemaPlace> additional;
};
/// What one schema says of a list's items.
struct ArrayPart {
  std::vector<SchemaPlace> prefix;
  std::optional<SchemaPlace> items;
};

/// Values in a form without alternatives: everything in it has to hold.
struct SchemaShape {
  unsigned types = kJsonAny;
  std::optional<std::vector<Json>> values;  // enum and const
  DecimalRange numbers;
  int64_t min_length = 0;
  std::optional<int64_t> max_length;
  std::vector<std::pair<std::string, std::string>> patterns;  // of strings, searched for; and the path of the keyword
  std::vector<ObjectPart> objects;
  std::vector<std::string> required;
  int64_t min_properties = 0;
  std::optional<int64_t> max_properties;
  std::vector<ArrayPart> arrays;
  int64_t min_items = 0;
  std::optional<int64_t> max_items;
};

/// One thread. Reads JSON schemas: resolves references, merges allOf, multiplies anyOf and oneOf out. What constrains values and is not understood is an
/// error that names the keyword and its place; annotations and unknown keywords are ignored, as the standard has it.
/// oneOf is read as anyOf. Where `properties` stands without additionalProperties no others are written, where prefixItems stands without
/// items no more of them: all that is allowed still satisfies the schema.
class SchemaReader {
 public:
  /// `field` names the request's field in errors. Borrows `root`.
  SchemaReader(const Json& root, std::string field) : root_(root), field_(std::move(field)) {}

  [[nodiscard]] SchemaPlace root() const { return {&root_, "#"}; }
  /// The alternatives of values that satisfy all of them; none when nothing does.
  [[nodiscard]] Result<std::vector<SchemaShape>> shapes(const Conjunction& schemas) const;
  /// Whether a value satisfies the shape, or all schemas; for enum beside other keywords.
  [[nodiscard]] Result<bool> matches(const Json& value, const SchemaShape& shape) const;
  [[nodiscard]] Result<bool> matches(const Json& value, const Conjunction& schemas) const;

  /// What a member of this name has to satisfy; nothing when the shape does not allow it.
  [[nodiscard]] Result<std::optional<Conjunction>> member(const SchemaShape& shape, std::string_view name) const;
  /// Members that no schema lists and no pattern matches; nothing when there may be none.
  [[nodiscard]] std::optional<Conjunction> additional(const SchemaShape& shape) const;
  /// The item at `index`; nothing when there may be none.
  [[nodiscard]] std::optional<Conjunction> item(const SchemaShape& shape, size_t index) const;

  [[nodiscard]] Error error(std::string_view path, std::string_view what) const;
  [[nodiscard]] Error unsupported(std::string_view path, std::string_view what) const;

 private:
  using Shapes = std::vector<SchemaShape>;
  using References = std::vector<const Json*>;
  Result<void> apply(const SchemaPlace& place, Shapes& shapes, References& open) const;
  Result<void> apply_keyword(const SchemaPlace& place, const std::string& key, const Json& value, Shapes& shapes, References& open) const;
  Result<void> apply_any(const SchemaPlace& place, const std::string& key, const Json& branches, Shapes& shapes, References& open) const;
  Result<void> apply_format(const std::string& path, const Json& value, Shapes& shapes) const;
  [[nodiscard]] Result<SchemaPlace> resolve(const std::string& path, const Json& reference) const;
  [[nodiscard]] Result<int64_t> count(const std::string& path, const Json& value) const;

  /// Whether `text` has a match of the pattern, which stands at `path`.
  [[nodiscard]] Result<bool> pattern_matches(const std::string& pattern, const std::string& path, std::string_view text) const;

  const Json& root_;
  std::string field_;
  mutable std::map<std::string, Dfa> patterns_;  // that were matched with
};

}  // namespace quern::text
