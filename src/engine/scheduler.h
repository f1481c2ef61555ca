#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "engine/budget.h"
#include "engine/index_pool.h"
#include "engine/sequence.h"
#include "worker/step.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// A run of a step, for the sequence that it belongs to.
struct PlannedRun {
  Sequence* sequence = nullptr;  // lives at least until Scheduler::retire
  int32_t num_rows = 0;
  bool ends_prompt = false;   // the run's last row is the prompt's last, for the first time
  bool samples = false;       // a token is drawn after the last row
  bool mask_pending = false;  // once its mask was sent
};

struct PlannedStep {
  worker::StepPlan plan;
  std::vector<PlannedRun> runs;  // parallel to plan.runs
};

/// Decides which rows run next, and owns all that running takes: sequences, slots and blocks (architecture.md section 5). Pure: no clock,
/// no thread, no device; used by the engine thread alone. Sequences run in the order of (priority, arrival):
///   - a step has one row of every sequence that decodes, then prompts and replays in that order within the budget of rows;
///   - the first waiting sequence is admitted when there is a slot, the blocks of all it already knows, and one more for each sequence that
///   may still grow;
///   - when a decode needs a block and none is free, the last running sequence gives up its slot and blocks and waits again.
/// Since every request alone fits into all blocks (check_request), the first sequence can always go on.
class Scheduler {
 public:
  Scheduler(const worker::WorkerLimits& limits, const Budget& budget);

  void add(std::unique_ptr<Sequence> sequence);
  /// Null when there is none (any more).
  Sequence* find(uint64_t id);

  /// The next step, as if all steps planned so far had been computed; nothing when no sequence can go on before a step is retired.
  std::optional<PlannedStep> plan();
  /// A step that names the sequence is over, after its result was dealt with. May destroy the sequence.
  void retire(Sequence& sequence);
  /// The sequence is finished: it leaves the schedule at once, and returns slot and blocks with the last step in flight that names it. May
  /// destroy it.
  void remove(Sequence& sequence);

  /// The ids of the sequences that are not finished.
  [[nodiscard]] std::vector<uint64_t> unfinished() const;
  [[nodiscard]] bool idle() const { return sequences_.empty(); }
  [[nodiscard]] int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  [[nodiscard]] int32_t num_waiting() const;
  [[nodiscard]] uint64_t num_preemptions() const { return num_preemptions_; }
  [[nodiscard]] const BlockPool& blocks() const { return blocks_; }
  [[nodiscard]] const SlotPool& slots() const { return slots_; }

 private:
  struct Draft;
  struct RunsBefore {
    bool operator()(const Sequence* a, const Sequence* b) const { return runs_before(*a, *b); }
  };

  void plan_decodes(Draft& draft);
  void plan_given_tokens(Draft& draft);
  void plan_prompt(Sequence& sequence, Draft& draft);
  void plan_replay(Sequence& sequence, Draft& draft);
  void add_run(worker::StepRun run, const PlannedRun& planned, Draft& draft);
  void admit(const Draft& draft);
  bool admit_one(Sequence& sequence);
  bool grow(Sequence& sequence, Draft& draft);
  void preempt_last();
  void park(Sequence& sequence);

  const worker::WorkerLimits limits_;
  const Budget budget_;
  BlockPool blocks_;  // before the sequences, whose handles return to it
  SlotPool slots_;
  std::unordered_map<uint64_t, std::unique_ptr<Sequence>> sequences_;
  std::set<Sequence*, RunsBefore> waiting_;
  std::vector<Sequence*> running_;    // in order
  std::vector<Sequence*> departing_;  // kLeaving and kFinished: they give back what they hold when no step in flight names them
  uint64_t num_planned_ = 0;
  uint64_t num_preemptions_ = 0;
};

}  // namespace quern::engine
