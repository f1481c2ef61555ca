#include "text/tool_schemas.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>

namespace quern::text {

unsigned types_of_name(std::string_view name) {
  if (name == "string") return kJsonString;
  if (name == "integer") return kJsonInteger;
  if (name == "number") return kJsonNumber | kJsonInteger;
  if (name == "boolean") return kJsonBoolean;
  if (name == "null") return kJsonNull;
  if (name == "array") return kJsonArray;
  if (name == "object") return kJsonObject;
  return 0;
}

namespace {

constexpr int kMaxSchemaDepth = 32;  // of references and combinations; deeper ones allow anything

Error field_error(std::string field, std::string_view message) {
  return Error{ErrorCode::kInvalidArgument, fmt::format("{}: {}", field, message), field};
}

/// What it does not know allows anything.
unsigned known_types(std::string_view name) {
  const unsigned types = types_of_name(name);
  return types == 0 ? unsigned{kJsonAny} : types;
}

unsigned type_of_value(const Json& value) {
  switch (value.type()) {
    case Json::value_t::string: return kJsonString;
    case Json::value_t::boolean: return kJsonBoolean;
    case Json::value_t::null: return kJsonNull;
    case Json::value_t::array: return kJsonArray;
    case Json::value_t::object: return kJsonObject;
    case Json::value_t::number_float: {
      const double number = value.get<double>();
      return std::trunc(number) == number ? kJsonNumber | kJsonInteger : unsigned{kJsonNumber};
    }
    default: return kJsonInteger | kJsonNumber;
  }
}

const Json* member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

/// "#/$defs/Place" inside `root`.
const Json* resolve(const Json& root, const std::string& reference) {
  if (!reference.starts_with("#")) return nullptr;
  const Json::json_pointer pointer = [&] {
    try {
      return Json::json_pointer(reference.substr(1));
    } catch (const Json::exception&) {
      return Json::json_pointer("/ /not/a/pointer");
    }
  }();
  return root.contains(pointer) ? &root.at(pointer) : nullptr;
}

unsigned types_of_schema(const Json& root, const Json& schema, int depth) {
  if (depth > kMaxSchemaDepth || !schema.is_object()) return kJsonAny;
  unsigned types = kJsonAny;
  if (const Json* type = member(schema, "type")) {
    types = type->is_string() ? known_types(type->get_ref<const std::string&>()) : type->is_array() && !type->empty() ? 0 : kJsonAny;
    if (type->is_array())
      for (const Json& one : *type) types |= one.is_string() ? known_types(one.get_ref<const std::string&>()) : kJsonAny;
  }
  if (const Json* reference = member(schema, "$ref"); reference != nullptr && reference->is_string()) {
    const Json* target = resolve(root, reference->get<std::string>());
    if (target != nullptr) types &= types_of_schema(root, *target, depth + 1);
  }
  if (const Json* constant = member(schema, "const")) types &= type_of_value(*constant);
  if (const Json* values = member(schema, "enum"); values != nullptr && values->is_array() && !values->empty()) {
    unsigned some = 0;
    for (const Json& value : *values) some |= type_of_value(value);
    types &= some;
  }
  for (const char* name : {"anyOf", "oneOf"}) {
    const Json* branches = member(schema, name);
    if (branches == nullptr || !branches->is_array() || branches->empty()) continue;
    unsigned some = 0;
    for (const Json& branch : *branches) some |= types_of_schema(root, branch, depth + 1);
    types &= some;
  }
  if (const Json* parts = member(schema, "allOf"); parts != nullptr && parts->is_array()) {
    for (const Json& part : *parts) types &= types_of_schema(root, part, depth + 1);
  }
  if (const Json* nullable = member(schema, "nullable"); nullable != nullptr && *nullable == true) types |= kJsonNull;
  return types != 0 ? types : kJsonAny;  // nothing would be right
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlank);
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
}

std::optional<std::string_view> python_literal(std::string_view text, unsigned types) {
  if (text == "True" && (types & kJsonBoolean) != 0) return "true";
  if (text == "False" && (types & kJsonBoolean) != 0) return "false";
  if (text == "None" && (types & kJsonNull) != 0) return "null";
  return std::nullopt;
}

}  // namespace

Result<ToolSchemas> ToolSchemas::parse(const Json& tools) {
  ToolSchemas schemas;
  if (tools.is_null()) return schemas;
  if (!tools.is_array()) return field_error("tools", "expected a list of tools");
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string field = fmt::format("tools[{}]", i);
    if (const Json* type = member(tools[i], "type"); type != nullptr && *type != "function") {
      Error error = field_error(field + ".type", "only \"function\" is supported");
      error.code = ErrorCode::kUnsupported;
      return error;
    }
    const Json* function = member(tools[i], "function");
    if (function == nullptr || !function->is_object()) return field_error(field + ".function", "expected an object with name and parameters");
    const Json* name = member(*function, "name");
    if (name == nullptr || !name->is_string() || name->get_ref<const std::string&>().empty())
      return field_error(field + ".function.name", "expected a string");
    const Json* parameters = member(*function, "parameters");
    if (parameters != nullptr && !parameters->is_object() && !parameters->is_null())
      return field_error(field + ".function.parameters", "expected a JSON schema, an object");
    if (!schemas.parameters_.emplace(name->get<std::string>(), parameters != nullptr ? *parameters : Json()).second)
      return field_error(field + ".function.name", fmt::format("there are two tools \"{}\"", name->get<std::string>()));
  }
  return schemas;
}

const Json* ToolSchemas::find(std::string_view function, std::string_view parameter) const {
  const auto found = parameters_.find(function);
  if (found == parameters_.end()) return nullptr;
  const Json* properties = member(found->second, "properties");
  if (properties == nullptr || !properties->is_object()) return nullptr;
  const auto schema = properties->find(parameter);
  return schema == properties->end() ? nullptr : &*schema;
}

bool ToolSchemas::has_parameter(std::string_view function, std::string_view parameter) const { return find(function, parameter) != nullptr; }

unsigned ToolSchemas::types_of(std::string_view function, std::string_view parameter) const {
  const Json* schema = find(function, parameter);
  return schema == nullptr ? kJsonAny : types_of_schema(parameters_.find(function)->second, *schema, 0);
}

std::string json_value(std::string_view text, unsigned types, bool complete) {
  const std::string_view value = trimmed(text);
  if (const auto literal = python_literal(value, types)) return std::string(*literal);
  const auto parsed = parse_json(value, "");
  const unsigned found = parsed && !parsed->is_string() ? type_of_value(*parsed) : 0;
  if ((found & types) != 0) return std::string(value);  // as written: numbers keep their digits
  if ((types & kJsonString) == 0) {
    if (parsed) return std::string(value);  // of another type than allowed, but a value
    if (!complete) return {};
  }
  std::string quoted = "\"";
  append_json_escaped(quoted, text);
  return quoted + "\"";
}

}  // namespace quern::text
