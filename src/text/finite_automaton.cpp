#include "text/finite_automaton.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/hash.h"

namespace quern::text {
namespace {

// Bounds of what one request can make us build; far above what schemas in use need.
constexpr size_t kMaxNfaStates = 300'000;
constexpr size_t kMaxDfaStates = 40'000;
constexpr size_t kMaxSubsetWork = 20'000'000;

Error too_large() { return invalid_argument("the grammar is too large: its automaton would have more than {} states", kMaxDfaStates); }

/// Nondeterministic, by Thompson's construction.
class Nfa {
 public:
  struct State {
    std::vector<int32_t> empty;
    std::vector<Dfa::Edge> edges;
    std::vector<Dfa::Call> calls;
  };

  Nfa(const Grammar& grammar, const LiftRepeat* lift, BuildBudget& budget) : grammar_(grammar), lift_(lift), budget_(budget) {}

  int32_t add_state() {
    states_.emplace_back();
    return static_cast<int32_t>(states_.size() - 1);
  }
  [[nodiscard]] const State& state(int32_t s) const { return states_[static_cast<size_t>(s)]; }

  /// Adds paths for `id`. Never adds an edge into `from` or out of `to`.
  Result<void> add(NodeId id, int32_t from, int32_t to) {
    if (states_.size() > std::min(kMaxNfaStates, budget_.states)) return too_large();
    const Grammar::Node& node = grammar_.node(id);
    switch (node.kind) {
      case Grammar::Kind::kNothing: return {};
      case Grammar::Kind::kBytes: {
        for (int byte = 0; byte < 256;) {
          if (!node.bytes.has(static_cast<uint8_t>(byte))) {
            ++byte;
            continue;
          }
          int end = byte;
          while (end < 256 && node.bytes.has(static_cast<uint8_t>(end))) ++end;
          at(from).edges.push_back({static_cast<uint8_t>(byte), static_cast<uint8_t>(end - 1), to});
          byte = end;
        }
        return {};
      }
      case Grammar::Kind::kSequence: {
        int32_t last = from;
        for (size_t i = 0; i < node.children.size(); ++i) {
          const int32_t next = i + 1 == node.children.size() ? to : add_state();
          RETURN_IF_ERROR(add(node.children[i], last, next));
          last = next;
        }
        if (node.children.empty()) at(from).empty.push_back(to);
        return {};
      }
      case Grammar::Kind::kChoice:
        for (const NodeId child : node.children) RETURN_IF_ERROR(add(child, from, to));
        return {};
      case Grammar::Kind::kRepeat: return add_repeat(node, from, to);
      case Grammar::Kind::kRule:
        if (lift_ == nullptr) return make_error(ErrorCode::kInternal, "rule {} is called where no call can be", node.rule);
        at(from).calls.push_back({node.rule, to});
        return {};
      case Grammar::Kind::kGraph: return add_graph(*node.graph, from, to);
    }
    CHECK_UNREACHABLE();
  }

 private:
  State& at(int32_t s) { return states_[static_cast<size_t>(s)]; }

  Result<void> add_repeat(const Grammar::Node& node, int32_t from, int32_t to) {
    const NodeId body = node.children.front();
    const bool unbounded = node.max == Grammar::kUnbounded;
    const int32_t times = unbounded ? node.min : node.max;
    if (lift_ != nullptr && times > kMaxUnrolled) {
      ASSIGN_OR_RETURN(Dfa automaton, build_dfa(grammar_, body, lift_, &budget_));
      if (automaton.is_prefix_free()) {
        at(from).calls.push_back({(*lift_)(body, node.min, node.max, std::move(automaton)), to});
        return {};
      }
    }
    int32_t last = add_state();
    at(from).empty.push_back(last);
    const auto one_more = [&]() -> Result<void> {
      const int32_t next = add_state();
      RETURN_IF_ERROR(add(body, last, next));
      last = next;
      return {};
    };
    for (int32_t i = 0; i < node.min; ++i) RETURN_IF_ERROR(one_more());
    if (unbounded) {
      const int32_t hub = add_state(), end = add_state();
      at(last).empty.push_back(hub);
      RETURN_IF_ERROR(add(body, hub, end));
      at(end).empty.push_back(hub);
      at(hub).empty.push_back(to);
      return {};
    }
    for (int32_t i = node.min; i < node.max; ++i) {
      at(last).empty.push_back(to);
      RETURN_IF_ERROR(one_more());
    }
    at(last).empty.push_back(to);
    return {};
  }

