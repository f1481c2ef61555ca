#include "text/pushdown_automaton.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

namespace quern::text {
namespace {

constexpr size_t kMaxStates = 200'000;
constexpr int32_t kMaxEdgesWithoutTable = 4;

/// One rule on its way.
struct RuleDraft {
  std::string name;
  Dfa dfa;
  bool counts = false;
  int32_t min = 0, max = 0;
  bool productive = false, nullable = false;
  ByteSet first, follow;
};

}  // namespace

class PushdownCompiler {
 public:
  explicit PushdownCompiler(const Grammar& grammar) : grammar_(grammar) {}

  Result<PushdownAutomaton> run(RuleId root) {
    number_of(root);
    while (!pending_.empty()) {
      const auto [rule, number] = pending_.front();
      pending_.pop_front();
      const Grammar::Rule& source = grammar_.rules()[static_cast<size_t>(rule)];
      if (source.body < 0) return invalid_argument("rule \"{}\" is not defined", source.name);
      const LiftRepeat lift = [this](NodeId body, int32_t min, int32_t max, Dfa dfa) { return lift_repeat(body, min, max, std::move(dfa)); };
      ASSIGN_OR_RETURN(Dfa dfa, build_dfa(grammar_, source.body, &lift, &budget_));
      RETURN_IF_ERROR(take(static_cast<size_t>(number), source.name, std::move(dfa)));
    }
    find_productive();
    if (!drafts_.front().productive) return invalid_argument("no text at all is allowed");
    for (RuleDraft& draft : drafts_) prune(draft);
    find_nullable();
    RETURN_IF_ERROR(refuse_left_recursion());
    find_first();
    find_follow();
    return flatten();
  }

 private:
  // Calls in drafts: rules of the grammar by their id until take() numbers them; lifted rules have numbers from the beginning, shown by a
  // negative id.
  int32_t number_of(RuleId rule) {
    if (rule < 0) return -rule - 1;
    const auto [it, is_new] = numbers_.emplace(rule, static_cast<int32_t>(drafts_.size()));
    if (is_new) {
      drafts_.emplace_back();
      pending_.emplace_back(rule, it->second);
    }
    return it->second;
  }

  RuleId lift_repeat(NodeId body, int32_t min, int32_t max, Dfa dfa) {
    const auto [it, is_new] = lifted_.emplace(std::tuple(body, min, max), static_cast<int32_t>(drafts_.size()));
    if (is_new) {
      drafts_.emplace_back();
      RuleDraft& draft = drafts_.back();
      draft.counts = true;
      draft.min = min;
      draft.max = max == Grammar::kUnbounded ? INT32_MAX : max;
      // What completes a body leads back to the start.
      std::vector<int32_t> number(dfa.states.size());
      Dfa loop;
      for (size_t i = 0; i < dfa.states.size(); ++i) {
        if (dfa.states[i].accepts) continue;
        number[i] = static_cast<int32_t>(loop.states.size());
        loop.states.push_back(std::move(dfa.states[i]));
      }
      for (Dfa::State& state : loop.states) {
        for (Dfa::Edge& edge : state.edges) edge.to = number[static_cast<size_t>(edge.to)];
        for (Dfa::Call& call : state.calls) call.to = number[static_cast<size_t>(call.to)];
      }
      lifted_bodies_.emplace_back(it->second, std::move(loop));
    }
    return -it->second - 1;
  }

  Result<void> take(size_t number, std::string name, Dfa dfa) {
    add_states(number, std::move(dfa));
    drafts_[number].name = std::move(name);
    while (!lifted_bodies_.empty()) {
      auto [lifted, loop] = std::move(lifted_bodies_.back());
      lifted_bodies_.pop_back();
      add_states(static_cast<size_t>(lifted), std::move(loop));
      drafts_[static_cast<size_t>(lifted)].name = drafts_[number].name;
    }
    if (num_states_ > kMaxStates) return invalid_argument("the grammar is too large: its automata would have more than {} states", kMaxStates);
    return {};
  }

  void add_states(size_t number, Dfa dfa) {
    for (Dfa::State& state : dfa.states) {
      for (Dfa::Call& call : state.calls) call.rule = number_of(call.rule);
    }
    num_states_ += dfa.states.size();
    drafts_[number].dfa = std::move(dfa);
  }

