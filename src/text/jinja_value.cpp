#include "text/jinja_value.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/overloaded.h"
#include "text/jinja_strings.h"

namespace quern::text::jinja {
namespace {

/// Orders two numbers exactly, also int against float; empty for a NaN.
std::optional<int> compare_numbers(const Value& a, const Value& b) {
  const auto sign = [](auto x, auto y) { return x < y ? -1 : x > y ? 1 : 0; };
  if (a.integer() && b.integer()) return sign(*a.integer(), *b.integer());
  const uint64_t* ua = std::get_if<uint64_t>(&a.storage());
  const uint64_t* ub = std::get_if<uint64_t>(&b.storage());
  if (ua && ub) return sign(*ua, *ub);
  if (ua && b.integer()) return 1;
  if (a.integer() && ub) return -1;
  const long double x = ua ? *ua : a.integer() ? *a.integer() : static_cast<long double>(*a.number());  // 64-bit mantissa: exact
  const long double y = ub ? *ub : b.integer() ? *b.integer() : static_cast<long double>(*b.number());
  if (std::isnan(x) || std::isnan(y)) return std::nullopt;
  return sign(x, y);
}

bool keys_equal(const Value& a, const Value& b) {
  if (a.is_string() && b.is_string()) return a.text() == b.text();
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.list() && b.list()) {
    const auto& x = a.list()->items;
    const auto& y = b.list()->items;
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), keys_equal);
  }
  if (a.is_none() && b.is_none()) return true;
  return a.callable() && a.callable() == b.callable();
}

}  // namespace

const Value* Dict::find(std::string_view key) const {
  for (const auto& [k, v] : entries) {
    if (k.is_string() && k.text() == key) return &v;
  }
  return nullptr;
}

const Value* Dict::find(const Value& key) const {
  for (const auto& [k, v] : entries) {
    if (keys_equal(k, key)) return &v;
  }
  return nullptr;
}

void Dict::set(const Value& key, Value value) {
  for (auto& [k, v] : entries) {
    if (keys_equal(k, key)) {
      v = std::move(value);
      return;
    }
  }
  entries.emplace_back(key, std::move(value));
}

std::optional<int64_t> Value::integer() const {
  if (const auto* i = std::get_if<int64_t>(&storage_)) return *i;
  if (const auto* b = bool_ptr()) return *b;
  return std::nullopt;
}

std::optional<double> Value::number() const {
  if (const auto* d = std::get_if<double>(&storage_)) return *d;
  if (const auto* u = std::get_if<uint64_t>(&storage_)) return static_cast<double>(*u);
  if (const auto i = integer()) return static_cast<double>(*i);
  return std::nullopt;
}

Result<std::vector<Value>> bind_arguments(std::string_view function, std::initializer_list<Parameter> parameters,
                                          const Arguments& arguments) {
  if (arguments.positional.size() > parameters.size()) {
    return invalid_argument("{}() takes at most {} arguments, got {}", function, parameters.size(), arguments.positional.size());
  }
  std::vector<std::optional<Value>> bound(parameters.size());
  std::copy(arguments.positional.begin(), arguments.positional.end(), bound.begin());
  for (const auto& [name, value] : arguments.named) {
    const auto* found = std::find_if(parameters.begin(), parameters.end(), [&](const Parameter& p) { return p.name == name; });
    if (found == parameters.end()) return invalid_argument("{}() got an unexpected keyword argument '{}'", function, name);
    auto& slot = bound[static_cast<size_t>(found - parameters.begin())];
    if (slot) return invalid_argument("{}() got multiple values for argument '{}'", function, name);
    slot = value;
  }
  std::vector<Value> values;
  size_t i = 0;
  for (const Parameter& parameter : parameters) {
    auto& slot = bound[i++];
    if (!slot && !parameter.fallback) return invalid_argument("{}() missing required argument '{}'", function, parameter.name);
    values.push_back(slot ? std::move(*slot) : *parameter.fallback);
  }
  return values;
}

Value Runtime::from_json(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null: return None{};
    case Json::value_t::boolean: return json.get<bool>();
    case Json::value_t::number_integer: return json.get<int64_t>();
    case Json::value_t::number_unsigned: {
      const uint64_t number = json.get<uint64_t>();
      if (number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return static_cast<int64_t>(number);
      return number;
    }
    case Json::value_t::number_float: return json.get<double>();
    case Json::value_t::string: return json.get_ref<const std::string&>();
    case Json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(from_json(item));
      return make_list(std::move(items));
    }
    case Json::value_t::object: {
      Dict* dict = make_dict();
      dict->entries.reserve(json.size());
      for (const auto& [key, item] : json.items()) dict->entries.emplace_back(Value(key), from_json(item));
      return dict;
    }
    case Json::value_t::binary:
    case Json::value_t::discarded: break;
  }
  CHECK_UNREACHABLE();
}

