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

/// Runs every candidate that the plan chose, other than plain, on a small instance of its problem and compares it with `<platform>.plain`; and checks plain's decoding of all
/// E4M3 codes. Milliseconds. An error means that the device itself failed.
Result<SelfTestReport> self_test(const ExecutionPlan& plan, const ops::KernelTable& table, const ops::SelectionRules& rules, ops::Device& device);

}  // namespace quern::worker
