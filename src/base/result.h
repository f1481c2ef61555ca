#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/check.h"

namespace quern {

/// What kind of thing went wrong; the server maps it to an HTTP status.
enum class ErrorCode {
  kInvalidArgument,     // 400: the request, flag or file is wrong
  kNotFound,            // 404
  kUnauthenticated,     // 401
  kResourceExhausted,   // 503: a queue is full, memory is short
  kUnavailable,         // 503: starting, draining or stopped
  kCancelled,           // the client went away
  kUnsupported,         // 400: legal, but not something this build or device can do
  kInternal,            // 500
};

std::string_view error_code_name(ErrorCode code);

/// A sentence with what was wanted, what was found and what to try.
struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::string field;  // the request field or flag that caused it, where there is one

  /// The same error with "`context`: " in front.
  [[nodiscard]] Error with_context(std::string_view context) const {
    return Error{code, fmt::format("{}: {}", context, message), field};
  }
};

template <class... Args>
Error make_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, fmt::format(format, std::forward<Args>(args)...), {}};
}
template <class... Args>
Error invalid_argument(fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...), {}};
}

/// A value or an Error; the member names of std::expected, which needs C++23.
template <class T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}       // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}   // NOLINT(google-explicit-constructor)
  template <class U>
    requires(std::is_convertible_v<U &&, T> && !std::is_same_v<std::remove_cvref_t<U>, Result> &&
             !std::is_same_v<std::remove_cvref_t<U>, Error> && !std::is_same_v<std::remove_cvref_t<U>, T>)
  Result(U&& value) : state_(std::in_place_index<0>, std::forward<U>(value)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  T& value() & { check_value(); return *std::get_if<0>(&state_); }
  const T& value() const& { check_value(); return *std::get_if<0>(&state_); }
  T&& value() && { check_value(); return std::move(*std::get_if<0>(&state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  Error& error() & { CHECK(!has_value()); return *std::get_if<1>(&state_); }
  const Error& error() const& { CHECK(!has_value()); return *std::get_if<1>(&state_); }
  Error&& error() && { CHECK(!has_value()); return std::move(*std::get_if<1>(&state_)); }

 private:
  void check_value() const {
    if (!has_value()) check_failed("has_value()", std::get_if<1>(&state_)->message, __FILE__, __LINE__);
  }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  void value() const {
    if (error_) check_failed("has_value()", error_->message, __FILE__, __LINE__);
  }
  Error& error() & { CHECK(error_.has_value()); return *error_; }
  const Error& error() const& { CHECK(error_.has_value()); return *error_; }
  Error&& error() && { CHECK(error_.has_value()); return std::move(*error_); }

 private:
  std::optional<Error> error_;
};

}  // namespace quern

#define QUERN_CONCAT_(a, b) a##b
#define QUERN_CONCAT(a, b) QUERN_CONCAT_(a, b)

#define RETURN_IF_ERROR_(result, expression) \
  do {                                       \
    if (auto result = (expression); !result) return std::move(result).error(); \
  } while (false)

/// RETURN_IF_ERROR(expression): leaves the function with the error of a Result<...>.
#define RETURN_IF_ERROR(expression) RETURN_IF_ERROR_(QUERN_CONCAT(quern_result_, __LINE__), expression)

#define ASSIGN_OR_RETURN_(result, declaration, expression) \
  auto result = (expression);                              \
  if (!result) return std::move(result).error();           \
  declaration = std::move(result).value()

/// ASSIGN_OR_RETURN(auto x, f()): x is the value of f(), or the function returns f()'s error.
#define ASSIGN_OR_RETURN(declaration, expression) \
  ASSIGN_OR_RETURN_(QUERN_CONCAT(quern_result_, __LINE__), declaration, expression)
