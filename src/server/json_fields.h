#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace quern::server {

/// "a string", "an integer", ...: what a value is, for error messages.
std::string_view json_kind(const Json& value);

/// The members that a reader of requests asks for, with their JSON schemas: what is documented is then what is read. Filled by running the
/// reader over an empty object.
class FieldLog {
 public:
  struct Field {
    std::string name;
    Json schema;  // {} when the reader looks at the value itself
  };
  void add(std::string_view name, Json schema);
  [[nodiscard]] const std::vector<Field>& fields() const { return fields_; }

 private:
  std::vector<Field> fields_;  // in the order in which they were first asked for
};

/// Reads the members of a request's object. A null counts as absent; a wrong type or range is remembered with the field's name, and the
/// first such fault is the request's error. Values read after a fault are unspecified but harmless.
class JsonFields {
 public:
  /// `prefix` stands before the names in errors, as in "stream_options.". Borrows `object` and `log`.
  explicit JsonFields(const Json& object, std::string prefix = {}, FieldLog* log = nullptr);

  /// The member, unless it is absent or null.
  [[nodiscard]] const Json* find(std::string_view name) const;

  std::optional<double> number(std::string_view name, double min, double max);
  /// Also takes a number like 16.0.
  std::optional<int64_t> integer(std::string_view name, int64_t min, int64_t max);
  std::optional<bool> boolean(std::string_view name);
  std::optional<std::string> string(std::string_view name, size_t max_bytes);
  const Json* object(std::string_view name);
  const Json* array(std::string_view name);
  /// A list of integers, each in the range.
  std::optional<std::vector<int32_t>> integers(std::string_view name, int32_t min, int32_t max, size_t max_count);

  template <class... Args>
  void fail(std::string_view name, fmt::format_string<Args...> format, Args&&... args) {
    fail_with(ErrorCode::kInvalidArgument, name, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void unsupported(std::string_view name, fmt::format_string<Args...> format, Args&&... args) {
    fail_with(ErrorCode::kUnsupported, name, fmt::format(format, std::forward<Args>(args)...));
  }
  /// The first fault.
  [[nodiscard]] Result<void> status() const;

 private:
  void fail_with(ErrorCode code, std::string_view name, std::string message);
  [[nodiscard]] const Json* look_up(std::string_view name) const;
  void log(std::string_view name, const char* type, Json bounds = Json::object()) const;
  const Json& object_;
  std::string prefix_;
  FieldLog* log_;
  std::optional<Error> error_;
};

/// The value of a JSON number if it is an integer within the range.
std::optional<int64_t> json_integer(const Json& value, int64_t min, int64_t max);

}  // namespace quern::server
