#include "server/json_fields.h"

#include <cmath>

namespace quern::server {

std::string_view json_kind(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::object: return "an object";
    case Json::value_t::array: return "a list";
    case Json::value_t::string: return "a string";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned: return "an integer";
    case Json::value_t::number_float: return "a number";
    case Json::value_t::binary:
    case Json::value_t::discarded: return "no value";
  }
  CHECK_UNREACHABLE();
}

std::optional<int64_t> json_integer(const Json& value, int64_t min, int64_t max) {
  if (const auto* big = value.get_ptr<const Json::number_unsigned_t*>()) {
    if (*big > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  }
  int64_t number = 0;
  if (value.is_number_integer()) {
    number = value.get<int64_t>();
  } else if (const auto* real = value.get_ptr<const Json::number_float_t*>()) {
    // 2^53 bounds what a double can say exactly, and keeps the cast defined.
    if (!(std::abs(*real) <= 9007199254740992.0) || *real != std::trunc(*real)) return std::nullopt;
    number = static_cast<int64_t>(*real);
  } else {
    return std::nullopt;
  }
  if (number < min || number > max) return std::nullopt;
  return number;
}

void FieldLog::add(std::string_view name, Json schema) {
  for (Field& field : fields_) {
    if (field.name != name) continue;
    if (field.schema.empty()) field.schema = std::move(schema);
    return;
  }
  fields_.push_back({std::string(name), std::move(schema)});
}

JsonFields::JsonFields(const Json& object, std::string prefix, FieldLog* log) : object_(object), prefix_(std::move(prefix)), log_(log) {}

/// Bounds that only say what the type can hold are left out.
void JsonFields::log(std::string_view name, const char* type, Json bounds) const {
  if (log_ == nullptr) return;
  Json schema = {{"type", type}};
  for (const auto& [key, value] : bounds.items()) {
    const bool says_nothing = value.is_number_integer() && (value == INT64_MIN || value == INT64_MAX || value == INT32_MIN || value == INT32_MAX);
    if (!says_nothing) schema[key] = value;
  }
  log_->add(name, std::move(schema));
}

const Json* JsonFields::find(std::string_view name) const {
  if (log_ != nullptr) log_->add(name, Json::object());
  return look_up(name);
}

const Json* JsonFields::look_up(std::string_view name) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<double> JsonFields::number(std::string_view name, double min, double max) {
  log(name, "number", {{"minimum", min}, {"maximum", max}});
  const Json* value = look_up(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) {
    fail(name, "expected a number, found {}", json_kind(*value));
    return std::nullopt;
  }
  const double number = value->get<double>();
  if (!(number >= min && number <= max)) {
    fail(name, "expected a number between {} and {}, found {}", min, max, number);
    return std::nullopt;
  }
  return number;
}

std::optional<int64_t> JsonFields::integer(std::string_view name, int64_t min, int64_t max) {
  log(name, "integer", {{"minimum", min}, {"maximum", max}});
  const Json* value = look_up(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = json_integer(*value, min, max);
  if (!number) {
    if (value->is_number()) {
      fail(name, "expected an integer between {} and {}, found {}", min, max, dump_json(*value));
    } else {
      fail(name, "expected an integer, found {}", json_kind(*value));
    }
  }
  return number;
}

std::optional<bool> JsonFields::boolean(std::string_view name) {
  log(name, "boolean");
  const Json* value = look_up(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    fail(name, "expected true or false, found {}", json_kind(*value));
    return std::nullopt;
  }
  return value->get<bool>();
}

std::optional<std::string> JsonFields::string(std::string_view name, size_t max_bytes) {
  log(name, "string");
  const Json* value = look_up(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    fail(name, "expected a string, found {}", json_kind(*value));
    return std::nullopt;
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > max_bytes) {
    fail(name, "the string has {} bytes, at most {} are allowed", text.size(), max_bytes);
    return std::nullopt;
  }
  return text;
}

const Json* JsonFields::object(std::string_view name) {
  log(name, "object");
  const Json* value = look_up(name);
  if (value == nullptr || value->is_object()) return value;
  fail(name, "expected an object, found {}", json_kind(*value));
  return nullptr;
}

const Json* JsonFields::array(std::string_view name) {
  log(name, "array");
  const Json* value = look_up(name);
  if (value == nullptr || value->is_array()) return value;
  fail(name, "expected a list, found {}", json_kind(*value));
  return nullptr;
}

std::optional<std::vector<int32_t>> JsonFields::integers(std::string_view name, int32_t min, int32_t max, size_t max_count) {
  log(name, "array", {{"items", {{"type", "integer"}}}});
  const Json* list = array(name);
  if (list == nullptr) return std::nullopt;
  if (list->size() > max_count) {
    fail(name, "the list has {} members, at most {} are allowed", list->size(), max_count);
    return std::nullopt;
  }
  std::vector<int32_t> numbers;
  numbers.reserve(list->size());
  for (const Json& value : *list) {
    const std::optional<int64_t> number = json_integer(value, min, max);
    if (!number) {
      fail(name, "member {}: expected an integer between {} and {}", numbers.size(), min, max);
      return std::nullopt;
    }
    numbers.push_back(static_cast<int32_t>(*number));
  }
  return numbers;
}

void JsonFields::fail_with(ErrorCode code, std::string_view name, std::string message) {
  if (error_) return;
  std::string field = prefix_ + std::string(name);
  error_ = Error{code, fmt::format("{}: {}", field, message), field};
}

Result<void> JsonFields::status() const {
  if (error_) return *error_;
  return {};
}

}  // namespace quern::server