Result<void> Runtime::charge(size_t steps) {
  if (steps > steps_left_) return invalid_argument("the template runs too long (more than {} steps)", limits_.max_steps);
  steps_left_ -= steps;
  return {};
}

Result<void> Runtime::check_text(size_t bytes) const {
  if (bytes > limits_.max_text_bytes) return invalid_argument("the template makes a text of more than {} bytes", limits_.max_text_bytes);
  return {};
}

Result<void> Runtime::Nested::check() const {
  if (runtime_.depth_ > runtime_.limits_.max_depth) {
    return invalid_argument("the template is nested too deeply (more than {} levels)", runtime_.limits_.max_depth);
  }
  return {};
}

std::string_view type_name(const Value& value) {
  return std::visit(Overloaded{
                        [](const Undefined&) -> std::string_view { return "Undefined"; },
                        [](None) -> std::string_view { return "NoneType"; },
                        [](bool) -> std::string_view { return "bool"; },
                        [](int64_t) -> std::string_view { return "int"; },
                        [](uint64_t) -> std::string_view { return "int"; },
                        [](double) -> std::string_view { return "float"; },
                        [](const StringPtr&) -> std::string_view { return "str"; },
                        [](const List* list) -> std::string_view {
                          switch (list->kind) {
                            case List::Kind::kList: return "list";
                            case List::Kind::kTuple: return "tuple";
                            case List::Kind::kGenerator: return "generator";
                          }
                          CHECK_UNREACHABLE();
                        },
                        [](const Dict*) -> std::string_view { return "dict"; },
                        [](const Object* object) -> std::string_view { return object->type_name(); },
                        [](const Callable*) -> std::string_view { return "function"; },
                    },
                    value.storage());
}

bool truthy(const Value& value) {
  return std::visit(Overloaded{
                        [](const Undefined&) { return false; },
                        [](None) { return false; },
                        [](bool b) { return b; },
                        [](int64_t i) { return i != 0; },
                        [](uint64_t) { return true; },
                        [](double d) { return d != 0.0; },
                        [](const StringPtr& s) { return !s->empty(); },
                        [](const List* list) { return list->kind == List::Kind::kGenerator || !list->items.empty(); },
                        [](const Dict* dict) { return !dict->entries.empty(); },
                        [](const Object*) { return true; },
                        [](const Callable*) { return true; },
                    },
                    value.storage());
}

namespace {

Value make_undefined(std::string why) { return Undefined{std::make_shared<const std::string>(std::move(why))}; }
/// "dict object", but "None" for None.
std::string described(const Value& value) { return value.is_none() ? "None" : fmt::format("{} object", type_name(value)); }

}  // namespace

Value undefined_attribute(const Value& object, std::string_view name) {
  return make_undefined(fmt::format("'{}' has no attribute '{}'", described(object), name));
}

Value undefined_item(const Value& object, const Value& key) {
  if (key.is_string()) return undefined_attribute(object, key.text());
  if (key.is_integer()) return make_undefined(fmt::format("{} has no element {}", described(object), key.integer().value_or(0)));
  return make_undefined(fmt::format("{} has no element of type {}", described(object), type_name(key)));
}

Value undefined_name(std::string_view name) { return make_undefined(fmt::format("'{}' is undefined", name)); }

Error undefined_error(const Value& value) {
  const auto* undefined = std::get_if<Undefined>(&value.storage());
  return invalid_argument("{}", undefined && undefined->why ? *undefined->why : "a value is undefined");
}

