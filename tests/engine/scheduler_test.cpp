#include "engine/scheduler.h"

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "engine/running_engine.h"

namespace quern::engine {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::make_prompt;
using worker::RowKind;
using worker::StepRun;
using worker::Want;

/// A scheduler whose steps are carried out by hand: every sampled token is 1.
class Schedule {
 public:
  Schedule(int32_t num_slots, int32_t num_blocks, int32_t max_rows, const SpeculationOptions& speculation = {.method = SpeculationMethod::kNone})
      : scheduler_({.num_slots = num_slots,
                    .num_blocks = num_blocks,
                    .max_model_len = 100000,
                    .max_rows = max_rows,
                    .vocab_size = 211,
                    .k_max = 4,
                    .has_mtp = true},
                   {.max_num_seqs = num_slots, .max_num_batched_tokens = max_rows}, {}, speculation) {}

  Sequence& add(int32_t prompt_tokens, int32_t max_tokens, int32_t priority = 0, int32_t prompt_logprobs = -1) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = next_id_++;
    sequence->request = testing::make_request(make_prompt(prompt_tokens, sequence->id), max_tokens);
    sequence->request.priority = priority;
    sequence->request.prompt_logprobs = prompt_logprobs;
    Sequence& added = *sequence;
    scheduler_.add(std::move(sequence));
    return added;
  }
  /// Plans a step and leaves it in flight.
  const worker::StepPlan* plan() {
    std::optional<PlannedStep> step = scheduler_.plan();
    if (!step) return nullptr;
    in_flight_.push_back(*std::move(step));
    return &in_flight_.back().plan;
  }
  /// The oldest step is done.
  void finish_step() {
    PlannedStep step = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (size_t i = 0; i < step.runs.size(); ++i) {
      Sequence& sequence = *step.runs[i].sequence;
      const StepRun& run = step.plan.runs[i];
      const bool sampled = run.want == Want::kSample || run.sample_after;
      if (sequence.state != SequenceState::kFinished && sampled) {
        sequence.generated.push_back(1);
        if (sequence.num_generated() == sequence.token_limit) scheduler_.remove(sequence);
      }
      scheduler_.retire(sequence, sampled ? 1 : 0);
    }
  }
  /// A step, done at once.
  worker::StepPlan step() {
    const worker::StepPlan* planned = plan();
    if (planned == nullptr) return {};
    worker::StepPlan copy = *planned;
    while (!in_flight_.empty()) finish_step();
    return copy;
  }
  /// As step(), and what PlannedStep::decode_depth said.
  int32_t depth_of_next() {
    plan();
    const int32_t depth = in_flight_.back().decode_depth;
    while (!in_flight_.empty()) finish_step();
    return depth;
  }
  /// Steps until a sequence was preempted, always leaving `in_flight` steps unfinished.
  void run_until_preemption(size_t in_flight = 0) {
    for (int i = 0; i < 1000 && scheduler_.num_preemptions() == 0; ++i) {
      plan();
      while (in_flight_.size() > in_flight) finish_step();
    }
    EXPECT_EQ(scheduler_.num_preemptions(), 1u);
  }
  Scheduler* operator->() { return &scheduler_; }

 private:
  Scheduler scheduler_;
  std::deque<PlannedStep> in_flight_;
  uint64_t next_id_ = 0;
};

std::string describe(const StepRun& run) {
  std::string text = fmt::format("{}{}", run.kind == RowKind::kPrompt ? 'P' : 'D', run.num_rows);
  if (run.kind == RowKind::kPrompt) text += fmt::format("@{}", run.position[0]);
  if (run.kind == RowKind::kDecode && !run.tokens.empty()) text += " given";
  if (run.want == Want::kSample) text += " sample";
  if (run.want == Want::kPromptLogprobs) text += run.sample_after ? " logprobs+sample" : " logprobs";
  return text;
}
std::vector<std::string> describe(const worker::StepPlan& plan) {
  std::vector<std::string> runs;
  for (const StepRun& run : plan.runs) runs.push_back(describe(run));
  return runs;
}

