#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bounded_queue.h"
#include "base/hash.h"
#include "engine/fake_stage.h"
#include "worker/worker_group.h"

namespace quern::engine::testing {

struct FakeWorkersOptions {
  bool own_thread = false;   // steps run on a thread of their own, as on a device, and each stage of a pipeline on its own; else the last stage runs inside wait(), the others in submit()
  int32_t max_delay_us = 0;  // with own_thread: a random time before some steps
  int32_t max_steps_in_flight = 2;
  std::optional<uint64_t> failing_step;
  /// The logits after the `second`-th token of the output are NaN where the prompt begins with token `first`.
  std::optional<std::pair<int32_t, int32_t>> non_finite;
};

/// The test's hand on workers that the engine owns; thread-safe.
class FakeControl {
 public:
  /// No step begins from now on, except `n` more with each release(n).
  void hold();
  void release(int64_t num_steps);
  void open();
  /// Steps that release() still lets begin.
  [[nodiscard]] int64_t permits() const;
  /// Returns once so many steps were submitted in all.
  void wait_for_submitted(uint64_t num_steps);

  [[nodiscard]] std::vector<std::string> violations() const;
  [[nodiscard]] std::vector<worker::StepPlan> plans() const;

 private:
  friend class FakeWorkers;
  void begin_step();
  void submitted(const worker::StepPlan& plan);
  void violation(std::string what);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  int64_t permits_ = 0;
  std::vector<worker::StepPlan> plans_;
  std::vector<std::string> violations_;
};

/// Executes plans with a FakeModel and memory that a wrong plan corrupts as it would on a device, on each of the limits' stages, of which the
/// first may be as far ahead of the last as there are steps in flight; checks besides everything that workers may rely on. What it finds wrong
/// is in control->violations().
class FakeWorkers final : public worker::WorkerGroup {
 public:
  FakeWorkers(const worker::WorkerLimits& limits, const FakeWorkersOptions& options, std::shared_ptr<FakeControl> control);
  FakeWorkers(const FakeWorkers&) = delete;
  FakeWorkers& operator=(const FakeWorkers&) = delete;
  ~FakeWorkers() override;

  [[nodiscard]] const worker::WorkerLimits& limits() const override { return limits_; }
  void submit(worker::StepPlan plan) override;
  void submit_masks(worker::StepMasks masks) override;
  worker::StepResult wait() override;
  std::optional<worker::StepResult> wait_or_wake() override;
  void wake() override { results_.wake(); }
  std::optional<worker::StepResult> poll() override;

 private:
  /// What the host may assume of a slot when it plans: upper bounds, ahead of the device.
  struct PlannedSlot {
    bool cleared = false, has_parameters = false;
    bool prompt_ended = false;      // a D run, or a P run that ended off the grid
    bool next_token_known = false;  // the device will have sampled the token at the cursor
    int32_t cursor = 0;
    int32_t num_drafts = 0;  // that the device will hold
    bool has_mtp_rows = true;           // the MTP layer saw every row
    std::optional<int32_t> next_given;  // the token that the last run said would follow
    uint64_t owner = 0;                 // counts those who had the slot
    int32_t num_shared = 0;  // blocks that came with a restored prefix: they are read only
    std::vector<int32_t> blocks;
  };
  struct Verify {
    size_t run = 0;
    int32_t slot = 0, num_rows = 0;
    uint64_t owner = 0;
  };
  struct StepInFlight {
    std::set<int32_t> slots, blocks;
    std::vector<Verify> verifies;
  };
  /// A plan on its way through the stages.
  struct Work {
    worker::StepPlan plan;
    uint64_t num_results = 0;  // that the engine had when it made the plan: what was drawn in these steps is known to every stage
  };
  struct Drawn {
    worker::StepPlan plan;
    worker::StepResult result;
  };

  void check(const worker::StepPlan& plan);
  void check_state_op(const worker::StateOp& op, std::set<int32_t>& cleared);
  void check_run(const worker::StepRun& run, StepInFlight& in_flight);
  [[nodiscard]] size_t last() const { return stages_.size() - 1; }
  bool pass_stage(size_t stage, Work& work);
  worker::StepResult finish(Work work);
  void retire(const worker::StepResult& result);
  void expect(bool condition, const std::string& what);

  const worker::WorkerLimits limits_;
  const FakeWorkersOptions options_;
  const std::shared_ptr<FakeControl> control_;

  // The caller's side.
  std::vector<PlannedSlot> planned_;
  std::vector<int32_t> block_owner_;  // the slot that writes to it
  std::deque<StepInFlight> in_flight_;
  std::set<uint64_t> masks_awaited_;
  uint64_t num_submitted_ = 0, num_owners_ = 0;

  // The device's side.
  std::vector<FakeStage> stages_;
  std::vector<uint64_t> num_learnt_;                            // steps, by stage
  std::vector<std::unique_ptr<BoundedQueue<Work>>> work_;       // by stage
  std::vector<std::unique_ptr<BoundedQueue<Drawn>>> learning_;  // from the last stage to each of the others
  BoundedQueue<worker::StepMasks> masks_{64};
  BoundedQueue<worker::StepResult> results_{64};
  std::vector<std::jthread> threads_;
};

}  // namespace quern::engine::testing
