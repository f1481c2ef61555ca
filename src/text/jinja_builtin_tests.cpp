// What may follow `is`.

#include <cmath>
#include <unordered_map>

#include "text/jinja_builtins.h"
#include "text/jinja_strings.h"

namespace quern::text::jinja {
namespace {

/// A test without arguments that looks at the value only.
template <bool (*predicate)(const Value&)>
Result<bool> simple(Runtime&, const Value& value, const Arguments& arguments) {
  if (!arguments.positional.empty() || !arguments.named.empty()) return invalid_argument("this test takes no arguments");
  return predicate(value);
}

template <auto compare>
Result<bool> comparison(Runtime& runtime, const Value& value, const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.named.empty()) return invalid_argument("this test takes one argument");
  return compare(runtime, value, arguments.positional[0]);
}

Result<bool> negated(Result<bool> result) {
  if (!result) return result;
  return !*result;
}
Result<bool> not_equals(Runtime& r, const Value& a, const Value& b) { return negated(equals(r, a, b)); }
Result<bool> is_less(Runtime& r, const Value& a, const Value& b) { return less(r, a, b, "<"); }
Result<bool> is_greater(Runtime& r, const Value& a, const Value& b) { return less(r, b, a, ">"); }
Result<bool> is_at_most(Runtime& r, const Value& a, const Value& b) { return negated(less(r, b, a, "<=")); }
Result<bool> is_at_least(Runtime& r, const Value& a, const Value& b) { return negated(less(r, a, b, ">=")); }
Result<bool> is_in(Runtime& r, const Value& a, const Value& b) { return contains(r, b, a); }
Result<bool> same_as(Runtime& r, const Value& a, const Value& b) {
  if (a.storage().index() != b.storage().index()) return false;
  if (a.list()) return a.list() == b.list();
  if (a.dict()) return a.dict() == b.dict();
  return equals(r, a, b);
}

Result<int64_t> modulo(const Value& value, const Value& divisor) {
  if (value.is_undefined()) return undefined_error(value);
  if (!value.integer() || !divisor.integer()) {
    return invalid_argument("unsupported operand type(s) for %: '{}' and '{}'", type_name(value), type_name(divisor));
  }
  if (*divisor.integer() == 0) return invalid_argument("integer modulo by zero");
  if (*divisor.integer() == -1) return int64_t{0};
  return *value.integer() % *divisor.integer();
}
Result<bool> divisible_by(Runtime&, const Value& value, const Value& divisor) {
  ASSIGN_OR_RETURN(const int64_t rest, modulo(value, divisor));
  return rest == 0;
}
Result<bool> is_odd(Runtime&, const Value& value, const Arguments&) {
  ASSIGN_OR_RETURN(const int64_t rest, modulo(value, int64_t{2}));
  return rest != 0;
}
Result<bool> is_even(Runtime&, const Value& value, const Arguments&) {
  ASSIGN_OR_RETURN(const int64_t rest, modulo(value, int64_t{2}));
  return rest == 0;
}

/// str(value).islower() and isupper(): some letter with case, and none of the other.
template <bool wants_upper>
Result<bool> has_case(Runtime& runtime, const Value& value, const Arguments&) {
  ASSIGN_OR_RETURN(const std::string text, to_str(runtime, value));
  return all_in_case(text, wants_upper);
}

Result<bool> names_filter(Runtime&, const Value& value, const Arguments&) { return value.is_string() && find_filter(value.text()); }
Result<bool> names_test(Runtime&, const Value& value, const Arguments&) { return value.is_string() && find_test(value.text()); }

bool is_defined(const Value& v) { return !v.is_undefined(); }
bool is_undefined(const Value& v) { return v.is_undefined(); }
bool is_none(const Value& v) { return v.is_none(); }
bool is_true(const Value& v) { return v.bool_ptr() && *v.bool_ptr(); }
bool is_false(const Value& v) { return v.bool_ptr() && !*v.bool_ptr(); }
bool is_boolean(const Value& v) { return v.bool_ptr() != nullptr; }
bool is_integer(const Value& v) { return v.is_integer() && !v.bool_ptr(); }
bool is_float(const Value& v) { return v.is_float(); }
bool is_number(const Value& v) { return v.is_number(); }
bool is_string(const Value& v) { return v.is_string(); }
bool is_mapping(const Value& v) { return v.dict() != nullptr; }
bool is_iterable(const Value& v) { return v.is_string() || v.list() || v.dict() || v.is_undefined(); }
bool is_sequence(const Value& v) { return is_iterable(v) && !(v.list() && v.list()->kind == List::Kind::kGenerator); }
bool is_callable(const Value& v) { return v.callable() != nullptr; }

}  // namespace

Test find_test(std::string_view name) {
  static const std::unordered_map<std::string_view, Test> kTests = {
      {"defined", simple<is_defined>},
      {"undefined", simple<is_undefined>},
      {"none", simple<is_none>},
      {"true", simple<is_true>},
      {"false", simple<is_false>},
      {"boolean", simple<is_boolean>},
      {"integer", simple<is_integer>},
      {"float", simple<is_float>},
      {"number", simple<is_number>},
      {"string", simple<is_string>},
      {"mapping", simple<is_mapping>},
      {"iterable", simple<is_iterable>},
      {"sequence", simple<is_sequence>},
      {"callable", simple<is_callable>},
      {"odd", is_odd},
      {"even", is_even},
      {"divisibleby", comparison<divisible_by>},
      {"lower", has_case<false>},
      {"upper", has_case<true>},
      {"filter", names_filter},
      {"test", names_test},
      {"sameas", comparison<same_as>},
      {"in", comparison<is_in>},
      {"eq", comparison<equals>},
      {"==", comparison<equals>},
      {"equalto", comparison<equals>},
      {"ne", comparison<not_equals>},
      {"!=", comparison<not_equals>},
      {"lt", comparison<is_less>},
      {"<", comparison<is_less>},
      {"lessthan", comparison<is_less>},
      {"gt", comparison<is_greater>},
      {">", comparison<is_greater>},
      {"greaterthan", comparison<is_greater>},
      {"le", comparison<is_at_most>},
      {"<=", comparison<is_at_most>},
      {"ge", comparison<is_at_least>},
      {">=", comparison<is_at_least>},
  };
  const auto found = kTests.find(name);
  return found == kTests.end() ? nullptr : found->second;
}

}  // namespace quern::text::jinja