TEST(Scheduler, HasNothingToPlanWhenNothingIsAsked) {
  Schedule schedule(2, 8, 128);
  EXPECT_EQ(schedule.plan(), nullptr);
  EXPECT_TRUE(schedule->idle());
}

TEST(Scheduler, CutsPromptsOnTheGridAndSamplesAtTheirEnd) {
  Schedule schedule(2, 8, 100);
  schedule.add(150, 3);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P64@0"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P86@64 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 sample"));
  EXPECT_TRUE(schedule->idle());
}

TEST(Scheduler, TakesDecodesFirstAndPutsPromptsInFrontOfThem) {
  Schedule schedule(3, 16, 130);
  schedule.add(10, 5);
  schedule.step();
  schedule.add(200, 5);
  schedule.add(20, 5);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P128@0", "D1 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P72@128 sample", "P20@0 sample", "D1 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 sample", "D1 sample", "D1 sample"));
}

TEST(Scheduler, PlansTheNextStepBeforeTheLastOneIsDoneButNeverPastMaxTokens) {
  Schedule schedule(1, 8, 128);
  schedule.add(10, 2);
  ASSERT_NE(schedule.plan(), nullptr);
  const worker::StepPlan* second = schedule.plan();
  ASSERT_NE(second, nullptr);
  EXPECT_THAT(describe(*second), ElementsAre("D1 sample"));
  EXPECT_THAT(second->runs[0].tokens, IsEmpty());
  EXPECT_EQ(schedule.plan(), nullptr);
  schedule.finish_step();
  EXPECT_EQ(schedule.plan(), nullptr);
  schedule.finish_step();
  EXPECT_TRUE(schedule->idle());
}

TEST(Scheduler, OnlyComputesThePromptWhenNoTokensAreWanted) {
  Schedule schedule(1, 8, 128);
  schedule.add(70, 0);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P70@0"));
  EXPECT_EQ(schedule.plan(), nullptr);
}

TEST(Scheduler, TellsTheDeviceAboutANewSequenceInTheStepThatFirstNamesIt) {
  Schedule schedule(1, 8, 128);
  Sequence& sequence = schedule.add(70, 60);
  sequence.request.sampling.frequency_penalty = 0.5f;
  const worker::StepPlan first = schedule.step();
  ASSERT_EQ(first.state_ops.size(), 1u);
  EXPECT_EQ(first.state_ops[0].kind, worker::StateOp::Kind::kClear);
  ASSERT_EQ(first.slot_updates.size(), 1u);
  EXPECT_EQ(first.slot_updates[0].prompt_ids, sequence.request.prompt);
  ASSERT_EQ(first.block_table_updates.size(), 1u);
  EXPECT_EQ(first.block_table_updates[0].blocks.size(), 2u);
  for (int32_t i = 70; i < 128; ++i) {
    const worker::StepPlan plan = schedule.step();
    EXPECT_TRUE(plan.state_ops.empty() && plan.slot_updates.empty() && plan.block_table_updates.empty()) << i;
  }
  const worker::StepPlan crossing = schedule.step();
  ASSERT_EQ(crossing.block_table_updates.size(), 1u);
  EXPECT_EQ(crossing.block_table_updates[0].first_block, 2);
  EXPECT_EQ(crossing.block_table_updates[0].blocks.size(), 1u);
}

TEST(Scheduler, RunsRequestsByPriorityThenByArrival) {
  Schedule schedule(1, 8, 128);
  const Sequence& late = schedule.add(1, 1, 5);
  const Sequence& second = schedule.add(2, 1, -1);
  const Sequence& third = schedule.add(3, 1, -1);
  EXPECT_LT(late.id, second.id);
  EXPECT_LT(second.id, third.id);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P2@0 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P3@0 sample"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P1@0 sample"));
}

