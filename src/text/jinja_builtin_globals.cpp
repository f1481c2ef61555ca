#include <array>
#include <ctime>

#include "text/jinja_builtins.h"

namespace quern::text::jinja {
namespace {

class Namespace final : public Object {
 public:
  explicit Namespace(std::vector<std::pair<Value, Value>> attributes) { attributes_.entries = std::move(attributes); }
  [[nodiscard]] std::string_view type_name() const override { return "Namespace"; }
  std::optional<Value> attribute(Runtime&, std::string_view name) override {
    const Value* found = attributes_.find(name);
    return found ? std::optional<Value>(*found) : std::nullopt;
  }
  bool set_attribute(std::string_view name, Value value) override {
    attributes_.set(Value(name), std::move(value));
    return true;
  }

 private:
  Dict attributes_;
};

/// The entries of dict(mapping or pairs, key=value, ...).
Result<Dict> dict_entries(Runtime& runtime, const Arguments& arguments, std::string_view function) {
  Dict dict;
  if (arguments.positional.size() > 1)
    return invalid_argument("{} expected at most 1 argument, got {}", function, arguments.positional.size());
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional[0];
    if (source.dict()) {
      dict = *source.dict();
    } else {
      ASSIGN_OR_RETURN(const std::vector<Value> pairs, iterate(runtime, source));
      for (const Value& pair : pairs) {
        ASSIGN_OR_RETURN(const std::vector<Value> parts, iterate(runtime, pair));
        if (parts.size() != 2) return invalid_argument("{}: every element must be a pair", function);
        RETURN_IF_ERROR(check_key(parts[0]));
        RETURN_IF_ERROR(runtime.charge(dict.entries.size()));
        dict.set(parts[0], parts[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.named) dict.set(Value(name), value);
  RETURN_IF_ERROR(runtime.charge(dict.entries.size()));
  return dict;
}

Result<Value> make_namespace(Runtime& runtime, const Arguments& arguments) {
  ASSIGN_OR_RETURN(Dict dict, dict_entries(runtime, arguments, "namespace"));
  return Value(runtime.make_object<Namespace>(std::move(dict.entries)));
}

Result<Value> make_dict(Runtime& runtime, const Arguments& arguments) {
  ASSIGN_OR_RETURN(Dict entries, dict_entries(runtime, arguments, "dict"));
  Dict* const dict = runtime.make_dict();
  *dict = std::move(entries);
  return Value(dict);
}

Result<Value> range(Runtime& runtime, const Arguments& arguments) {
  constexpr size_t kMaxItems = 100'000;  // jinja2's sandbox has the same limit
  if (!arguments.named.empty()) return invalid_argument("range() takes no keyword arguments");
  std::array<int64_t, 3> parts{0, 0, 1};
  const auto& given = arguments.positional;
  if (given.empty() || given.size() > 3) return invalid_argument("range expected 1 to 3 arguments, got {}", given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].is_undefined()) return undefined_error(given[i]);
    const auto integer = given[i].integer();
    if (!integer) return invalid_argument("'{}' object cannot be interpreted as an integer", type_name(given[i]));
    parts[given.size() == 1 ? 1 : i] = *integer;
  }
  const auto [start, stop, step] = parts;
  if (step == 0) return invalid_argument("range() arg 3 must not be zero");
  std::vector<Value> items;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    if (items.size() == kMaxItems) return invalid_argument("range too big: the sandbox blocks ranges larger than {}", kMaxItems);
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return Value(runtime.make_list(std::move(items)));
}

Result<Value> raise_exception(Runtime& runtime, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const std::vector<Value> bound, bind_arguments("raise_exception", {{"message"}}, arguments));
  ASSIGN_OR_RETURN(std::string message, to_str(runtime, bound[0]));
  runtime.error_is_complete = true;
  return Error{ErrorCode::kInvalidArgument, std::move(message), {}};
}

Result<Value> strftime_now(Runtime&, const Arguments& arguments) {
  ASSIGN_OR_RETURN(const std::vector<Value> bound, bind_arguments("strftime_now", {{"format"}}, arguments));
  if (!bound[0].is_string()) return invalid_argument("strftime_now() argument must be str, not {}", type_name(bound[0]));
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  // A space in front tells an empty result from a buffer that is too small.
  const std::string format = " " + bound[0].text();
  std::string text(format.size() * 16 + 64, '\0');
  const size_t size = std::strftime(text.data(), text.size(), format.c_str(), &local);
  if (size == 0) return invalid_argument("strftime_now(): the format is not usable");
  text.resize(size);
  return Value(text.substr(1));
}

}  // namespace

std::optional<Value> find_global(std::string_view name) {
  static const std::array<Callable, 5> kGlobals{{
      {"range", range},
      {"dict", make_dict},
      {"namespace", make_namespace},
      {"raise_exception", raise_exception},
      {"strftime_now", strftime_now},
  }};
  for (const Callable& global : kGlobals) {
    if (global.name == name) return &global;
  }
  return std::nullopt;
}

}  // namespace quern::text::jinja
