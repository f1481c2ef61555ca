#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/fake_model.h"
#include "worker/worker_group.h"

namespace quern::engine::testing {

/// One stage of fake workers: KV blocks, slots, cursors, a recurrent state and places for copies, which a wrong plan corrupts as it would on a
/// device. Every stage holds the whole fake model, so that each can tell what is wrong with its own memory. Not thread-safe.
class FakeStage {
 public:
  using Masks = std::map<int32_t, std::vector<uint32_t>>;  // by slot

  /// `non_finite`: see FakeWorkersOptions.
  FakeStage(const worker::WorkerLimits& limits, std::optional<std::pair<int32_t, int32_t>> non_finite, std::function<void(std::string)> violation);

  /// State ops, updates and all rows of a plan; appends a result for each run, with what needs no drawing.
  void compute(const worker::StepPlan& plan, worker::StepResult& result);
  /// The last stage: draws the tokens of a plan that was computed, and makes drafts.
  void draw(const worker::StepPlan& plan, const Masks& masks, worker::StepResult& result);
  /// Any other stage: what was drawn in a step that it has computed.
  void learn(const worker::StepPlan& plan, const worker::StepResult& result);

 private:
  struct Snapshot {
    int32_t boundary = -1;
    uint64_t state = 0xbadull;
  };
  struct Slot {
    int32_t cursor = 0;
    uint64_t state = 0xdeadull;  // of the last owner, until it is cleared
    int32_t boundary = 0;        // the last one that was passed, and the state there
    uint64_t boundary_state = 0xdeadull;
    std::optional<int32_t> last_token;
    std::vector<int32_t> block_table;
    SamplingParams sampling;
    std::vector<int32_t> prompt_ids, output, drafts;
    std::vector<int32_t> verified;  // the rows of a verify, until its tokens are drawn
  };

  void apply(const worker::StateOp& op);
  void compute(const worker::StepRun& run, worker::RunResult& result);
  void draw(const Slot& slot, const std::vector<uint32_t>* mask, worker::RunResult& result) const;
  void verify(Slot& slot, const std::vector<uint32_t>* masks, worker::RunResult& result) const;
  void propose(const worker::StepRun& run, const Slot& slot, worker::RunResult& result) const;
  static void learn(const worker::StepRun& run, Slot& slot, const worker::RunResult& result);
  [[nodiscard]] bool is_non_finite(const Slot& slot) const;
  [[nodiscard]] uint64_t state_in_kv(const Slot& slot, int32_t num_rows) const;
  int32_t& kv_of(const Slot& slot, int32_t row);

  const worker::WorkerLimits limits_;
  const std::optional<std::pair<int32_t, int32_t>> non_finite_;
  const std::function<void(std::string)> violation_;
  const FakeModel model_;
  std::vector<Slot> slots_;
  std::vector<Snapshot> snapshots_, host_snapshots_;
  std::vector<int32_t> kv_, host_kv_;  // [num_blocks, 64]: the token of the row
};

}  // namespace quern::engine::testing
