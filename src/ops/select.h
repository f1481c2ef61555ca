#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/candidate.h"

// Choice by list: the first candidate that accepts the problem is taken, and each refusal keeps its reason. No timing decides at run time.

namespace quern::ops {

/// What one candidate said of one problem.
struct CandidateAnswer {
  std::string_view candidate;
  Verdict verdict;
};

/// The chosen candidate of one op and problem, or none; with what every candidate said.
template <class Op>
struct Choice {
  const Candidate<Op>* chosen = nullptr;
  std::vector<CandidateAnswer> answers;
  std::string_view why_absent;  // the platform has no candidate at all
};

/// Candidates that are not considered, by name, with the reason (a failed self-test), and those the user demands per op.
struct SelectionRules {
  std::map<std::string, std::string, std::less<>> forced;    // op -> candidate
  std::map<std::string, std::string, std::less<>> disabled;  // "op candidate" -> reason
};

template <class Op>
Choice<Op> select(const CandidateList<Op>& list, const typename Op::Problem& problem, const DeviceTraits& traits, const SelectionRules& rules = {}) {
  Choice<Op> choice;
  choice.why_absent = list.why_absent();
  const auto forced = rules.forced.find(Op::kName);
  for (const Candidate<Op>& candidate : list.candidates()) {
    Verdict verdict = candidate.accepts(problem, traits);
    if (const auto disabled = rules.disabled.find(fmt::format("{} {}", Op::kName, candidate.name)); disabled != rules.disabled.end())
      verdict = refuse("{}", disabled->second);
    if (forced != rules.forced.end() && forced->second != candidate.name) verdict = refuse("`--kernel {}={}` asks for another", Op::kName, forced->second);
    if (verdict.accepted && candidate.by_request && forced == rules.forced.end()) verdict = refuse("only by request: `--kernel {}={}`", Op::kName, candidate.name);
    if (verdict.accepted && choice.chosen == nullptr) choice.chosen = &candidate;
    choice.answers.push_back({candidate.name, std::move(verdict)});
  }
  return choice;
}

}  // namespace quern::ops
