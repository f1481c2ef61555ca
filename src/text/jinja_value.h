#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/json.h"
#include "base/result.h"

// The values of a Jinja template: Python's, as far as chat templates see them.
// Goals: text equal to what jinja2 prints; cheap copies; no way for a template to hang or crash the server.
// Non-goals: integers beyond 64 bits, autoescape (hence no Markup type: `safe` is the identity), sets, classes.

namespace quern::text::jinja {

class Runtime;
class Value;
struct Arguments;

using StringPtr = std::shared_ptr<const std::string>;

struct None {};
/// What a missing name, key or index gives; using it other than for printing and testing is the error `why`.
struct Undefined {
  StringPtr why;
};

/// Lists, tuples and generators (what map, select, reverse, ... give) hold their items alike.
/// As in Python a generator has no length and no index and is always true.
struct List {
  enum class Kind { kList, kTuple, kGenerator };
  std::vector<Value> items;
  Kind kind = Kind::kList;
};

/// Keeps the order of insertion; small, hence searched from the front.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  [[nodiscard]] const Value* find(std::string_view key) const;
  [[nodiscard]] const Value* find(const Value& key) const;
  void set(const Value& key, Value value);
};

/// A thing with attributes: a namespace, the `loop` of a for.
class Object {
 public:
  virtual ~Object() = default;
  [[nodiscard]] virtual std::string_view type_name() const = 0;
  /// Empty when there is no such attribute.
  virtual std::optional<Value> attribute(Runtime& runtime, std::string_view name) = 0;
  /// False when attributes of this object cannot be set.
  virtual bool set_attribute(std::string_view name, Value value) = 0;
};

struct Callable {
  std::string name;
  std::function<Result<Value>(Runtime&, const Arguments&)> call;
};

/// Containers and objects belong to the Heap of their rendering, strings to who holds them.
class Value {
 public:
  /// uint64_t only holds what int64_t cannot: such a number can be printed and compared, not calculated with.
  using Storage = std::variant<Undefined, None, bool, int64_t, uint64_t, double, StringPtr, List*, Dict*, Object*, const Callable*>;

  Value() = default;
  Value(None none) : storage_(none) {}                                                         // NOLINT(google-explicit-constructor)
  Value(Undefined undefined) : storage_(std::move(undefined)) {}                               // NOLINT(google-explicit-constructor)
  Value(std::string text) : storage_(std::make_shared<const std::string>(std::move(text))) {}  // NOLINT(google-explicit-constructor)
  Value(std::string_view text) : Value(std::string(text)) {}                                   // NOLINT(google-explicit-constructor)
  Value(const char* text) : Value(std::string(text)) {}                                        // NOLINT(google-explicit-constructor)
  template <class T>
  requires(std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, uint64_t> || std::is_same_v<T, double> ||
           std::is_same_v<T, List*> || std::is_same_v<T, Dict*> || std::is_same_v<T, const Callable*>) Value(T value)
      : storage_(value) {}  // NOLINT(google-explicit-constructor)
  template <class T>
  requires std::is_base_of_v<Object, T> Value(T* object) : storage_(static_cast<Object*>(object)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] const Storage& storage() const { return storage_; }
  [[nodiscard]] bool is_undefined() const { return std::holds_alternative<Undefined>(storage_); }
  [[nodiscard]] bool is_none() const { return std::holds_alternative<None>(storage_); }
  [[nodiscard]] bool is_string() const { return std::holds_alternative<StringPtr>(storage_); }
  [[nodiscard]] bool is_float() const { return std::holds_alternative<double>(storage_); }
  /// Python's int, of which bool is a kind.
  [[nodiscard]] bool is_integer() const {
    return bool_ptr() || std::holds_alternative<int64_t>(storage_) || std::holds_alternative<uint64_t>(storage_);
  }
  [[nodiscard]] bool is_number() const { return is_integer() || is_float(); }
  [[nodiscard]] const bool* bool_ptr() const { return std::get_if<bool>(&storage_); }
  /// Null when the value is of another type.
  [[nodiscard]] List* list() const { return get_pointer<List*>(); }
  [[nodiscard]] Dict* dict() const { return get_pointer<Dict*>(); }
  [[nodiscard]] Object* object() const { return get_pointer<Object*>(); }
  [[nodiscard]] const Callable* callable() const { return get_pointer<const Callable*>(); }
  /// The text of a string.
  [[nodiscard]] const std::string& text() const { return **std::get_if<StringPtr>(&storage_); }
  /// The integer of an int64 or bool; empty for everything else.
  [[nodiscard]] std::optional<int64_t> integer() const;
  /// The number of any numeric value as a double; empty for everything else.
  [[nodiscard]] std::optional<double> number() const;