TEST(Scheduler, LetsNobodyPassTheFirstInTheQueue) {
  Schedule schedule(3, 4, 256);
  schedule.add(100, 20);  // 2 blocks
  schedule.step();
  schedule.add(190, 3);  // needs 3
  schedule.add(10, 3);   // would fit
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 sample"));
  EXPECT_EQ(schedule->num_waiting(), 2);
}

TEST(Scheduler, KeepsABlockForEachSequenceThatMayStillGrow) {
  Schedule schedule(3, 4, 256);
  schedule.add(60, 60);  // 1 block, will need 2
  schedule.step();
  schedule.add(120, 60);  // needs 2 and one more to grow, while one is kept for the first
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 sample"));
  schedule->remove(*schedule->find(1));
  schedule.add(120, 5);  // needs 2 and will not grow
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P120@0 sample", "D1 sample"));
}

TEST(Scheduler, DoesNotHoldMemoryForPromptsThatWouldGetNoRows) {
  Schedule schedule(4, 100, 68);
  for (int i = 0; i < 4; ++i) schedule.add(640, 1);
  schedule.step();
  EXPECT_EQ(schedule->num_running(), 1);
  EXPECT_EQ(schedule->blocks().num_free(), 90);
}

TEST(Scheduler, PreemptsTheYoungestWhenBlocksRunOut) {
  Schedule schedule(2, 4, 256);
  Sequence& first = schedule.add(60, 130);
  Sequence& second = schedule.add(60, 130);
  schedule.run_until_preemption();
  EXPECT_EQ(schedule->num_preemptions(), 1u);
  EXPECT_EQ(first.state, SequenceState::kRunning);
  EXPECT_EQ(second.state, SequenceState::kWaiting);
  EXPECT_FALSE(second.slot.has_value());
  EXPECT_EQ(second.num_blocks(), 0);
  EXPECT_EQ(first.num_blocks(), 3);
}

TEST(Scheduler, PreemptsTheLowestPriorityFirst) {
  Schedule schedule(2, 4, 256);
  Sequence& unimportant = schedule.add(60, 130, 1);
  Sequence& important = schedule.add(60, 130, 0);
  schedule.run_until_preemption();
  EXPECT_EQ(unimportant.state, SequenceState::kWaiting);
  EXPECT_EQ(important.state, SequenceState::kRunning);
}

TEST(Scheduler, ReplaysGeneratedTokensAsDRowsUpToEachBoundaryAndGoesOn) {
  Schedule schedule(2, 6, 256);
  Sequence& first = schedule.add(100, 110);
  schedule.add(100, 110);
  schedule.run_until_preemption();
  Sequence& second = *schedule->find(1);
  ASSERT_EQ(second.num_generated(), 93);  // the first asked for its fourth block before its row 192
  schedule->remove(first);
  const worker::StepPlan resumed = schedule.step();
  EXPECT_THAT(describe(resumed), ElementsAre("P100@0"));
  ASSERT_EQ(resumed.slot_updates.size(), 1u);
  EXPECT_EQ(resumed.slot_updates[0].output_ids.size(), 93u);
  EXPECT_EQ(resumed.state_ops.size(), 1u);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D28 given"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D64 given"));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("D1 given sample"));
  EXPECT_EQ(second.num_generated(), 94);
  const worker::StepPlan next = schedule.step();
  EXPECT_THAT(describe(next), ElementsAre("D1 sample"));
}

TEST(Scheduler, HoldsBackThePreemptedSequencesMemoryUntilNoStepNamesIt) {
  Schedule schedule(2, 4, 256);
  const Sequence& first = schedule.add(60, 190);
  const Sequence& second = schedule.add(60, 190);
  schedule.run_until_preemption(1);
  EXPECT_EQ(second.state, SequenceState::kLeaving);
  EXPECT_EQ(schedule->num_waiting(), 1);
  EXPECT_EQ(schedule->num_running(), 1);
  EXPECT_EQ(schedule.plan(), nullptr) << "the first waits for a block of the second";
  EXPECT_EQ(schedule->num_preemptions(), 1u);
  const int32_t known = second.num_generated();
  schedule.finish_step();
  EXPECT_EQ(second.state, SequenceState::kWaiting);
  EXPECT_EQ(second.num_generated(), known + 1) << "what was in flight is not lost";
  const worker::StepPlan* next = schedule.plan();
  ASSERT_NE(next, nullptr);
  EXPECT_THAT(describe(*next), ElementsAre("D1 sample"));
  EXPECT_EQ(first.num_blocks(), 3);
}

