#include "text/grammar.h"

#include <algorithm>
#include <array>
#include <utility>

#include "text/token_trie.h"

namespace quern::text {
namespace {

constexpr CodePointRange kSurrogates{0xD800, 0xDFFF};

struct ByteRange {
  uint8_t low, high;
};
using ByteRanges = std::vector<ByteRange>;

size_t encode(char32_t c, std::array<uint8_t, 4>& out) {
  const auto tail = [&](int shift) { return static_cast<uint8_t>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) return out = {static_cast<uint8_t>(c)}, 1;
  if (c < 0x800) return out = {static_cast<uint8_t>(0xC0 | c >> 6), tail(0)}, 2;
  if (c < 0x10000) return out = {static_cast<uint8_t>(0xE0 | c >> 12), tail(6), tail(0)}, 3;
  return out = {static_cast<uint8_t>(0xF0 | c >> 18), tail(12), tail(6), tail(0)}, 4;
}

/// Cuts a range of code points of one length into products of byte ranges: sequences whose i-th byte may be anything of the i-th range.
void cut(const std::array<uint8_t, 4>& low, const std::array<uint8_t, 4>& high, size_t at, size_t length, ByteRanges prefix, std::vector<ByteRanges>& out) {
  if (at == length) {
    out.push_back(std::move(prefix));
    return;
  }
  const auto all_from = [&](const std::array<uint8_t, 4>& bytes, uint8_t value) {
    for (size_t i = at + 1; i < length; ++i)
      if (bytes[i] != value) return false;
    return true;
  };
  const auto with = [&](uint8_t a, uint8_t b) {
    ByteRanges longer = prefix;
    longer.push_back({a, b});
    return longer;
  };
  const std::array<uint8_t, 4> least{0x80, 0x80, 0x80, 0x80}, most{0xBF, 0xBF, 0xBF, 0xBF};
  if (low[at] == high[at]) return cut(low, high, at + 1, length, with(low[at], low[at]), out);
  uint8_t first = low[at], last = high[at];
  if (!all_from(low, 0x80)) {
    cut(low, most, at + 1, length, with(first, first), out);
    ++first;
  }
  const bool open_end = !all_from(high, 0xBF);
  if (open_end) --last;
  if (first <= last) cut(least, most, at + 1, length, with(first, last), out);
  if (open_end) cut(least, high, at + 1, length, with(high[at], high[at]), out);
}

}  // namespace

CodePointSet normalized(CodePointSet set) {
  CodePointSet cut;
  for (const CodePointRange& range : set) {
    const char32_t high = std::min(range.high, kLastCodePoint);
    if (range.low < kSurrogates.low && range.low <= high) cut.push_back({range.low, std::min<char32_t>(high, kSurrogates.low - 1)});
    if (high > kSurrogates.high) cut.push_back({std::max<char32_t>(range.low, kSurrogates.high + 1), high});
  }
  std::erase_if(cut, [](const CodePointRange& r) { return r.low > r.high; });
  std::ranges::sort(cut, {}, &CodePointRange::low);
  CodePointSet out;
  for (const CodePointRange& range : cut) {
    if (!out.empty() && range.low <= out.back().high + 1) {
      out.back().high = std::max(out.back().high, range.high);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

CodePointSet complement(const CodePointSet& set) {
  CodePointSet out;
  char32_t next = 0;
  for (const CodePointRange& range : normalized(set)) {
    if (range.low > next) out.push_back({next, range.low - 1});
    next = range.high + 1;
  }
  if (next <= kLastCodePoint) out.push_back({next, kLastCodePoint});
  return normalized(std::move(out));
}

CodePointSet intersection(const CodePointSet& a, const CodePointSet& b) {
  CodePointSet out;
  for (const CodePointRange& x : a) {
    for (const CodePointRange& y : b) {
      const CodePointRange both{std::max(x.low, y.low), std::min(x.high, y.high)};
      if (both.low <= both.high) out.push_back(both);
    }
  }
  return normalized(std::move(out));
}

NodeId Grammar::add(Node node) {
  nodes_.push_back(std::move(node));
  return static_cast<NodeId>(nodes_.size() - 1);
}

NodeId Grammar::nothing() { return add({}); }

NodeId Grammar::empty() { return add({.kind = Kind::kSequence}); }

NodeId Grammar::bytes(const ByteSet& set) { return set.empty() ? nothing() : add({.kind = Kind::kBytes, .bytes = set}); }

NodeId Grammar::literal(std::string_view text) {
  std::vector<NodeId> parts;
  for (const char c : text) parts.push_back(bytes(ByteSet::of({&c, 1})));
  return sequence(std::move(parts));
}

NodeId Grammar::sequence(std::vector<NodeId> parts) {
  if (parts.size() == 1) return parts.front();
  return add({.kind = Kind::kSequence, .children = std::move(parts)});
}

NodeId Grammar::choice(std::vector<NodeId> alternatives) {
  if (alternatives.empty()) return nothing();
  if (alternatives.size() == 1) return alternatives.front();
  return add({.kind = Kind::kChoice, .children = std::move(alternatives)});
}

NodeId Grammar::repeat(NodeId body, int32_t min, int32_t max) {
  if (max != kUnbounded && max < min) return nothing();
  return add({.kind = Kind::kRepeat, .children = {body}, .min = min, .max = max});
}

NodeId Grammar::code_point(const CodePointSet& set) {
  std::vector<NodeId> alternatives;
  ByteSet ascii;
  for (const CodePointRange& range : normalized(set)) {
    // One length after the other.
    constexpr std::array<char32_t, 4> kLast{0x7F, 0x7FF, 0xFFFF, kLastCodePoint};
    char32_t low = range.low;
    for (const char32_t last : kLast) {
      if (low > last || low > range.high) continue;
      const char32_t high = std::min(range.high, last);
      if (last == 0x7F) {
        for (char32_t c = low; c <= high; ++c) ascii.add(static_cast<uint8_t>(c));
      } else {
        std::array<uint8_t, 4> first{}, final{};
        const size_t length = encode(low, first);
        encode(high, final);
        std::vector<ByteRanges> products;
        cut(first, final, 0, length, {}, products);
        for (const ByteRanges& product : products) {
          std::vector<NodeId> parts;
          for (const ByteRange& r : product) parts.push_back(bytes(ByteSet::range(r.low, r.high)));
          alternatives.push_back(sequence(std::move(parts)));
        }
      }
      low = high + 1;
    }
  }
  if (!ascii.empty()) alternatives.push_back(bytes(ascii));
  return choice(std::move(alternatives));
}

NodeId Grammar::token(int32_t id) { return literal(token_as_bytes(id)); }

NodeId Grammar::graph(GrammarGraph graph) {
  return add({.kind = Kind::kGraph, .graph = std::make_shared<const GrammarGraph>(std::move(graph))});
}

NodeId Grammar::rule(RuleId rule) { return add({.kind = Kind::kRule, .rule = rule}); }

RuleId Grammar::add_rule(std::string name) {
  rules_.push_back({std::move(name), -1});
  return static_cast<RuleId>(rules_.size() - 1);
}

RuleId Grammar::add_rule(std::string name, NodeId body) {
  const RuleId rule = add_rule(std::move(name));
  define(rule, body);
  return rule;
}

}  // namespace quern::text