  Result<void> add_graph(const GrammarGraph& graph, int32_t from, int32_t to) {
    std::vector<int32_t> state(graph.accepts.size());
    for (size_t i = 0; i < state.size(); ++i) {
      state[i] = add_state();
      if (graph.accepts[i]) at(state[i]).empty.push_back(to);
    }
    if (state.empty()) return {};
    at(from).empty.push_back(state[static_cast<size_t>(graph.start)]);
    for (const GrammarGraph::Edge& edge : graph.edges)
      RETURN_IF_ERROR(add(edge.node, state[static_cast<size_t>(edge.from)], state[static_cast<size_t>(edge.to)]));
    return {};
  }

  const Grammar& grammar_;
  const LiftRepeat* lift_;
  BuildBudget& budget_;
  std::vector<State> states_;
};

struct HashOfStates {
  size_t operator()(const std::vector<int32_t>& states) const {
    uint64_t hash = states.size();
    for (const int32_t s : states) hash = hash_combine(hash, static_cast<uint64_t>(s));
    return hash;
  }
};

/// The subset construction.
class Determinizer {
 public:
  Determinizer(const Nfa& nfa, int32_t accepting, size_t num_nfa_states, size_t max_work)
      : nfa_(nfa), accepting_(accepting), max_work_(std::min(kMaxSubsetWork, max_work)), seen_(num_nfa_states, 0) {}
  [[nodiscard]] size_t work() const { return work_; }

  Result<Dfa> run(int32_t start) {
    add({start});
    for (size_t i = 0; i < subsets_.size(); ++i) {
      if (subsets_.size() > kMaxDfaStates || work_ > max_work_) return too_large();
      expand(i);
    }
    return std::move(dfa_);
  }

 private:
  /// The state for everything that is reached from `targets` without a byte.
  int32_t add(std::vector<int32_t> targets) {
    ++round_;
    std::vector<int32_t> closed;
    while (!targets.empty()) {
      const int32_t s = targets.back();
      targets.pop_back();
      if (std::exchange(seen_[static_cast<size_t>(s)], round_) == round_) continue;
      const Nfa::State& state = nfa_.state(s);
      if (s == accepting_ || !state.edges.empty() || !state.calls.empty()) closed.push_back(s);
      targets.insert(targets.end(), state.empty.begin(), state.empty.end());
      ++work_;
    }
    std::ranges::sort(closed);
    const auto [it, is_new] = ids_.emplace(closed, static_cast<int32_t>(subsets_.size()));
    if (is_new) {
      Dfa::State state;
      state.accepts = std::ranges::binary_search(closed, accepting_);
      dfa_.states.push_back(std::move(state));
      subsets_.push_back(std::move(closed));
    }
    return it->second;
  }