Result<bool> equals(Runtime& runtime, const Value& a, const Value& b) {
  RETURN_IF_ERROR(runtime.charge(1));
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.is_string() && b.is_string()) return a.text() == b.text();
  if (a.storage().index() != b.storage().index()) return false;
  if (a.is_undefined() || a.is_none()) return true;
  const Runtime::Nested nested(runtime);
  RETURN_IF_ERROR(nested.check());
  if (a.list()) {
    const List &x = *a.list(), &y = *b.list();
    if (x.kind != y.kind || x.items.size() != y.items.size()) return false;
    for (size_t i = 0; i < x.items.size(); ++i) {
      ASSIGN_OR_RETURN(const bool same, equals(runtime, x.items[i], y.items[i]));
      if (!same) return false;
    }
    return true;
  }
  if (a.dict()) {
    const Dict &x = *a.dict(), &y = *b.dict();
    if (x.entries.size() != y.entries.size()) return false;
    for (const auto& [key, value] : x.entries) {
      RETURN_IF_ERROR(runtime.charge(y.entries.size()));
      const Value* other = y.find(key);
      if (!other) return false;
      ASSIGN_OR_RETURN(const bool same, equals(runtime, value, *other));
      if (!same) return false;
    }
    return true;
  }
  return a.object() ? a.object() == b.object() : a.callable() == b.callable();
}

Result<bool> less(Runtime& runtime, const Value& a, const Value& b, std::string_view operator_text) {
  RETURN_IF_ERROR(runtime.charge(1));
  if (a.is_number() && b.is_number()) {
    const auto order = compare_numbers(a, b);
    return order && *order < 0;
  }
  if (a.is_string() && b.is_string()) return a.text() < b.text();  // the order of UTF-8 bytes is that of code points
  if (a.list() && b.list() && a.list()->kind == b.list()->kind) {
    const Runtime::Nested nested(runtime);
    RETURN_IF_ERROR(nested.check());
    const auto &x = a.list()->items, &y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      ASSIGN_OR_RETURN(const bool same, equals(runtime, x[i], y[i]));
      if (!same) return less(runtime, x[i], y[i], operator_text);
    }
    return x.size() < y.size();
  }
  if (a.is_undefined()) return undefined_error(a);
  if (b.is_undefined()) return undefined_error(b);
  return invalid_argument("'{}' not supported between instances of '{}' and '{}'", operator_text, type_name(a), type_name(b));
}

Result<bool> contains(Runtime& runtime, const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) {
      if (item.is_undefined()) return undefined_error(item);
      return invalid_argument("'in <string>' requires string as left operand, not {}", type_name(item));
    }
    RETURN_IF_ERROR(runtime.charge(1 + container.text().size() / 256));
    return container.text().find(item.text()) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) {
    RETURN_IF_ERROR(check_key(item));
    RETURN_IF_ERROR(runtime.charge(dict->entries.size()));
    return dict->find(item) != nullptr;
  }
  if (const List* list = container.list()) {
    for (const Value& candidate : list->items) {
      ASSIGN_OR_RETURN(const bool same, equals(runtime, candidate, item));
      if (same) return true;
    }
    return false;
  }
  if (container.is_undefined()) return false;
  return invalid_argument("argument of type '{}' is not iterable", type_name(container));
}

Result<std::vector<Value>> iterate(Runtime& runtime, const Value& value) {
  std::vector<Value> items;
  if (const List* list = value.list()) {
    items = list->items;
  } else if (const Dict* dict = value.dict()) {
    for (const auto& entry : dict->entries) items.push_back(entry.first);
  } else if (value.is_string()) {
    RETURN_IF_ERROR(runtime.charge(value.text().size()));
    for_each_character(value.text(), [&](std::string_view character) { items.emplace_back(character); });
  } else if (!value.is_undefined()) {
    return invalid_argument("'{}' object is not iterable", type_name(value));
  }
  RETURN_IF_ERROR(runtime.charge(items.size()));
  return items;
}

Result<int64_t> length_of(const Value& value) {
  if (value.is_string()) return static_cast<int64_t>(count_characters(value.text()));
  if (value.list() && value.list()->kind != List::Kind::kGenerator) return static_cast<int64_t>(value.list()->items.size());
  if (value.dict()) return static_cast<int64_t>(value.dict()->entries.size());
  if (value.is_undefined()) return int64_t{0};
  return invalid_argument("object of type '{}' has no len()", type_name(value));
}

Result<void> check_key(const Value& key) {
  if (key.is_undefined()) return {};  // never found, never equal to a key
  if (const List* list = key.list(); list && list->kind == List::Kind::kTuple) {
    for (const Value& item : list->items) {
      if (item.list() || item.dict()) return invalid_argument("unhashable type: '{}'", type_name(item));
    }
    return {};
  }
  if (key.list() || key.dict()) return invalid_argument("unhashable type: '{}'", type_name(key));
  return {};
}

}  // namespace quern::text::jinja
