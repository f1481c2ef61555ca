#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "ops/kernel_table.h"
#include "ops/select.h"
#include "worker/plan.h"

namespace quern::worker {

/// What the start-up self-test found.
struct SelfTestReport {
  struct Fault {
    std::string op, candidate, reason;
  };
  std::vector<Fault> faults;
  int32_t num_tested = 0;  // candidates compared with plain
};

/// Runs every candidate that `rules` choose for an op and problem of the rank, other than plain, on a small instance of the problem and compares it with
/// `<platform>.plain`; after a fault also the candidate that takes its place. Checks plain's decoding of all E4M3 codes in the schemes of the model. Takes a
/// fraction of a second, and memory that is given back. An error means that the device itself, or plain on it, cannot be used.
/// `row_counts`: numbers of rows that each is run on, list by list; by default those of the start.
Result<SelfTestReport> self_test(const ExecutionPlan& plan, const RankPlan& rank, const ops::KernelTable& table, const ops::SelectionRules& rules, ops::Device& device,
                                 const std::vector<std::vector<int32_t>>& row_counts = {});

}  // namespace quern::worker
