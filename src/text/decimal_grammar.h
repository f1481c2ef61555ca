#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "text/finite_automaton.h"

namespace quern::text {

/// A number as it is written, exact.
struct Decimal {
  bool negative = false;
  std::string whole = "0";  // without leading zeros
  std::string fraction;     // without zeros at the end
  [[nodiscard]] bool is_zero() const { return whole == "0" && fraction.empty(); }
};
/// Of a finite JSON number.
Decimal decimal_of(const Json& number);
/// -1, 0 or 1.
int compare(const Decimal& a, const Decimal& b);

struct DecimalBound {
  Decimal value;
  bool exclusive = false;
};

/// What numbers may be. With any of these they are written without exponent.
struct DecimalRange {
  std::optional<DecimalBound> least, most;
  std::vector<Decimal> multiples_of;
  [[nodiscard]] bool is_free() const { return !least && !most && multiples_of.empty(); }
};

/// Integers have up to so many digits, fractions up to so many (more where a bound has more).
inline constexpr int32_t kMaxDigits = 19, kMaxFractionDigits = 20;

/// Numbers within the range, in decimal digits. Errors: kUnsupported for a multiple whose digits are too many.
Result<Dfa> decimal_dfa(const DecimalRange& range, bool integers_only);
/// Any number: digits, fraction and exponent, of a size that a double can hold.
NodeId any_number(Grammar& grammar);

}  // namespace quern::text