TEST(Scheduler, TakesAFinishedSequenceOutAtOnceAndItsMemoryWithTheLastStepThatNamesIt) {
  Schedule schedule(1, 4, 256);
  Sequence& first = schedule.add(60, 130);
  schedule.plan();
  schedule.plan();
  schedule->remove(first);
  schedule.add(10, 1);
  EXPECT_EQ(schedule->num_running(), 0);
  EXPECT_EQ(schedule.plan(), nullptr);
  schedule.finish_step();
  EXPECT_EQ(schedule->slots().num_free(), 0);
  EXPECT_EQ(schedule.plan(), nullptr);
  schedule.finish_step();
  EXPECT_EQ(schedule->slots().num_free(), 1);
  EXPECT_NE(schedule.plan(), nullptr);
}

TEST(Scheduler, CutsPromptsWithLogprobsSoThatOthersDoNotWaitLong) {
  Schedule schedule(3, 16, 512);
  schedule.add(10, 9);
  schedule.step();
  schedule.add(250, 1, 0, 3);
  schedule.add(200, 1);
  const worker::StepPlan first = schedule.step();
  EXPECT_THAT(describe(first), ElementsAre("P128@0 logprobs", "P200@0 sample", "D1 sample"));
  EXPECT_EQ(first.runs[0].following_token, make_prompt(250, 1)[128]);
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P122@128 logprobs+sample", "D1 sample"));
}

TEST(Scheduler, MakesDraftsForAsManySequencesAsAStepHasRowsFor) {
  for (const int32_t num_sequences : {1, 32, 64, 256, 400}) {
    Schedule schedule(num_sequences, 4 * num_sequences, 2048, {.method = SpeculationMethod::kMtp, .num_speculative_tokens = 3, .adaptive = false});
    for (int32_t i = 0; i < num_sequences; ++i) schedule.add(1, 100);
    schedule.step();
    const worker::StepPlan verifies = schedule.step();
    EXPECT_EQ(std::ssize(verifies.runs), num_sequences);
    for (const StepRun& run : verifies.runs) EXPECT_EQ(run.num_rows, 4);
  }
}

TEST(Scheduler, MeasuresStepsOfManySequencesOfWhichSomeAreNearTheirEnd) {
  Schedule schedule(10, 64, 2048, {.method = SpeculationMethod::kMtp, .num_speculative_tokens = 3, .adaptive = false});
  for (const int32_t max_tokens : {100, 100, 100, 100, 100, 100, 9, 9}) schedule.add(1, max_tokens);
  EXPECT_EQ(schedule.depth_of_next(), -1) << "prompts";
  EXPECT_EQ(schedule.depth_of_next(), 3);
  std::vector<int32_t> depths;
  while (schedule->num_running() == 8) depths.push_back(schedule.depth_of_next());
  EXPECT_THAT(depths, Each(3)) << "two of eight verify fewer";
  for (int32_t i = 0; i < 4; ++i) schedule.add(1, 3);
  schedule.depth_of_next();
  EXPECT_EQ(schedule.depth_of_next(), -1) << "four of ten";
}

TEST(Scheduler, StopsReportingPromptLogprobsAfterThePromptWasDone) {
  Schedule schedule(2, 4, 256);
  schedule.add(60, 130);
  schedule.add(60, 130, 0, 2);
  schedule.run_until_preemption();
  schedule->remove(*schedule->find(0));
  EXPECT_THAT(describe(schedule.step()), ElementsAre("P60@0"));
}

}  // namespace
}  // namespace quern::engine
