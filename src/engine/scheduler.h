#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "engine/budget.h"
#include "engine/counted_pool.h"
#include "engine/index_pool.h"
#include "engine/prefix_cache.h"
#include "engine/sequence.h"
#include "engine/speculator.h"
#include "worker/step.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// A run of a step, for the sequence that it belongs to.
struct PlannedRun {
  Sequence* sequence = nullptr;  // lives at least until Scheduler::retire
  int32_t num_rows = 0;
  bool verify = false;        // all rows but the first are drafts
  bool ends_prompt = false;   // the run's last row is the prompt's last, for the first time
  bool samples = false;       // a token is drawn after the last row
  bool mask_pending = false;  // once its mask was sent
  std::vector<int32_t> drafts;  // of a verify, where the host has made them
};

struct PlannedStep {
  worker::StepPlan plan;
  std::vector<PlannedRun> runs;  // parallel to plan.runs
  int32_t decode_depth = -1;  // drafts that the sequences verify and have made, where (nearly) all do the same and there is nothing else
};

/// Decides which rows run next, and owns all that running takes: sequences, slots and blocks (architecture.md section 5). Pure: no clock,
/// no thread, no device; used by the engine thread alone. Sequences run in the order of (priority, arrival):
///   - a step has one row of every sequence that decodes and its drafts (speculator.h), then prompts and replays in that order within the
///   budget of rows;
///   - the first waiting sequence is admitted when there is a slot, the blocks of all it already knows, and one more for each sequence that
///   may still grow; it begins behind the longest prefix that is cached, and lets others go first while a longer one is being computed;
///   - when a decode needs a block and none is free, the prefix cache gives back what it alone holds; when that is nothing, the last running
///   sequence gives up its slot and blocks and waits again.
/// Since every request alone fits into all blocks (check_request), the first sequence can always go on.
///
/// The stages of a pipeline work on one step each (budget.num_micro_batches of them). Then a sequence has one step in flight, so that steps in
/// flight are disjoint, and the scheduler divides what there is to do, so that none of them is missing:
///   - a step takes its even share of the sequences that decode, those that have waited for a step first in order;
///   - prompts are spread over the steps that can be planned, at most one more than there are stages, so that the next is there when the host is late;
///   - they go in order, except that the longest goes first once all others together would not last until its end: one alone keeps one stage busy.
class Scheduler {
 public:
  Scheduler(const worker::WorkerLimits& limits, const Budget& budget, const PrefixCacheOptions& prefix_cache = {},
            const SpeculationOptions& speculation = {.method = SpeculationMethod::kNone});

  void add(std::unique_ptr<Sequence> sequence);
  /// Null when there is none (any more).
  Sequence* find(uint64_t id);

  /// The next step, as if all steps planned so far had been computed; nothing when no sequence can go on before a step is retired, of which there
  /// are `num_in_flight`.
  std::optional<PlannedStep> plan(int32_t num_in_flight = 0);
  /// A step that names the sequence is over, after its result was dealt with; `num_sampled` tokens were drawn. May destroy the sequence.
  void retire(Sequence& sequence, int32_t num_sampled);
  /// The sequence is finished: it leaves the schedule at once, and returns slot and blocks with the last step in flight that names it. Nothing
  /// of a faulty one is resumed by others. May destroy it.
  void remove(Sequence& sequence);

  /// The ids of the sequences that are not finished.
  [[nodiscard]] std::vector<uint64_t> unfinished() const;
  [[nodiscard]] bool idle() const { return sequences_.empty(); }
  [[nodiscard]] int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  [[nodiscard]] int32_t num_waiting() const;
  [[nodiscard]] uint64_t num_preemptions() const { return num_preemptions_; }
  [[nodiscard]] const BlockPool& blocks() const { return blocks_; }
  [[nodiscard]] const SlotPool& slots() const { return slots_; }
  [[nodiscard]] const PrefixCache& prefix_cache() const { return prefix_cache_; }
  [[nodiscard]] Speculator& speculator() { return speculator_; }

 private:
  struct Draft;
  struct RunsBefore {
    bool operator()(const Sequence* a, const Sequence* b) const { return runs_before(*a, *b); }
  };

  [[nodiscard]] bool pipelined() const { return budget_.num_micro_batches > 1; }
  [[nodiscard]] bool ready(const Sequence& sequence) const { return !pipelined() || sequence.in_flight.empty(); }
  [[nodiscard]] bool lasts_longest(const Sequence& sequence) const;
  [[nodiscard]] std::vector<Sequence*> given_in_order() const;
  [[nodiscard]] int32_t decode_depth(const worker::StepPlan& plan) const;
  void plan_decodes(Draft& draft);
  void plan_decode(Sequence& sequence, int32_t most_rows, Draft& draft);
  void speculate(worker::StepRun& run, const PlannedRun& planned, const Draft& draft);
  void plan_given_tokens(Draft& draft);
  void plan_prompt(Sequence& sequence, Draft& draft);
  void plan_replay(Sequence& sequence, Draft& draft);
  void add_run(worker::StepRun run, const PlannedRun& planned, Draft& draft);
  void admit(const Draft& draft);
  enum class Admission : uint8_t { kDone, kLater, kNoRoom };
  Admission admit_one(Sequence& sequence);
  bool grow(Sequence& sequence, Draft& draft);
  std::optional<BlockRef> acquire_block();
  void preempt_last();
  void park(Sequence& sequence);
  void destroy(Sequence& sequence);

  const worker::WorkerLimits limits_;
  const Budget budget_;
  BlockPool blocks_;  // before the sequences, whose handles return to it
  SlotPool slots_;
  PrefixCache prefix_cache_;
  Speculator speculator_;
  std::unordered_map<uint64_t, std::unique_ptr<Sequence>> sequences_;
  std::set<Sequence*, RunsBefore> waiting_;
  std::vector<Sequence*> running_;    // in order
  std::vector<Sequence*> departing_;  // kLeaving and kFinished: they give back what they hold when no step in flight names them
  uint64_t num_planned_ = 0;
  uint64_t num_preemptions_ = 0;
};

}  // namespace quern::engine
