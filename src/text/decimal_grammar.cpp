#include "text/decimal_grammar.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

namespace quern::text {
namespace {

constexpr int64_t kMaxMultiple = 1000;

void trim(Decimal& d) {
  d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
  if (d.whole.empty()) d.whole = "0";
  d.fraction.erase(d.fraction.find_last_not_of('0') + 1);
  if (d.is_zero()) d.negative = false;
}

int compare_magnitude(const Decimal& a, const Decimal& b) {
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -1 : 1;
  const int whole = a.whole.compare(b.whole);
  if (whole != 0) return whole < 0 ? -1 : 1;
  const int fraction = a.fraction.compare(b.fraction);  // no zeros at the end: the order of digits is that of values
  return fraction < 0 ? -1 : fraction > 0 ? 1 : 0;
}

/// How a number that is being written compares to a fixed one.
enum Relation : unsigned { kLess = 1, kEqual = 2, kGreater = 4 };

/// Builds an automaton over digits and '.' from states that are described by integers.
class DigitAutomaton {
 public:
  int32_t state(int64_t description, bool accepts) {
    const auto [it, is_new] = numbers_.emplace(description, static_cast<int32_t>(dfa_.states.size()));
    if (is_new) {
      dfa_.states.push_back({accepts, {}, {}});
      todo_.push_back(description);
    }
    return it->second;
  }
  /// expand(a state's description, edge(byte, to)) for all states.
  template <class Expand>
  Dfa run(const Expand& expand) {
    for (size_t i = 0; i < todo_.size(); ++i) {
      const int64_t description = todo_[i];
      const auto from = static_cast<size_t>(numbers_.at(description));
      std::vector<Dfa::Edge> edges;
      expand(description, [&](char byte, int32_t to) { edges.push_back({static_cast<uint8_t>(byte), static_cast<uint8_t>(byte), to}); });
      std::ranges::sort(edges, {}, &Dfa::Edge::low);
      dfa_.states[from].edges = std::move(edges);
    }
    return std::move(dfa_);
  }

 private:
  std::map<int64_t, int32_t> numbers_;
  std::vector<int64_t> todo_;
  Dfa dfa_;
};

/// Unsigned numbers whose relation to the magnitude of `to` is one of `wanted`.
Dfa related(const Decimal& to, unsigned wanted) {
  // Before the point: digits so far (one more than `to` has is enough) and how they compare. Behind it: the same for the fraction.
  const auto whole_size = static_cast<int64_t>(to.whole.size()), fraction_size = static_cast<int64_t>(to.fraction.size());
  const auto describe = [](bool fraction, int64_t digits, unsigned relation) { return (digits * 2 + (fraction ? 1 : 0)) * 8 + relation; };
  const auto at_end = [&](bool fraction, int64_t digits, unsigned relation) {
    if (!fraction) {
      relation = digits < whole_size ? kLess : digits > whole_size ? kGreater : relation;
      digits = 0;
    }
    return relation == kEqual && digits < fraction_size ? unsigned{kLess} : relation;
  };
  DigitAutomaton automaton;
  const auto state = [&](bool fraction, int64_t digits, unsigned relation) {
    const bool empty = !fraction && digits == 0;
    return automaton.state(describe(fraction, digits, relation), !empty && (at_end(fraction, digits, relation) & wanted) != 0);
  };
  state(false, 0, kEqual);
  return automaton.run([&](int64_t description, const auto& edge) {
    const unsigned relation = description % 8;
    const bool fraction = description / 8 % 2 != 0;
    const int64_t digits = description / 16;
    for (char d = '0'; d <= '9'; ++d) {
      const std::string& other = fraction ? to.fraction : to.whole;
      const int64_t size = fraction ? fraction_size : whole_size;
      unsigned next = relation;
      if (relation == kEqual) {
        const char o = digits < size ? other[static_cast<size_t>(digits)] : '0';
        if (digits < size || fraction) next = d < o ? kLess : (d > o ? kGreater : kEqual);
      }
      edge(d, state(fraction, std::min(digits + 1, size + 1), next));
    }
    if (!fraction && digits > 0) {
      const unsigned so_far = digits < whole_size ? unsigned{kLess} : digits > whole_size ? unsigned{kGreater} : relation;
      edge('.', state(true, 0, so_far));
    }
  });
}

/// Unsigned numbers that `of` divides.
Result<Dfa> multiples(const Decimal& of) {
  const auto places = static_cast<int64_t>(of.fraction.size());
  const std::string digits = of.whole + of.fraction;
  int64_t divisor = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), divisor);
  if (error != std::errc() || end != digits.data() + digits.size() || divisor > kMaxMultiple || places > 6)
    return make_error(ErrorCode::kUnsupported, "is supported up to {} in its digits, without regard to the point", kMaxMultiple);
  if (divisor == 0) return invalid_argument("has to be above 0");
  const auto describe = [&](int64_t remainder, int64_t place) { return (remainder * 16 + place) * 2 + 1; };  // place 15: before the point
  DigitAutomaton automaton;
  const auto state = [&](int64_t remainder, int64_t place) {
    int64_t rest = remainder;
    for (int64_t i = place == 15 ? 0 : place; i < places; ++i) rest = rest * 10 % divisor;
    return automaton.state(describe(remainder, place), rest == 0);
  };
  state(0, 15);
  return automaton.run([&](int64_t description, const auto& edge) {
    const int64_t place = description / 2 % 16, remainder = description / 32;
    if (place < 15 && place == places) return;
    for (char d = '0'; d <= '9'; ++d) edge(d, state((remainder * 10 + (d - '0')) % divisor, place == 15 ? 15 : place + 1));
    if (place == 15 && places > 0) edge('.', state(remainder, 0));
  });
}

