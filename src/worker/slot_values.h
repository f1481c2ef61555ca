#pragma once

#include <cstdint>
#include <vector>

#include "worker/step.h"

namespace quern::worker {

/// What sampling changes of each slot (ops::SlotTables), as the host knows it once a step's result is there. The stages of a pipeline that do not sample take it with the next step: a sequence
/// has one step in flight there, so its entries are those of its last step; entries of sequences in other steps may be behind, and are not read.
struct SlotValues {
  std::vector<int32_t> cursor, boundary, last_token;  // [num_slots]
  std::vector<int32_t> drafts;                        // [num_slots, max(k_max, 1)]

  SlotValues(int32_t num_slots, int32_t k_max);
  /// State operations set cursors before a step's rows are computed.
  void apply(const std::vector<StateOp>& ops);
  /// The rows of a step are done.
  void advance(const StepPlan& plan, const StepResult& result);

 private:
  [[nodiscard]] size_t num_drafts() const { return drafts.size() / cursor.size(); }
};

}  // namespace quern::worker