  [[nodiscard]] bool is_end(const RuleDraft& draft, size_t state) const { return draft.counts ? state == 0 : draft.dfa.states[state].accepts; }

  /// States of `draft` from which its end is reached through rules that can be completed.
  [[nodiscard]] std::vector<bool> useful_states(const RuleDraft& draft) const {
    const std::vector<Dfa::State>& states = draft.dfa.states;
    std::vector<std::vector<int32_t>> before(states.size());
    std::vector<int32_t> reached;
    std::vector<bool> useful(states.size());
    for (size_t i = 0; i < states.size(); ++i) {
      for (const Dfa::Edge& edge : states[i].edges) before[static_cast<size_t>(edge.to)].push_back(static_cast<int32_t>(i));
      for (const Dfa::Call& call : states[i].calls)
        if (drafts_[static_cast<size_t>(call.rule)].productive) before[static_cast<size_t>(call.to)].push_back(static_cast<int32_t>(i));
      if (is_end(draft, i)) useful[i] = true, reached.push_back(static_cast<int32_t>(i));
    }
    while (!reached.empty()) {
      const int32_t s = reached.back();
      reached.pop_back();
      for (const int32_t p : before[static_cast<size_t>(s)])
        if (!useful[static_cast<size_t>(p)]) useful[static_cast<size_t>(p)] = true, reached.push_back(p);
    }
    return useful;
  }

  /// A counting rule's start is its end, so whether a body can be completed needs a look of its own.
  [[nodiscard]] bool has_body(const RuleDraft& draft, const std::vector<bool>& useful) const {
    if (draft.dfa.states.empty()) return false;
    const Dfa::State& head = draft.dfa.states.front();
    return std::ranges::any_of(head.edges, [&](const Dfa::Edge& e) { return useful[static_cast<size_t>(e.to)]; }) ||
           std::ranges::any_of(head.calls, [&](const Dfa::Call& c) {
             return drafts_[static_cast<size_t>(c.rule)].productive && useful[static_cast<size_t>(c.to)];
           });
  }

  void find_productive() {
    for (bool changed = true; changed;) {
      changed = false;
      for (RuleDraft& draft : drafts_) {
        if (draft.productive || draft.dfa.states.empty()) continue;
        const std::vector<bool> useful = useful_states(draft);
        draft.productive = draft.counts ? draft.min == 0 || has_body(draft, useful) : useful[0];
        changed = changed || draft.productive;
      }
    }
  }

  /// Drops what leads nowhere. State 0 stays.
  void prune(RuleDraft& draft) {
    if (draft.dfa.states.empty()) return;
    const std::vector<bool> useful = useful_states(draft);
    std::vector<int32_t> number(draft.dfa.states.size(), -1);
    Dfa out;
    for (size_t i = 0; i < number.size(); ++i) {
      if (i > 0 && !useful[i]) continue;
      number[i] = static_cast<int32_t>(out.states.size());
      out.states.push_back(std::move(draft.dfa.states[i]));
    }
    for (Dfa::State& state : out.states) {
      std::erase_if(state.edges, [&](const Dfa::Edge& e) { return !useful[static_cast<size_t>(e.to)]; });
      std::erase_if(state.calls, [&](const Dfa::Call& c) { return !useful[static_cast<size_t>(c.to)] || !drafts_[static_cast<size_t>(c.rule)].productive; });
      for (Dfa::Edge& edge : state.edges) edge.to = number[static_cast<size_t>(edge.to)];
      for (Dfa::Call& call : state.calls) call.to = number[static_cast<size_t>(call.to)];
    }
    draft.dfa = std::move(out);
  }

  /// States that are reached from state `from` without a byte, through rules that can be empty.
  void close_over_empty(const RuleDraft& draft, std::vector<int32_t>& states) const {
    std::vector<bool> seen(draft.dfa.states.size());
    for (const int32_t s : states) seen[static_cast<size_t>(s)] = true;
    for (size_t i = 0; i < states.size(); ++i) {
      for (const Dfa::Call& call : draft.dfa.states[static_cast<size_t>(states[i])].calls) {
        if (!drafts_[static_cast<size_t>(call.rule)].nullable || seen[static_cast<size_t>(call.to)]) continue;
        seen[static_cast<size_t>(call.to)] = true;
        states.push_back(call.to);
      }
    }
  }
  [[nodiscard]] std::vector<int32_t> without_byte_from(const RuleDraft& draft, int32_t state) const {
    std::vector<int32_t> states{state};
    if (!draft.dfa.states.empty()) close_over_empty(draft, states);
    return states;
  }