NodeId digits(Grammar& grammar, int32_t min, int32_t max) { return grammar.repeat(grammar.bytes(ByteSet::range('0', '9')), min, max); }

NodeId whole_number(Grammar& grammar, int32_t max_digits) {
  return grammar.choice({grammar.literal("0"), grammar.sequence({grammar.bytes(ByteSet::range('1', '9')), digits(grammar, 0, max_digits - 1)})});
}

/// One sign's numbers: magnitudes that satisfy all of it.
Result<Dfa> magnitudes(const DecimalRange& range, bool negative, bool integers_only) {
  int32_t whole_digits = kMaxDigits, fraction_digits = kMaxFractionDigits;
  for (const auto& bound : {range.least, range.most}) {
    if (!bound) continue;
    whole_digits = std::max(whole_digits, static_cast<int32_t>(bound->value.whole.size()));
    fraction_digits = std::max(fraction_digits, static_cast<int32_t>(bound->value.fraction.size()));
  }
  Grammar grammar;
  NodeId node = whole_number(grammar, whole_digits);
  if (!integers_only) node = grammar.sequence({node, grammar.optional(grammar.sequence({grammar.literal("."), digits(grammar, 1, fraction_digits)}))});
  ASSIGN_OR_RETURN(Dfa out, build_dfa(grammar, node, nullptr));
  const auto keep = [&](const Dfa& other) -> Result<void> {
    ASSIGN_OR_RETURN(out, intersect(out, other));
    return {};
  };
  if (negative) RETURN_IF_ERROR(keep(related(Decimal{}, kGreater)));  // "-0" is 0
  const auto apply = [&](const DecimalBound& bound, bool is_least) -> Result<void> {
    const unsigned equal = bound.exclusive ? 0u : unsigned{kEqual};
    const bool bound_negative = bound.value.negative;
    if (bound_negative != negative) {
      // The bound lies on the other side of 0: it allows all of this side, or nothing.
      if (is_least == negative) out = Dfa{};
      return {};
    }
    return keep(related(bound.value, (is_least != negative ? kGreater : kLess) | equal));
  };
  if (range.least) RETURN_IF_ERROR(apply(*range.least, true));
  if (range.most) RETURN_IF_ERROR(apply(*range.most, false));
  for (const Decimal& of : range.multiples_of) {
    ASSIGN_OR_RETURN(const Dfa dfa, multiples(of));
    RETURN_IF_ERROR(keep(dfa));
  }
  return out;
}

}  // namespace

Decimal decimal_of(const Json& number) {
  std::string text = dump_json(number);
  Decimal d;
  if (text.starts_with('-')) d.negative = true, text.erase(0, 1);
  int64_t exponent = 0;
  if (const size_t e = text.find_first_of("eE"); e != std::string::npos) {
    const char* begin = text.data() + e + 1;
    if (*begin == '+') ++begin;
    std::from_chars(begin, text.data() + text.size(), exponent);
    text.erase(e);
  }
  const size_t point = text.find('.');
  d.whole = text.substr(0, point);
  d.fraction = point == std::string::npos ? std::string() : text.substr(point + 1);
  for (; exponent > 0; --exponent) {
    d.whole += d.fraction.empty() ? '0' : d.fraction.front();
    if (!d.fraction.empty()) d.fraction.erase(0, 1);
  }
  for (; exponent < 0; ++exponent) {
    d.fraction.insert(d.fraction.begin(), d.whole.empty() ? '0' : d.whole.back());
    if (!d.whole.empty()) d.whole.pop_back();
  }
  trim(d);
  return d;
}

int compare(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) return a.negative ? -1 : 1;
  return a.negative ? -compare_magnitude(a, b) : compare_magnitude(a, b);
}

Result<Dfa> decimal_dfa(const DecimalRange& range, bool integers_only) {
  ASSIGN_OR_RETURN(const Dfa positive, magnitudes(range, false, integers_only));
  ASSIGN_OR_RETURN(const Dfa negative, magnitudes(range, true, integers_only));
  Grammar grammar;
  const NodeId both = grammar.choice({positive.as_node(grammar), grammar.sequence({grammar.literal("-"), negative.as_node(grammar)})});
  ASSIGN_OR_RETURN(const Dfa dfa, build_dfa(grammar, both, nullptr));
  return dfa.trimmed();
}

NodeId any_number(Grammar& grammar) {
  const NodeId exponent = grammar.sequence(
      {grammar.bytes(ByteSet::of("eE")), grammar.optional(grammar.bytes(ByteSet::of("+-"))),
       grammar.choice({digits(grammar, 1, 2), grammar.sequence({grammar.bytes(ByteSet::of("12")), digits(grammar, 2, 2)})})});
  return grammar.sequence({grammar.optional(grammar.literal("-")), whole_number(grammar, kMaxDigits),
                           grammar.optional(grammar.sequence({grammar.literal("."), digits(grammar, 1, kMaxFractionDigits)})),
                           grammar.optional(exponent)});
}

}  // namespace quern::text