  void expand(size_t i) {
    std::vector<Dfa::Edge> edges;
    std::map<RuleId, std::vector<int32_t>> calls;
    for (const int32_t s : subsets_[i]) {
      const Nfa::State& state = nfa_.state(s);
      edges.insert(edges.end(), state.edges.begin(), state.edges.end());
      for (const Dfa::Call& call : state.calls) calls[call.rule].push_back(call.to);
    }
    std::vector<int> cuts;  // where the set of edges changes
    for (const Dfa::Edge& edge : edges) {
      cuts.push_back(edge.low);
      cuts.push_back(edge.high + 1);
    }
    std::ranges::sort(cuts);
    cuts.erase(std::ranges::unique(cuts).begin(), cuts.end());
    std::vector<Dfa::Edge> out;
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      std::vector<int32_t> targets;
      for (const Dfa::Edge& edge : edges)
        if (edge.low <= cuts[c] && cuts[c] <= edge.high) targets.push_back(edge.to);
      work_ += edges.size();
      if (targets.empty()) continue;
      const int32_t to = add(std::move(targets));
      const auto low = static_cast<uint8_t>(cuts[c]), high = static_cast<uint8_t>(cuts[c + 1] - 1);
      if (!out.empty() && out.back().to == to && out.back().high + 1 == low) {
        out.back().high = high;
      } else {
        out.push_back({low, high, to});
      }
    }
    std::vector<Dfa::Call> calls_out;
    for (auto& [rule, targets] : calls) calls_out.push_back({rule, add(std::move(targets))});
    dfa_.states[i].edges = std::move(out);
    dfa_.states[i].calls = std::move(calls_out);
  }

  const Nfa& nfa_;
  const int32_t accepting_;
  const size_t max_work_;
  std::vector<uint32_t> seen_;
  uint32_t round_ = 0;
  size_t work_ = 0;
  std::vector<std::vector<int32_t>> subsets_;
  std::unordered_map<std::vector<int32_t>, int32_t, HashOfStates> ids_;
  Dfa dfa_;
};

/// Runs two automata side by side; where `b` has no way on it stands at -1.
class Product {
 public:
  Product(const Dfa& a, const Dfa& b, bool both) : a_(a), b_(b), both_(both) {}

  Result<Dfa> run() {
    if (a_.states.empty() || (both_ && b_.states.empty())) return Dfa{};
    add(0, b_.states.empty() ? -1 : 0);
    for (size_t i = 0; i < pairs_.size(); ++i) {
      if (pairs_.size() > kMaxDfaStates) return too_large();
      expand(i);
    }
    return out_.trimmed();
  }

 private:
  int32_t add(int32_t a, int32_t b) {
    const auto [it, is_new] = ids_.emplace(std::pair(a, b), static_cast<int32_t>(pairs_.size()));
    if (is_new) {
      pairs_.emplace_back(a, b);
      const bool b_accepts = b >= 0 && b_.states[static_cast<size_t>(b)].accepts;
      Dfa::State state;
      state.accepts = a_.states[static_cast<size_t>(a)].accepts && b_accepts == both_;
      out_.states.push_back(std::move(state));
    }
    return it->second;
  }

  void expand(size_t i) {
    const auto [a, b] = pairs_[i];
    static const std::vector<Dfa::Edge> kNone;
    const std::vector<Dfa::Edge>& others = b < 0 ? kNone : b_.states[static_cast<size_t>(b)].edges;
    std::vector<Dfa::Edge> edges;
    for (const Dfa::Edge& edge : a_.states[static_cast<size_t>(a)].edges) {
      int low = edge.low;
      for (const Dfa::Edge& other : others) {
        if (other.high < low || other.low > edge.high) continue;
        if (!both_ && other.low > low) edges.push_back({static_cast<uint8_t>(low), static_cast<uint8_t>(other.low - 1), add(edge.to, -1)});
        const auto first = static_cast<uint8_t>(std::max<int>(low, other.low)), last = std::min(edge.high, other.high);
        edges.push_back({first, last, add(edge.to, other.to)});
        low = last + 1;
      }
      if (!both_ && low <= edge.high) edges.push_back({static_cast<uint8_t>(low), edge.high, add(edge.to, -1)});
    }
    std::ranges::sort(edges, {}, &Dfa::Edge::low);
    out_.states[i].edges = std::move(edges);
  }

  const Dfa& a_;
  const Dfa& b_;
  const bool both_;
  std::map<std::pair<int32_t, int32_t>, int32_t> ids_;
  std::vector<std::pair<int32_t, int32_t>> pairs_;
  Dfa out_;
};

}  // namespace

bool Dfa::has_calls() const {
  return std::ranges::any_of(states, [](const State& s) { return !s.calls.empty(); });
}