  void find_nullable() {
    for (bool changed = true; changed;) {
      changed = false;
      for (RuleDraft& draft : drafts_) {
        if (draft.nullable || draft.dfa.states.empty()) continue;
        const std::vector<int32_t> states = without_byte_from(draft, 0);
        draft.nullable = draft.counts ? draft.min == 0 : std::ranges::any_of(states, [&](int32_t s) { return is_end(draft, static_cast<size_t>(s)); });
        changed = changed || draft.nullable;
      }
    }
  }

  Result<void> refuse_left_recursion() {
    enum class Mark : uint8_t { kNew, kOpen, kDone };
    std::vector<Mark> marks(drafts_.size());
    struct Visit {
      int32_t rule;
      std::vector<int32_t> next;
    };
    for (size_t root = 0; root < drafts_.size(); ++root) {
      if (marks[root] != Mark::kNew) continue;
      std::vector<Visit> stack;
      const auto open = [&](int32_t rule) {
        marks[static_cast<size_t>(rule)] = Mark::kOpen;
        const RuleDraft& draft = drafts_[static_cast<size_t>(rule)];
        std::vector<int32_t> next;
        if (!draft.dfa.states.empty())
          for (const int32_t s : without_byte_from(draft, 0))
            for (const Dfa::Call& call : draft.dfa.states[static_cast<size_t>(s)].calls) next.push_back(call.rule);
        stack.push_back({rule, std::move(next)});
      };
      open(static_cast<int32_t>(root));
      while (!stack.empty()) {
        if (stack.back().next.empty()) {
          marks[static_cast<size_t>(stack.back().rule)] = Mark::kDone;
          stack.pop_back();
          continue;
        }
        const int32_t rule = stack.back().next.back();
        stack.back().next.pop_back();
        if (marks[static_cast<size_t>(rule)] == Mark::kOpen)
          return invalid_argument("rule \"{}\" is left-recursive: it begins with itself, directly or through other rules; write it with a repetition, as in item (\",\" item)*",
                                  drafts_[static_cast<size_t>(rule)].name);
        if (marks[static_cast<size_t>(rule)] == Mark::kNew) open(rule);
      }
    }
    return {};
  }

  /// Bytes that may come first at `state`, apart from what follows the rule.
  [[nodiscard]] ByteSet first_at(const RuleDraft& draft, int32_t state, bool& reaches_end) const {
    ByteSet first;
    for (const int32_t s : without_byte_from(draft, state)) {
      const Dfa::State& here = draft.dfa.states[static_cast<size_t>(s)];
      for (const Dfa::Edge& edge : here.edges) first.merge(ByteSet::range(edge.low, edge.high));
      for (const Dfa::Call& call : here.calls) first.merge(drafts_[static_cast<size_t>(call.rule)].first);
      reaches_end = reaches_end || is_end(draft, static_cast<size_t>(s));
    }
    return first;
  }

  void find_first() {
    for (bool changed = true; changed;) {
      changed = false;
      for (RuleDraft& draft : drafts_) {
        bool ignored = false;
        if (!draft.dfa.states.empty()) changed = draft.first.merge(first_at(draft, 0, ignored)) || changed;
      }
    }
  }

  void find_follow() {
    struct Place {
      size_t caller, called;
      ByteSet first;
      bool reaches_end;
    };
    std::vector<Place> places;
    for (size_t i = 0; i < drafts_.size(); ++i) {
      for (const Dfa::State& state : drafts_[i].dfa.states) {
        for (const Dfa::Call& call : state.calls) {
          Place place{i, static_cast<size_t>(call.rule), {}, false};
          place.first = first_at(drafts_[i], call.to, place.reaches_end);
          places.push_back(place);
        }
      }
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (const Place& place : places) {
        changed = drafts_[place.called].follow.merge(place.first) || changed;
        if (place.reaches_end) changed = drafts_[place.called].follow.merge(drafts_[place.caller].follow) || changed;
      }
    }
  }