 private:
  template <class P>
  [[nodiscard]] P get_pointer() const {
    const P* p = std::get_if<P>(&storage_);
    return p ? *p : nullptr;
  }
  Storage storage_;
};

/// Arguments of a call, evaluated.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// A parameter of a builtin; it is required when it has no default.
struct Parameter {
  std::string_view name;
  std::optional<Value> fallback = std::nullopt;
};
/// One value for each parameter, by Python's rules.
Result<std::vector<Value>> bind_arguments(std::string_view function, std::initializer_list<Parameter> parameters,
                                          const Arguments& arguments);

struct RenderLimits {
  size_t max_steps = 5'000'000;              // nodes evaluated, items made or looked at
  size_t max_text_bytes = size_t{64} << 20;  // of the output and of every string
  int max_depth = 600;                       // nested expressions, statements, macro calls and containers
};

/// What one rendering owns and has left; one thread.
class Runtime {
 public:
  explicit Runtime(const RenderLimits& limits) : limits_(limits), steps_left_(limits.max_steps) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  List* make_list(std::vector<Value> items, List::Kind kind = List::Kind::kList) {
    return &lists_.emplace_back(List{std::move(items), kind});
  }
  Value make_tuple(std::vector<Value> items) { return make_list(std::move(items), List::Kind::kTuple); }
  Value make_generator(std::vector<Value> items) { return make_list(std::move(items), List::Kind::kGenerator); }
  Dict* make_dict() { return &dicts_.emplace_back(); }
  template <class T, class... Args>
  T* make_object(Args&&... args) {
    auto owned = std::make_unique<T>(std::forward<Args>(args)...);
    T* object = owned.get();
    objects_.push_back(std::move(owned));
    return object;
  }
  const Callable* make_callable(Callable callable) { return &callables_.emplace_back(std::move(callable)); }
  Value from_json(const Json& json);

  /// An error once the template has done more than max_steps.
  Result<void> charge(size_t steps);
  /// An error when a text of this size is too large.
  Result<void> check_text(size_t bytes) const;

  /// Counts one level of nesting for its lifetime.
  class Nested {
   public:
    explicit Nested(Runtime& runtime) : runtime_(runtime) { ++runtime_.depth_; }
    ~Nested() { --runtime_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    [[nodiscard]] Result<void> check() const;

   private:
    Runtime& runtime_;
  };

  /// The error under way reaches the caller as it is, without the line of the template in front.
  bool error_is_complete = false;

 private:
  const RenderLimits limits_;
  size_t steps_left_;
  int depth_ = 0;
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Callable> callables_;
  std::vector<std::unique_ptr<Object>> objects_;
};

/// Python's name of the type: "str", "int", "dict", "NoneType", ...
std::string_view type_name(const Value& value);
bool truthy(const Value& value);
/// The Undefined of an attribute or item that `object` does not have, and of a name that is not defined.
Value undefined_attribute(const Value& object, std::string_view name);
Value undefined_item(const Value& object, const Value& key);
Value undefined_name(std::string_view name);
/// The error of using `value`, which is Undefined, as if it were something.
Error undefined_error(const Value& value);

Result<bool> equals(Runtime& runtime, const Value& a, const Value& b);
/// a < b for numbers, strings and lists; other types have no order.
Result<bool> less(Runtime& runtime, const Value& a, const Value& b, std::string_view operator_text = "<");
/// `item in container`
Result<bool> contains(Runtime& runtime, const Value& container, const Value& item);
/// What a for loop over the value visits: items, keys, characters.
Result<std::vector<Value>> iterate(Runtime& runtime, const Value& value);
/// len(): code points of a string.
Result<int64_t> length_of(const Value& value);
/// Numbers, strings, None, callables and tuples of these can be keys.
Result<void> check_key(const Value& key);

/// str() and repr().
Result<std::string> to_str(Runtime& runtime, const Value& value);
Result<std::string> to_repr(Runtime& runtime, const Value& value);
/// A float as Python prints it: shortest digits that read back equal, "1e+16", "nan".
std::string float_repr(double value);

struct JsonStyle {
  std::optional<std::string> indent;  // text of one level; unset: one line
  std::string item_separator = ", ", key_separator = ": ";
  bool ensure_ascii = false, sort_keys = false;
};
/// json.dumps(value)
Result<std::string> to_json_text(Runtime& runtime, const Value& value, const JsonStyle& style);

}  // namespace quern::text::jinja
