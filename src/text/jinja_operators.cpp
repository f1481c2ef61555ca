#include "text/jinja_operators.h"

#include <cmath>

namespace quern::text::jinja {
namespace {

std::string_view symbol(BinaryOp op) {
  switch (op) {
    case BinaryOp::kAnd: return "and";
    case BinaryOp::kOr: return "or";
    case BinaryOp::kAdd: return "+";
    case BinaryOp::kSubtract: return "-";
    case BinaryOp::kMultiply: return "*";
    case BinaryOp::kDivide: return "/";
    case BinaryOp::kFloorDivide: return "//";
    case BinaryOp::kModulo: return "%";
    case BinaryOp::kPower: return "**";
    case BinaryOp::kConcat: return "~";
  }
  CHECK_UNREACHABLE();
}

Error overflow() { return invalid_argument("an integer is out of the range of 64 bits"); }

Result<Value> integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (true) {
    if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return overflow();
    exponent >>= 1;
    if (exponent == 0) return Value(result);
    if (__builtin_mul_overflow(base, base, &base)) return overflow();
  }
}

Result<Value> integer_arithmetic(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case BinaryOp::kAdd:
      if (__builtin_add_overflow(a, b, &result)) return overflow();
      return Value(result);
    case BinaryOp::kSubtract:
      if (__builtin_sub_overflow(a, b, &result)) return overflow();
      return Value(result);
    case BinaryOp::kMultiply:
      if (__builtin_mul_overflow(a, b, &result)) return overflow();
      return Value(result);
    case BinaryOp::kDivide:
      if (b == 0) return invalid_argument("division by zero");
      return Value(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::kFloorDivide:
    case BinaryOp::kModulo: {
      if (b == 0) return invalid_argument("integer division or modulo by zero");
      if (b == -1) {  // the one quotient that may not fit
        if (op == BinaryOp::kModulo) return Value(int64_t{0});
        if (__builtin_sub_overflow(int64_t{0}, a, &result)) return overflow();
        return Value(result);
      }
      const bool adjust = a % b != 0 && (a % b < 0) != (b < 0);  // round towards minus infinity
      return Value(op == BinaryOp::kModulo ? a % b + (adjust ? b : 0) : a / b - (adjust ? 1 : 0));
    }
    case BinaryOp::kPower:
      if (b >= 0) return integer_power(a, b);
      if (a == 0) return invalid_argument("0.0 cannot be raised to a negative power");
      return Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
    default: CHECK_UNREACHABLE();
  }
}

Result<Value> float_arithmetic(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd: return Value(a + b);
    case BinaryOp::kSubtract: return Value(a - b);
    case BinaryOp::kMultiply: return Value(a * b);
    case BinaryOp::kDivide:
      if (b == 0) return invalid_argument("float division by zero");
      return Value(a / b);
    case BinaryOp::kFloorDivide:
    case BinaryOp::kModulo: {
      if (b == 0) return invalid_argument("float floor division by zero");
      double remainder = std::fmod(a, b);
      double quotient = (a - remainder) / b;
      if (remainder == 0) {
        remainder = std::copysign(0.0, b);
      } else if ((remainder < 0) != (b < 0)) {
        remainder += b;
        quotient -= 1;
      }
      if (op == BinaryOp::kModulo) return Value(remainder);
      double floored = std::floor(quotient);
      if (quotient - floored > 0.5) floored += 1;
      return Value(quotient == 0 ? std::copysign(0.0, a / b) : floored);
    }
    case BinaryOp::kPower: {
      if (a == 0 && b < 0) return invalid_argument("0.0 cannot be raised to a negative power");
      if (a < 0 && std::floor(b) != b && std::isfinite(b)) return invalid_argument("complex numbers are not supported");
      const double power = std::pow(a, b);
      if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) return invalid_argument("numerical result out of range");
      return Value(power);
    }
    default: CHECK_UNREACHABLE();
  }
}

