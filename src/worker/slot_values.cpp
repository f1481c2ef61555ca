#include "worker/slot_values.h"

#include <algorithm>

namespace quern::worker {

SlotValues::SlotValues(int32_t num_slots, int32_t k_max) {
  const auto slots = static_cast<size_t>(num_slots);
  for (std::vector<int32_t>* values : {&cursor, &boundary, &last_token}) values->assign(slots, 0);
  drafts.assign(slots * static_cast<size_t>(std::max(k_max, 1)), 0);
}

void SlotValues::apply(const std::vector<StateOp>& ops) {
  for (const StateOp& op : ops) {
    const auto slot = static_cast<size_t>(op.slot);
    switch (op.kind) {
      case StateOp::Kind::kClear:
        cursor[slot] = boundary[slot] = last_token[slot] = 0;
        std::fill_n(drafts.begin() + static_cast<std::ptrdiff_t>(slot * num_drafts()), num_drafts(), 0);
        break;
      case StateOp::Kind::kRestore:
      case StateOp::Kind::kRewind: cursor[slot] = boundary[slot] = op.boundary; break;
      case StateOp::Kind::kSnapshot:
      case StateOp::Kind::kBlockToHost:
      case StateOp::Kind::kBlockFromHost:
      case StateOp::Kind::kSnapshotToHost:
      case StateOp::Kind::kSnapshotFromHost: break;
    }
  }
}

void SlotValues::advance(const StepPlan& plan, const StepResult& result) {
  if (result.error) return;
  constexpr auto kGrid = static_cast<int32_t>(ops::kGrid);
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    const RunResult& done = result.runs[i];
    const auto slot = static_cast<size_t>(run.slot);
    const int32_t before = cursor[slot];
    // A verify commits what was accepted and the row that drew the next token; the fold is stored by the first step that begins past it.
    cursor[slot] += run.verify() ? static_cast<int32_t>(done.tokens.size()) : run.num_rows;
    boundary[slot] = (run.verify() ? before : cursor[slot]) / kGrid * kGrid;
    if (!done.tokens.empty()) last_token[slot] = done.tokens.back();
    std::copy_n(done.drafts.begin(), std::min(done.drafts.size(), num_drafts()), drafts.begin() + static_cast<std::ptrdiff_t>(slot * num_drafts()));
  }
}

}  // namespace quern::worker