  PushdownAutomaton flatten() {
    PushdownAutomaton out;
    std::vector<int32_t> first_state;
    int32_t num_states = 0;
    for (const RuleDraft& draft : drafts_) {
      first_state.push_back(num_states);
      num_states += static_cast<int32_t>(draft.dfa.states.size());
    }
    for (size_t i = 0; i < drafts_.size(); ++i) {
      const RuleDraft& draft = drafts_[i];
      const int32_t base = first_state[i];
      PushdownAutomaton::Rule rule;
      rule.first_state = base;
      rule.num_states = static_cast<int32_t>(draft.dfa.states.size());
      rule.counts = draft.counts;
      rule.min = draft.min;
      rule.max = draft.max;
      rule.follow = draft.follow;
      if (!draft.dfa.has_calls()) rule.key = key_of(draft);
      out.rules_.push_back(std::move(rule));
      for (size_t s = 0; s < draft.dfa.states.size(); ++s) {
        const Dfa::State& source = draft.dfa.states[s];
        PushdownAutomaton::State state;
        state.rule = static_cast<int32_t>(i);
        state.accepts = source.accepts;
        state.loop_head = draft.counts && s == 0;
        state.first_edge = static_cast<int32_t>(out.edges_.size());
        state.num_edges = static_cast<int32_t>(source.edges.size());
        state.first_call = static_cast<int32_t>(out.calls_.size());
        state.num_calls = static_cast<int32_t>(source.calls.size());
        for (Dfa::Edge edge : source.edges) {
          edge.to += base;
          out.edges_.push_back(edge);
        }
        if (state.num_edges > kMaxEdgesWithoutTable) {
          state.table = static_cast<int32_t>(out.tables_.size() / 256);
          out.tables_.resize(out.tables_.size() + 256, PushdownAutomaton::kNone);
          int32_t* table = out.tables_.data() + static_cast<size_t>(state.table) * 256;
          for (const Dfa::Edge& edge : source.edges)
            for (int byte = edge.low; byte <= edge.high; ++byte) table[byte] = edge.to + base;
        }
        for (const Dfa::Call& call : source.calls) {
          const Dfa::State& after = draft.dfa.states[static_cast<size_t>(call.to)];
          const bool is_tail = !draft.counts && after.accepts && after.edges.empty() && after.calls.empty();
          out.calls_.push_back({first_state[static_cast<size_t>(call.rule)], base + call.to, is_tail});
        }
        out.states_.push_back(state);
      }
    }
    return out;
  }

  static std::string key_of(const RuleDraft& draft) {
    std::string key(draft.counts ? "c" : "r");
    const auto number = [&](int64_t value) { key.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
    for (const uint64_t word : draft.follow.words()) number(static_cast<int64_t>(word));
    for (const Dfa::State& state : draft.dfa.states) {
      number((int64_t{state.accepts} << 32) | static_cast<int64_t>(state.edges.size()));
      for (const Dfa::Edge& edge : state.edges) number((int64_t{edge.to} << 16) | (int64_t{edge.low} << 8) | edge.high);
    }
    return key;
  }

  const Grammar& grammar_;
  std::vector<RuleDraft> drafts_;
  std::map<RuleId, int32_t> numbers_;
  std::deque<std::pair<RuleId, int32_t>> pending_;
  std::map<std::tuple<NodeId, int32_t, int32_t>, int32_t> lifted_;
  std::vector<std::pair<int32_t, Dfa>> lifted_bodies_;
  size_t num_states_ = 0;
  BuildBudget budget_;
};

Result<PushdownAutomaton> PushdownAutomaton::compile(const Grammar& grammar, RuleId root) { return PushdownCompiler(grammar).run(root); }

size_t PushdownAutomaton::size_bytes() const {
  size_t size = states_.size() * sizeof(State) + edges_.size() * sizeof(Dfa::Edge) + calls_.size() * sizeof(Call) + tables_.size() * sizeof(int32_t);
  for (const Rule& rule : rules_) size += sizeof(Rule) + rule.key.size();
  return size;
}

}  // namespace quern::text