/// text * count, list * count
Result<Value> repeat(Runtime& runtime, const Value& sequence, int64_t count) {
  const auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (sequence.is_string()) {
    const std::string& text = sequence.text();
    if (text.empty() || times == 0) return Value("");
    RETURN_IF_ERROR(runtime.check_text(std::min(times, SIZE_MAX / text.size()) * text.size()));
    std::string out;
    out.reserve(text.size() * times);
    for (size_t i = 0; i < times; ++i) out += text;
    return Value(std::move(out));
  }
  const auto& items = sequence.list()->items;
  std::vector<Value> out;
  if (!items.empty()) {
    RETURN_IF_ERROR(runtime.charge(std::min(times, SIZE_MAX / items.size()) * items.size()));
    for (size_t i = 0; i < times; ++i) out.insert(out.end(), items.begin(), items.end());
  }
  return Value(runtime.make_list(std::move(out), sequence.list()->kind));
}

bool is_sequence(const Value& value) { return value.is_string() || (value.list() && value.list()->kind != List::Kind::kGenerator); }

}  // namespace

Result<Value> apply_binary(Runtime& runtime, BinaryOp op, const Value& left, const Value& right) {
  if (op == BinaryOp::kConcat) {
    ASSIGN_OR_RETURN(std::string text, to_str(runtime, left));
    ASSIGN_OR_RETURN(const std::string more, to_str(runtime, right));
    text += more;
    return Value(std::move(text));
  }
  if (left.is_undefined()) return undefined_error(left);
  if (right.is_undefined()) return undefined_error(right);
  if (left.integer() && right.integer()) return integer_arithmetic(op, *left.integer(), *right.integer());
  if (left.is_number() && right.is_number()) {
    if (!left.is_float() && !right.is_float()) return overflow();
    return float_arithmetic(op, *left.number(), *right.number());
  }
  if (op == BinaryOp::kAdd) {
    if (left.is_string() && right.is_string()) return Value(left.text() + right.text());
    if (is_sequence(left) && is_sequence(right) && left.list() && right.list() && left.list()->kind == right.list()->kind) {
      std::vector<Value> items = left.list()->items;
      items.insert(items.end(), right.list()->items.begin(), right.list()->items.end());
      return Value(runtime.make_list(std::move(items), left.list()->kind));
    }
    if (left.is_string()) return invalid_argument("can only concatenate str (not \"{}\") to str", type_name(right));
  }
  if (op == BinaryOp::kMultiply) {
    if (is_sequence(left) && right.integer()) return repeat(runtime, left, *right.integer());
    if (is_sequence(right) && left.integer()) return repeat(runtime, right, *left.integer());
  }
  if (op == BinaryOp::kModulo && left.is_string()) return invalid_argument("formatting strings with % is not supported");
  return invalid_argument("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), type_name(left), type_name(right));
}

Result<bool> apply_compare(Runtime& runtime, CompareOp op, const Value& left, const Value& right) {
  const auto negated = [](Result<bool> result) -> Result<bool> {
    if (!result) return result;
    return !*result;
  };
  const auto is_nan = [](const Value& v) { return v.is_float() && std::isnan(*v.number()); };
  switch (op) {
    case CompareOp::kEqual: return equals(runtime, left, right);
    case CompareOp::kNotEqual: return negated(equals(runtime, left, right));
    case CompareOp::kLess: return less(runtime, left, right, "<");
    case CompareOp::kGreater: return less(runtime, right, left, ">");
    case CompareOp::kLessEqual:
      if (is_nan(left) || is_nan(right)) return false;
      return negated(less(runtime, right, left, "<="));
    case CompareOp::kGreaterEqual:
      if (is_nan(left) || is_nan(right)) return false;
      return negated(less(runtime, left, right, ">="));
    case CompareOp::kIn: return contains(runtime, right, left);
    case CompareOp::kNotIn: return negated(contains(runtime, right, left));
  }
  CHECK_UNREACHABLE();
}

Result<Value> apply_sign(const Value& operand, bool negate) {
  if (operand.is_undefined()) return undefined_error(operand);
  if (const auto i = operand.integer()) {
    int64_t result = *i;
    if (negate && __builtin_sub_overflow(int64_t{0}, *i, &result)) return overflow();
    return Value(result);
  }
  if (operand.is_float()) return Value(negate ? -*operand.number() : *operand.number());
  if (operand.is_number()) return overflow();
  return invalid_argument("bad operand type for unary {}: '{}'", negate ? "-" : "+", type_name(operand));
}

}  // namespace quern::text::jinja