bool Dfa::is_prefix_free() const {
  if (states.empty() || states.front().accepts) return false;
  return std::ranges::none_of(states, [](const State& s) { return s.accepts && (!s.edges.empty() || !s.calls.empty()); });
}

bool Dfa::accepts(std::string_view text) const {
  if (states.empty()) return false;
  size_t at = 0;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    const auto edge = std::ranges::find_if(states[at].edges, [&](const Edge& e) { return e.low <= byte && byte <= e.high; });
    if (edge == states[at].edges.end()) return false;
    at = static_cast<size_t>(edge->to);
  }
  return states[at].accepts;
}

Dfa Dfa::trimmed() const {
  std::vector<std::vector<int32_t>> before(states.size());
  std::vector<int32_t> reached;
  std::vector<bool> useful(states.size());
  for (size_t i = 0; i < states.size(); ++i) {
    for (const Edge& edge : states[i].edges) before[static_cast<size_t>(edge.to)].push_back(static_cast<int32_t>(i));
    if (states[i].accepts) reached.push_back(static_cast<int32_t>(i)), useful[i] = true;
  }
  while (!reached.empty()) {
    const int32_t s = reached.back();
    reached.pop_back();
    for (const int32_t p : before[static_cast<size_t>(s)])
      if (!useful[static_cast<size_t>(p)]) useful[static_cast<size_t>(p)] = true, reached.push_back(p);
  }
  Dfa out;
  if (states.empty() || !useful[0]) return out;
  std::vector<int32_t> number(states.size(), -1);
  for (size_t i = 0; i < states.size(); ++i) {
    if (!useful[i]) continue;
    number[i] = static_cast<int32_t>(out.states.size());
    out.states.push_back({states[i].accepts, {}, {}});
  }
  for (size_t i = 0; i < states.size(); ++i) {
    if (!useful[i]) continue;
    for (Edge edge : states[i].edges) {
      if (!useful[static_cast<size_t>(edge.to)]) continue;
      edge.to = number[static_cast<size_t>(edge.to)];
      out.states[static_cast<size_t>(number[i])].edges.push_back(edge);
    }
  }
  return out;
}

NodeId Dfa::as_node(Grammar& grammar) const {
  if (states.empty()) return grammar.nothing();
  GrammarGraph graph;
  std::map<std::pair<uint8_t, uint8_t>, NodeId> nodes;
  for (size_t i = 0; i < states.size(); ++i) {
    graph.accepts.push_back(states[i].accepts);
    for (const Edge& edge : states[i].edges) {
      const auto [it, is_new] = nodes.emplace(std::pair(edge.low, edge.high), 0);
      if (is_new) it->second = grammar.bytes(ByteSet::range(edge.low, edge.high));
      graph.edges.push_back({static_cast<int32_t>(i), edge.to, it->second});
    }
    for (const Call& call : states[i].calls) graph.edges.push_back({static_cast<int32_t>(i), call.to, grammar.rule(call.rule)});
  }
  return grammar.graph(std::move(graph));
}

Result<Dfa> build_dfa(const Grammar& grammar, NodeId node, const LiftRepeat* lift, BuildBudget* budget) {
  BuildBudget own;
  BuildBudget& left = budget != nullptr ? *budget : own;
  Nfa nfa(grammar, lift, left);
  const int32_t start = nfa.add_state(), end = nfa.add_state();
  RETURN_IF_ERROR(nfa.add(node, start, end));
  const int32_t num_states = nfa.add_state() + 1;
  left.states -= std::min(left.states, static_cast<size_t>(num_states));
  Determinizer determinizer(nfa, end, static_cast<size_t>(num_states), left.work);
  Result<Dfa> dfa = determinizer.run(start);
  left.work -= std::min(left.work, determinizer.work());
  return dfa;
}

Result<Dfa> intersect(const Dfa& a, const Dfa& b) { return Product(a, b, true).run(); }
Result<Dfa> subtract(const Dfa& a, const Dfa& b) { return Product(a, b, false).run(); }

}  // namespace quern::text
