#pragma once

#include <map>
#include <memory>
#include <string>

#include "ops/kernel_table.h"
#include "ops/select.h"
#include "worker/problems.h"

namespace quern::worker {

/// The kernels of one worker: one object per op and problem, made on first demand by the plan's rules. Used by the worker's thread alone.
class KernelCache {
 public:
  KernelCache(const ops::KernelTable& table, ops::Device& device, ops::SelectionRules rules)
      : table_(table), device_(device), rules_(std::move(rules)) {}

  template <class Op>
  Result<const typename Op::Kernel*> get(const typename Op::Problem& problem) {
    const std::string key = fmt::format("{} {}", Op::kName, describe(problem));
    if (const auto known = kernels_.find(key); known != kernels_.end()) return static_cast<const typename Op::Kernel*>(known->second.get());
    const ops::Choice<Op> choice = ops::select(table_.list<Op>(), problem, device_.traits(), rules_);
    if (choice.chosen == nullptr) {
      std::string reasons;
      for (const ops::CandidateAnswer& answer : choice.answers) reasons += fmt::format("; {}: {}", answer.candidate, answer.verdict.reason);
      return make_error(ErrorCode::kUnsupported, "{} {}: no kernel takes it{}", Op::kName, describe(problem), reasons);
    }
    ASSIGN_OR_RETURN(std::unique_ptr<typename Op::Kernel> kernel, choice.chosen->make(problem, device_));
    const typename Op::Kernel* made = kernel.get();
    kernels_.emplace(key, std::move(kernel));
    return made;
  }

  /// The most scratch that any kernel made so far wants for `max_rows` rows.
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const {
    size_t bytes = 0;
    for (const auto& [key, kernel] : kernels_) bytes = std::max(bytes, kernel->workspace_bytes(max_rows));
    return bytes;
  }

 private:
  const ops::KernelTable& table_;
  ops::Device& device_;
  ops::SelectionRules rules_;
  std::map<std::string, std::unique_ptr<ops::Kernel>> kernels_;
};

}  // namespace quern::worker
