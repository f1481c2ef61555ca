#include "text/marked_text.h"

#include <array>
#include <deque>
#include <map>
#include <utility>

#include "text/token_trie.h"

namespace quern::text {
namespace {

/// Bytes that can stand in UTF-8 text.
bool is_text_byte(int byte) { return byte <= 0xF4 && byte != 0xC0 && byte != 0xC1; }

/// Aho and Corasick's automaton: states are beginnings of strings, and know the longest one that the text so far ends with.
class StringMatcher {
 public:
  StringMatcher() { nodes_.emplace_back(); }

  void add(std::string_view text, bool is_end) {
    int32_t at = 0;
    for (const char c : text) {
      auto& next = nodes_[static_cast<size_t>(at)].next[static_cast<uint8_t>(c)];
      if (next < 0) {
        next = static_cast<int32_t>(nodes_.size());
        const int32_t made = next;
        nodes_.emplace_back();
        at = made;
      } else {
        at = next;
      }
    }
    nodes_[static_cast<size_t>(at)].mark = is_end ? Mark::kEnd : Mark::kForbidden;
  }

  enum class Mark : uint8_t { kNone, kEnd, kForbidden };
  struct Node {
    Node() { next.fill(-1); }
    std::array<int32_t, 256> next;
    int32_t fail = 0;
    Mark mark = Mark::kNone;
  };

  /// Nodes whose `next` leads on for every byte.
  std::vector<Node> complete() {
    std::deque<int32_t> queue;
    for (int32_t& next : nodes_[0].next) {
      if (next < 0) {
        next = 0;
      } else {
        queue.push_back(next);
      }
    }
    while (!queue.empty()) {
      Node& node = nodes_[static_cast<size_t>(queue.front())];
      queue.pop_front();
      const Node& fail = nodes_[static_cast<size_t>(node.fail)];
      if (node.mark == Mark::kNone) node.mark = fail.mark;
      for (size_t byte = 0; byte < 256; ++byte) {
        if (node.next[byte] < 0) {
          node.next[byte] = fail.next[byte];
        } else {
          nodes_[static_cast<size_t>(node.next[byte])].fail = fail.next[byte];
          queue.push_back(node.next[byte]);
        }
      }
    }
    return std::move(nodes_);
  }

 private:
  std::vector<Node> nodes_;
};

using Mark = StringMatcher::Mark;

void add_edge(std::vector<Dfa::Edge>& edges, int byte, int32_t to) {
  const auto b = static_cast<uint8_t>(byte);
  if (!edges.empty() && edges.back().to == to && edges.back().high + 1 == b) {
    edges.back().high = b;
  } else {
    edges.push_back({b, b, to});
  }
}

Dfa marked_text(const std::vector<TextMark>& ends, const std::vector<TextMark>& forbidden, bool ends_anywhere) {
  StringMatcher matcher;
  std::map<std::string, Mark> tokens;  // the three bytes behind kTokenEscape
  const auto add = [&](const std::vector<TextMark>& marks, bool is_end) {
    for (const TextMark& mark : marks) {
      matcher.add(mark.text, is_end);
      if (mark.token) tokens[token_as_bytes(*mark.token).substr(1)] = is_end ? Mark::kEnd : Mark::kForbidden;
    }
  };
  add(ends, true);
  add(forbidden, false);
  const std::vector<StringMatcher::Node> nodes = matcher.complete();
  // States: the nodes, the end, then beginnings of tokens: those of marks, and of any other by the number of their bytes.
  Dfa dfa;
  dfa.states.resize(nodes.size());
  const auto new_state = [&] {
    dfa.states.emplace_back();
    return static_cast<int32_t>(dfa.states.size() - 1);
  };
  const int32_t end = new_state();
  dfa.states[static_cast<size_t>(end)].accepts = true;
  const std::array<int32_t, 3> other{new_state(), new_state(), 0};  // behind one and two bytes; then the text goes on
  std::map<std::string, int32_t> beginnings;
  for (const auto& [bytes, mark] : tokens)
    for (size_t length = 0; length < 3; ++length) beginnings.emplace(bytes.substr(0, length), 0);
  beginnings.emplace("", 0);
  for (auto& [bytes, state] : beginnings) state = new_state();
  for (size_t i = 0; i < 2; ++i) dfa.states[static_cast<size_t>(other[i])].edges.push_back({0, 255, other[i + 1]});
  for (const auto& [bytes, state] : beginnings) {
    std::vector<Dfa::Edge> edges;
    for (int byte = 0; byte < 256; ++byte) {
      const std::string longer = bytes + static_cast<char>(byte);
      if (const auto token = tokens.find(longer); token != tokens.end()) {
        if (token->second == Mark::kEnd) add_edge(edges, byte, end);
      } else if (const auto next = beginnings.find(longer); next != beginnings.end()) {
        add_edge(edges, byte, next->second);
      } else {
        add_edge(edges, byte, other[bytes.size()]);
      }
    }
    dfa.states[static_cast<size_t>(state)].edges = std::move(edges);
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].mark != Mark::kNone) continue;
    Dfa::State& state = dfa.states[i];
    state.accepts = ends_anywhere;
    for (int byte = 0; byte < 256; ++byte) {
      if (!is_text_byte(byte)) continue;
      const int32_t to = nodes[i].next[static_cast<size_t>(byte)];
      const Mark mark = nodes[static_cast<size_t>(to)].mark;
      if (mark != Mark::kForbidden) add_edge(state.edges, byte, mark == Mark::kEnd ? end : to);
    }
    add_edge(state.edges, kTokenEscape, beginnings.at(""));
  }
  return dfa.trimmed();
}

}  // namespace

TextMark TextMark::of(const Tokenizer& tokenizer, std::string_view text) {
  const std::optional<int32_t> id = tokenizer.token_to_id(text);
  return {std::string(text), id && tokenizer.is_added(*id) ? id : std::nullopt};
}

Dfa text_until(const std::vector<TextMark>& ends, const std::vector<TextMark>& forbidden) { return marked_text(ends, forbidden, false); }
Dfa text_without(const std::vector<TextMark>& forbidden) { return marked_text({}, forbidden, true); }

Dfa plain_text_without(const std::vector<std::string>& forbidden) {
  StringMatcher matcher;
  for (const std::string& text : forbidden) matcher.add(text, false);
  const std::vector<StringMatcher::Node> nodes = matcher.complete();
  // The state behind "\n" comes first.
  Dfa dfa;
  const auto number = [&](int32_t node) { return node + 1; };
  dfa.states.resize(nodes.size() + 1);
  const auto fill = [&](Dfa::State& state, const StringMatcher::Node& node) {
    state.accepts = node.mark == Mark::kNone;
    if (!state.accepts) return;
    for (int byte = 0; byte < 256; ++byte) {
      const int32_t to = node.next[static_cast<size_t>(byte)];
      if (is_text_byte(byte) && nodes[static_cast<size_t>(to)].mark == Mark::kNone) add_edge(state.edges, byte, number(to));
    }
  };
  fill(dfa.states[0], nodes[static_cast<size_t>(nodes[0].next['\n'])]);
  for (size_t i = 0; i < nodes.size(); ++i) fill(dfa.states[i + 1], nodes[i]);
  Grammar grammar;
  const NodeId characters = grammar.repeat(grammar.code_point({{0, kLastCodePoint}}), 0, Grammar::kUnbounded);
  return intersect(dfa, build_dfa(grammar, characters, nullptr).value()).value();  // both are small
}

}  // namespace quern::text
