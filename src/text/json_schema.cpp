#include "text/json_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "text/json_formats.h"
#include "text/regex_grammar.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr size_t kMaxShapes = 256;
constexpr size_t kMaxOpenReferences = 64;

constexpr std::array<std::string_view, 18> kUnsupported{
    "not",          "if",           "then",          "else",        "dependentRequired",  "dependentSchemas",
    "dependencies", "contains",     "minContains",   "maxContains", "propertyNames",      "$dynamicRef",
    "$recursiveRef", "extends",     "disallow",      "divisibleBy", "unevaluatedProperties", "unevaluatedItems"};

unsigned type_of_value(const Json& value) {
  if (value.is_string()) return kJsonString;
  if (value.is_boolean()) return kJsonBoolean;
  if (value.is_null()) return kJsonNull;
  if (value.is_array()) return kJsonArray;
  if (value.is_object()) return kJsonObject;
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return std::trunc(number) == number ? unsigned{kJsonInteger} : unsigned{kJsonNumber};
  }
  return kJsonInteger;
}

int64_t num_characters(std::string_view utf8) {
  return std::ranges::count_if(utf8, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

/// One step of a JSON pointer, with its escapes.
std::string pointer_step(std::string_view key) {
  std::string out;
  for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

}  // namespace

Result<bool> SchemaReader::pattern_matches(const std::string& pattern, const std::string& path, std::string_view text) const {
  auto found = patterns_.find(pattern);
  if (found == patterns_.end()) {
    auto dfa = regex_dfa(pattern, CharForm::kText, true);
    if (!dfa) return error(path, fmt::format("cannot be used: {}", dfa.error().message));
    found = patterns_.emplace(pattern, *std::move(dfa)).first;
  }
  return found->second.accepts(text);
}

Error SchemaReader::error(std::string_view path, std::string_view what) const {
  return Error{ErrorCode::kInvalidArgument, fmt::format("{}: the schema at {} {}", field_, path, what), field_};
}
Error SchemaReader::unsupported(std::string_view path, std::string_view what) const {
  Error out = error(path, what);
  out.code = ErrorCode::kUnsupported;
  return out;
}

Result<std::vector<SchemaShape>> SchemaReader::shapes(const Conjunction& schemas) const {
  Shapes out(1);
  for (const SchemaPlace& place : schemas) {
    References open;
    RETURN_IF_ERROR(apply(place, out, open));
  }
  std::erase_if(out, [](const SchemaShape& s) { return s.types == 0; });
  return out;
}

Result<void> SchemaReader::apply(const SchemaPlace& place, Shapes& shapes, References& open) const {
  const Json& schema = *place.schema;
  if (schema.is_boolean()) {
    if (schema == false) shapes.clear();
    return {};
  }
  if (!schema.is_object()) return error(place.path, "has to be an object, true or false");
  Shapes null_shapes;
  if (const auto nullable = schema.find("nullable"); nullable != schema.end() && *nullable == true) {
    for (SchemaShape shape : shapes) {
      shape.types &= kJsonNull;
      if (shape.types != 0) null_shapes.push_back(std::move(shape));
    }
  }
  for (const auto& [key, value] : schema.items()) RETURN_IF_ERROR(apply_keyword(place, key, value, shapes, open));
  // Keywords of members and items belong together.
  const auto member = [&](const char* name) {
    const auto found = schema.find(name);
    return found == schema.end() ? nullptr : &*found;
  };
  const auto at = [&](std::string_view key) { return fmt::format("{}/{}", place.path, key); };
  ObjectPart object;
  bool is_object = false;
  for (const char* key : {"properties", "patternProperties"}) {
    const Json* list = member(key);
    if (list == nullptr) continue;
    if (!list->is_object()) return error(at(key), "has to be an object");
    is_object = true;
    for (const auto& [name, one] : list->items()) {
      const SchemaPlace where{&one, fmt::format("{}/{}", at(key), pointer_step(name))};
      (std::string_view(key) == "properties" ? object.properties : object.patterns).emplace_back(name, where);
    }
  }
  static const Json kNothing = false;
  if (const Json* additional = member("additionalProperties")) {
    is_object = true;
    object.additional = SchemaPlace{additional, at("additionalProperties")};
  } else if (const Json* unevaluated = member("unevaluatedProperties")) {
    is_object = true;
    object.additional = SchemaPlace{unevaluated, at("unevaluatedProperties")};
  }
  ArrayPart array;
  bool is_array = false;
  const Json* prefix = member("prefixItems");
  const Json* items = member("items");
  if (prefix == nullptr && items != nullptr && items->is_array()) {  // as it was written up to 2019
    prefix = items;
    items = member("additionalItems");
  }
  if (prefix != nullptr) {
    if (!prefix->is_array()) return error(at("prefixItems"), "has to be a list");
    is_array = true;
    for (size_t i = 0; i < prefix->size(); ++i) array.prefix.push_back({&(*prefix)[i], fmt::format("{}/{}", at("prefixItems"), i)});
  }
  if (items == nullptr) items = member("unevaluatedItems");
  if (items != nullptr) {
    is_array = true;
    array.items = SchemaPlace{items, at("items")};
  } else if (prefix != nullptr) {
    array.items = SchemaPlace{&kNothing, place.path};
  }
  for (SchemaShape& shape : shapes) {
    if (is_object) shape.objects.push_back(object);
    if (is_array) shape.arrays.push_back(array);
  }
  shapes.insert(shapes.end(), std::make_move_iterator(null_shapes.begin()), std::make_move_iterator(null_shapes.end()));
  return {};
}

Result<void> SchemaReader::apply_keyword(const SchemaPlace& place, const std::string& key, const Json& value, Shapes& shapes,
                                         References& open) const {
  const std::string path = fmt::format("{}/{}", place.path, pointer_step(key));
  const auto each = [&](const auto& change) {
    for (SchemaShape& shape : shapes) change(shape);
  };
  if (key == "$ref") {
    ASSIGN_OR_RETURN(const SchemaPlace target, resolve(path, value));
    if (std::ranges::find(open, target.schema) != open.end()) return error(path, "refers to itself with nothing in between");
    if (open.size() >= kMaxOpenReferences) return error(path, fmt::format("is reached through more than {} references", kMaxOpenReferences));
    open.push_back(target.schema);
    RETURN_IF_ERROR(apply(target, shapes, open));
    open.pop_back();
  } else if (key == "allOf") {
    if (!value.is_array() || value.empty()) return error(path, "has to be a list of schemas");
    for (size_t i = 0; i < value.size(); ++i) RETURN_IF_ERROR(apply({&value[i], fmt::format("{}/{}", path, i)}, shapes, open));
  } else if (key == "anyOf" || key == "oneOf") {
    return apply_any(place, key, value, shapes, open);
  } else if (key == "type") {
    unsigned types = 0;
    const auto add = [&](const Json& name) {
      const unsigned bits = name.is_string() ? types_of_name(name.get_ref<const std::string&>()) : 0;
      types |= bits;
      return bits != 0;
    };
    bool known = !value.is_array() || !value.empty();
    if (value.is_array()) {
      for (const Json& name : value) known = add(name) && known;
    } else {
      known = add(value);
    }
    if (!known) return error(path, fmt::format("is {}; types are string, number, integer, boolean, null, array and object", dump_json(value)));
    each([&](SchemaShape& s) { s.types &= types; });
  } else if (key == "enum" || key == "const") {
    if (key == "enum" && (!value.is_array() || value.empty())) return error(path, "has to be a list of values");
    const std::vector<Json> values = key == "const" ? std::vector<Json>{value} : std::vector<Json>(value.begin(), value.end());
    each([&](SchemaShape& s) {
      if (!s.values) {
        s.values = values;
      } else {
        std::erase_if(*s.values, [&](const Json& v) { return std::ranges::find(values, v) == values.end(); });
      }
    });
  } else if (key == "minLength" || key == "maxLength" || key == "minItems" || key == "maxItems" || key == "minProperties" || key == "maxProperties") {
    ASSIGN_OR_RETURN(const int64_t n, count(path, value));
    each([&](SchemaShape& s) {
      int64_t& least = key == "minLength" ? s.min_length : key == "minItems" ? s.min_items : s.min_properties;
      std::optional<int64_t>& most = key == "maxLength" ? s.max_length : key == "maxItems" ? s.max_items : s.max_properties;
      if (key.starts_with("min")) {
        least = std::max(least, n);
      } else {
        most = std::min(most.value_or(n), n);
      }
    });
  } else if (key == "minimum" || key == "maximum" || key == "exclusiveMinimum" || key == "exclusiveMaximum") {
    const bool is_least = key.ends_with("inimum");
    bool exclusive = key.starts_with("exclusive");
    if (exclusive && value.is_boolean()) return {};  // as it was written in draft 4: see below
    if (!value.is_number()) return error(path, "has to be a number");
    if (!exclusive) {
      const auto flag = place.schema->find(is_least ? "exclusiveMinimum" : "exclusiveMaximum");
      exclusive = flag != place.schema->end() && *flag == true;
    }
    const DecimalBound bound{decimal_of(value), exclusive};
    each([&](SchemaShape& s) {
      std::optional<DecimalBound>& old = is_least ? s.numbers.least : s.numbers.most;
      const int order = old ? compare(bound.value, old->value) * (is_least ? 1 : -1) : 1;
      if (order > 0 || (order == 0 && bound.exclusive)) old = bound;
    });
  } else if (key == "multipleOf") {
    if (!value.is_number() || !(value.get<double>() > 0)) return error(path, "has to be a number above 0");
    each([&](SchemaShape& s) { s.numbers.multiples_of.push_back(decimal_of(value)); });
  } else if (key == "pattern") {
    if (!value.is_string()) return error(path, "has to be a string");
    each([&](SchemaShape& s) { s.patterns.emplace_back(value.get<std::string>(), path); });
  } else if (key == "format") {
    return apply_format(path, value, shapes);
  } else if (key == "required") {
    if (!value.is_array()) return error(path, "has to be a list of names");
    for (const Json& name : value) {
      if (!name.is_string()) return error(path, "has to be a list of names");
      each([&](SchemaShape& s) {
        if (std::ranges::find(s.required, name.get_ref<const std::string&>()) == s.required.end()) s.required.push_back(name.get<std::string>());
      });
    }
  } else if (key == "uniqueItems") {
    const auto most = place.schema->find("maxItems");
    const bool holds_anyway = most != place.schema->end() && most->is_number() && *most <= 1;
    if (value == true && !holds_anyway) return unsupported(path, "is not supported: the items of a list cannot be kept apart while they are written");
  } else if (key == "unevaluatedProperties" || key == "unevaluatedItems") {
    if (!value.is_boolean()) return unsupported(path, "is only supported as true or false");
  } else if (std::ranges::find(kUnsupported, key) != kUnsupported.end()) {
    return unsupported(path, fmt::format("uses the keyword \"{}\", which is not supported", key));
  }
  return {};
}

Result<void> SchemaReader::apply_any(const SchemaPlace& place, const std::string& key, const Json& branches, Shapes& shapes, References& open) const {
  const std::string path = fmt::format("{}/{}", place.path, key);
  if (!branches.is_array() || branches.empty()) return error(path, "has to be a list of schemas");
  Shapes out;
  for (size_t i = 0; i < branches.size(); ++i) {
    Shapes some = shapes;
    RETURN_IF_ERROR(apply({&branches[i], fmt::format("{}/{}", path, i)}, some, open));
    std::erase_if(some, [](const SchemaShape& s) { return s.types == 0; });
    out.insert(out.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
    if (out.size() > kMaxShapes) return unsupported(path, fmt::format("has more than {} combinations of alternatives", kMaxShapes));
  }
  shapes = std::move(out);
  return {};
}

Result<void> SchemaReader::apply_format(const std::string& path, const Json& value, Shapes& shapes) const {
  if (!value.is_string()) return error(path, "has to be a string");
  const auto& format = value.get_ref<const std::string&>();
  if (is_free_format(format)) return {};
  if (format == "int32" || format == "int64") {
    const int64_t least = format == "int32" ? INT32_MIN : INT64_MIN, most = format == "int32" ? INT32_MAX : INT64_MAX;
    const Json bounds = {{"minimum", least}, {"maximum", most}};
    References open;
    // A number's format says nothing of other types, as bounds do not.
    for (const auto& [key, bound] : bounds.items()) RETURN_IF_ERROR(apply_keyword({&bounds, path}, key, bound, shapes, open));
    return {};
  }
  const std::optional<std::string> pattern = format_pattern(format);
  if (!pattern) return unsupported(path, fmt::format("uses the format \"{}\", which is not supported; those that are: {}", format, known_formats()));
  for (SchemaShape& shape : shapes) shape.patterns.emplace_back(*pattern, path);
  return {};
}

Result<SchemaPlace> SchemaReader::resolve(const std::string& path, const Json& reference) const {
  if (!reference.is_string()) return error(path, "has to be a string");
  const auto& text = reference.get_ref<const std::string&>();
  if (text == "#") return root();
  if (!text.starts_with("#/")) return unsupported(path, fmt::format("refers to \"{}\"; only references within the schema, \"#/...\", are supported", text));
  std::string decoded;
  for (size_t i = 1; i < text.size(); ++i) {
    unsigned byte = 0;
    if (text[i] == '%' && i + 2 < text.size() && std::sscanf(text.substr(i + 1, 2).c_str(), "%2x", &byte) == 1) {
      decoded += static_cast<char>(byte);
      i += 2;
    } else {
      decoded += text[i];
    }
  }
  const Json* at = &root_;
  for (size_t begin = 1; begin <= decoded.size();) {
    const size_t end = std::min(decoded.find('/', begin), decoded.size());
    std::string step = decoded.substr(begin, end - begin);
    for (size_t tilde = step.find('~'); tilde != std::string::npos; tilde = step.find('~', tilde + 1))
      step.replace(tilde, 2, step.compare(tilde, 2, "~1") == 0 ? "/" : "~");
    begin = end + 1;
    if (at->is_object() && at->contains(step)) {
      at = &at->at(step);
    } else if (at->is_array() && !step.empty() && step.size() < 9 && step.find_first_not_of("0123456789") == std::string::npos &&
               std::stoul(step) < at->size()) {
      at = &(*at)[std::stoul(step)];
    } else {
      return error(path, fmt::format("refers to \"{}\", which is not there", text));
    }
  }
  return SchemaPlace{at, text};
}

Result<int64_t> SchemaReader::count(const std::string& path, const Json& value) const {
  if (value.is_number()) {
    const double number = value.get<double>();
    if (number >= 0 && number == std::trunc(number)) return static_cast<int64_t>(std::min(number, 1e9));
  }
  return error(path, "has to be a whole number, at least 0");
}

Result<std::optional<Conjunction>> SchemaReader::member(const SchemaShape& shape, std::string_view name) const {
  Conjunction out;
  for (const ObjectPart& part : shape.objects) {
    bool said = false;
    for (const auto& [property, place] : part.properties) {
      if (property == name) out.push_back(place), said = true;
    }
    for (const auto& [pattern, place] : part.patterns) {
      ASSIGN_OR_RETURN(const bool matched, pattern_matches(pattern, place.path, name));
      if (matched) out.push_back(place), said = true;
    }
    if (said || !part.additional) continue;
    if (*part.additional->schema == false) return std::optional<Conjunction>();
    out.push_back(*part.additional);
  }
  return std::optional(std::move(out));
}

std::optional<Conjunction> SchemaReader::additional(const SchemaShape& shape) const {
  Conjunction out;
  bool said = false, closed = false;
  for (const ObjectPart& part : shape.objects) {
    closed = closed || !part.properties.empty() || !part.patterns.empty();
    if (!part.additional) continue;
    if (*part.additional->schema == false) return std::nullopt;
    said = true;
    out.push_back(*part.additional);
  }
  if (!said && closed) return std::nullopt;
  return out;
}

std::optional<Conjunction> SchemaReader::item(const SchemaShape& shape, size_t index) const {
  Conjunction out;
  for (const ArrayPart& part : shape.arrays) {
    if (index < part.prefix.size()) {
      out.push_back(part.prefix[index]);
    } else if (part.items) {
      if (*part.items->schema == false) return std::nullopt;
      out.push_back(*part.items);
    }
  }
  return out;
}

Result<bool> SchemaReader::matches(const Json& value, const Conjunction& schemas) const {
  ASSIGN_OR_RETURN(const Shapes alternatives, shapes(schemas));
  for (const SchemaShape& shape : alternatives) {
    ASSIGN_OR_RETURN(const bool matched, matches(value, shape));
    if (matched) return true;
  }
  return false;
}

Result<bool> SchemaReader::matches(const Json& value, const SchemaShape& shape) const {
  if ((type_of_value(value) & shape.types) == 0) return false;
  if (shape.values && std::ranges::find(*shape.values, value) == shape.values->end()) return false;
  if (value.is_number()) {
    const Decimal number = decimal_of(value);
    const auto within = [&](const std::optional<DecimalBound>& bound, int sign) {
      if (!bound) return true;
      const int order = compare(number, bound->value) * sign;
      return order > 0 || (order == 0 && !bound->exclusive);
    };
    if (!within(shape.numbers.least, 1) || !within(shape.numbers.most, -1)) return false;
    if (!shape.numbers.multiples_of.empty()) {
      DecimalRange multiples;
      multiples.multiples_of = shape.numbers.multiples_of;
      ASSIGN_OR_RETURN(const Dfa dfa, decimal_dfa(multiples, false));
      return dfa.accepts(fmt::format("{}{}{}{}", number.negative ? "-" : "", number.whole, number.fraction.empty() ? "" : ".", number.fraction));
    }
    return true;
  }
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const int64_t length = num_characters(text);
    if (length < shape.min_length || (shape.max_length && length > *shape.max_length)) return false;
    for (const auto& [pattern, path] : shape.patterns) {
      ASSIGN_OR_RETURN(const bool matched, pattern_matches(pattern, path, text));
      if (!matched) return false;
    }
    return true;
  }
  const auto size = static_cast<int64_t>(value.size());
  if (value.is_array()) {
    if (size < shape.min_items || (shape.max_items && size > *shape.max_items)) return false;
    for (size_t i = 0; i < value.size(); ++i) {
      const std::optional<Conjunction> schemas = item(shape, i);
      if (!schemas) return false;
      ASSIGN_OR_RETURN(const bool matched, matches(value[i], *schemas));
      if (!matched) return false;
    }
  }
  if (value.is_object()) {
    if (size < shape.min_properties || (shape.max_properties && size > *shape.max_properties)) return false;
    for (const std::string& name : shape.required)
      if (!value.contains(name)) return false;
    for (const auto& [name, one] : value.items()) {
      ASSIGN_OR_RETURN(const std::optional<Conjunction> schemas, member(shape, name));
      if (!schemas) return false;
      ASSIGN_OR_RETURN(const bool matched, matches(one, *schemas));
      if (!matched) return false;
    }
  }
  return true;
}

}  // namespace quern::text
