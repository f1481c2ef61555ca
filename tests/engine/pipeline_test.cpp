// What the scheduler makes of a pipeline: no stage without work while there is some, everybody served in turn. Steps are carried out by hand, one stage and time slot after another.

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/running_engine.h"
#include "engine/scheduler.h"

namespace quern::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::Le;
using worker::RowKind;

/// Stages that take one slot of time for every step, whatever is in it. Every sampled token is 1.
class Pipeline {
 public:
  /// A result reaches the host `lateness` slots after the last stage is done.
  explicit Pipeline(int32_t num_stages, int32_t num_slots, int32_t max_rows, size_t lateness = 0)
      : lateness_(lateness),
        scheduler_({.num_slots = num_slots,
                    .num_blocks = 100'000,
                    .max_model_len = 100'000,
                    .max_rows = max_rows,
                    .vocab_size = 211,
                    .num_stages = num_stages},
                   {.max_num_seqs = num_slots, .max_num_batched_tokens = max_rows, .max_steps_in_flight = num_stages + 1, .num_micro_batches = num_stages}),
        stages_(static_cast<size_t>(num_stages)) {}

  Sequence& add(int32_t prompt_tokens, int32_t max_tokens, int32_t priority = 0) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = next_id_++;
    sequence->request = testing::make_request(testing::make_prompt(prompt_tokens, sequence->id), max_tokens);
    sequence->request.priority = priority;
    Sequence& added = *sequence;
    scheduler_.add(std::move(sequence));
    return added;
  }

  /// One slot of time. False when there was nothing to do.
  bool tick() {
    while (num_in_flight_ <= static_cast<int32_t>(stages_.size())) {
      std::optional<PlannedStep> step = scheduler_.plan(num_in_flight_);
      if (!step) break;
      for (const PlannedRun& run : step->runs) EXPECT_TRUE(in_flight_.insert(run.sequence).second) << "a sequence has two steps in flight";
      ++num_in_flight_;
      queue_.push_back(*std::move(step));
    }
    if (num_in_flight_ == 0) return false;
    if (!queue_.empty()) {
      stages_.front() = std::move(queue_.front());
      queue_.pop_front();
      sizes_.push_back(stages_.front()->runs.size());
      first_stage_.push_back(stages_.front()->plan);
    }
    ++num_ticks_;
    num_busy_ += std::count_if(stages_.begin(), stages_.end(), [](const auto& step) { return step.has_value(); });
    on_their_way_.push_back(std::exchange(stages_.back(), std::nullopt));
    std::rotate(stages_.begin(), stages_.end() - 1, stages_.end());
    if (on_their_way_.size() > lateness_) {
      if (on_their_way_.front()) finish(*std::move(on_their_way_.front()));
      on_their_way_.pop_front();
    }
    return true;
  }
  void ticks(int32_t num) {
    for (int32_t i = 0; i < num; ++i) EXPECT_TRUE(tick());
  }
  /// From now on.
  void measure() {
    num_ticks_ = num_busy_ = 0;
    sizes_.clear();
    first_stage_.clear();
  }
  [[nodiscard]] double busy_share() const { return static_cast<double>(num_busy_) / static_cast<double>(num_ticks_ * std::ssize(stages_)); }
  [[nodiscard]] int64_t num_ticks() const { return num_ticks_; }
  /// Runs of the steps that began since measure().
  [[nodiscard]] const std::vector<size_t>& sizes() const { return sizes_; }
  [[nodiscard]] const std::vector<worker::StepPlan>& plans() const { return first_stage_; }
  /// The sequences that are done, in order.
  [[nodiscard]] const std::vector<uint64_t>& finished() const { return finished_; }
  Scheduler* operator->() { return &scheduler_; }

 private:
  void finish(PlannedStep step) {
    --num_in_flight_;
    for (const PlannedRun& run : step.runs) {
      Sequence& sequence = *run.sequence;
      in_flight_.erase(&sequence);
      if (run.samples && sequence.state != SequenceState::kFinished) {
        sequence.generated.push_back(1);
        if (sequence.num_generated() == sequence.token_limit) {
          finished_.push_back(sequence.id);
          scheduler_.remove(sequence);
        }
      }
      scheduler_.retire(sequence, run.samples ? 1 : 0);
    }
  }

  const size_t lateness_;
  Scheduler scheduler_;
  std::vector<std::optional<PlannedStep>> stages_;
  std::deque<PlannedStep> queue_;
  std::deque<std::optional<PlannedStep>> on_their_way_;  // results
  std::set<const Sequence*> in_flight_;
  int32_t num_in_flight_ = 0;
  int64_t num_ticks_ = 0, num_busy_ = 0;
  std::vector<size_t> sizes_;
  std::vector<worker::StepPlan> first_stage_;
  std::vector<uint64_t> finished_;
  uint64_t next_id_ = 0;
};

TEST(PipelineSchedule, DividesDecodesEvenlySoThatAllStagesAreBusy) {
  Pipeline pipeline(4, 16, 2048);
  std::vector<const Sequence*> sequences;
  for (int i = 0; i < 16; ++i) sequences.push_back(&pipeline.add(10, 1000));
  pipeline.ticks(16);
  pipeline.measure();
  std::vector<int32_t> before;
  for (const Sequence* sequence : sequences) before.push_back(sequence->num_generated());
  pipeline.ticks(400);
  EXPECT_GE(pipeline.busy_share(), 0.95);
  EXPECT_THAT(pipeline.sizes(), Each(4u));
  for (size_t i = 0; i < sequences.size(); ++i) EXPECT_EQ(sequences[i]->num_generated() - before[i], 100);
}

TEST(PipelineSchedule, GivesEverybodyAFairShareWhereNumbersDoNotDivide) {
  for (const int32_t num_stages : {2, 3, 4})
    for (int32_t num_sequences = 1; num_sequences < 20; ++num_sequences) {
      SCOPED_TRACE(fmt::format("{} sequences on {} stages", num_sequences, num_stages));
      Pipeline pipeline(num_stages, 32, 2048);
      std::vector<const Sequence*> sequences;
      for (int i = 0; i < num_sequences; ++i) sequences.push_back(&pipeline.add(10, 1000));
      pipeline.ticks(20);
      pipeline.measure();
      pipeline.ticks(60);
      const auto most = static_cast<size_t>((num_sequences + num_stages - 1) / num_stages);
      EXPECT_THAT(pipeline.sizes(), Each(Le(most)));
      if (num_sequences % num_stages == 0) {
        EXPECT_THAT(pipeline.sizes(), Each(most));
      }
      EXPECT_DOUBLE_EQ(pipeline.busy_share(), std::min(num_sequences, num_stages) / static_cast<double>(num_stages));
      for (const Sequence* sequence : sequences) EXPECT_NEAR(sequence->num_generated(), sequences[0]->num_generated(), 2);
    }
}

TEST(PipelineSchedule, EvensOutWhatComesAllAtOnce) {
  Pipeline pipeline(4, 64, 2048);
  for (int i = 0; i < 4; ++i) pipeline.add(10, 1000);
  pipeline.ticks(30);
  for (int i = 0; i < 28; ++i) pipeline.add(10, 1000);
  pipeline.ticks(30);
  pipeline.measure();
  pipeline.ticks(100);
  EXPECT_THAT(pipeline.sizes(), Each(8u));
  EXPECT_DOUBLE_EQ(pipeline.busy_share(), 1.0);
}

TEST(PipelineSchedule, TheOnlyStreamGetsItsNextTokenWithoutDelay) {
  Pipeline pipeline(4, 16, 2048);
  const Sequence& sequence = pipeline.add(10, 1000);
  pipeline.ticks(40);
  EXPECT_EQ(sequence.num_generated(), 10);
}

TEST(PipelineSchedule, PromptsOfSeveralUsersLeaveNoBubbles) {
  for (const int32_t num_stages : {2, 3, 4})
    for (int32_t num_users = num_stages; num_users <= 9; ++num_users) {
      SCOPED_TRACE(fmt::format("{} users on {} stages", num_users, num_stages));
      Pipeline pipeline(num_stages, 16, 2048);
      for (int i = 0; i < num_users; ++i) pipeline.add(8192, 1);
      while (pipeline.tick()) {
      }
      EXPECT_EQ(pipeline.num_ticks(), num_users * 4 + num_stages - 1) << "one slot for each chunk of 2048 rows, and the drain";
      EXPECT_EQ(pipeline.finished().size(), static_cast<size_t>(num_users));
    }
}

TEST(PipelineSchedule, TheNextChunkIsThereWhenTheHostIsLate) {
  Pipeline pipeline(2, 16, 2048, 1);
  for (int i = 0; i < 6; ++i) pipeline.add(8192, 1);
  while (pipeline.tick()) {
  }
  EXPECT_LE(pipeline.num_ticks(), 6 * 4 + 2 + 3);
}

TEST(PipelineSchedule, PromptsGoInOrderAndTheLastIsNotLeftAlone) {
  Pipeline pipeline(2, 16, 2048);
  for (int i = 0; i < 3; ++i) pipeline.add(8192, 1);
  while (pipeline.tick()) {
  }
  EXPECT_THAT(pipeline.finished(), ElementsAre(0, 1, 2));
  EXPECT_EQ(pipeline.num_ticks(), 13);
}

TEST(PipelineSchedule, AnImportantPromptIsNotHeldUpByALongOne) {
  Pipeline pipeline(2, 16, 2048);
  pipeline.add(2048 * 20, 1, 1);
  pipeline.add(8192, 1, 0);
  pipeline.add(8192, 1, 0);
  while (pipeline.finished().size() < 2) ASSERT_TRUE(pipeline.tick());
  EXPECT_THAT(pipeline.finished(), ElementsAre(1, 2));
}

TEST(PipelineSchedule, ShortPromptsThatComeTogetherShareSteps) {
  Pipeline pipeline(4, 64, 2048);
  for (int i = 0; i < 64; ++i) pipeline.add(100, 1);
  while (pipeline.tick()) {
  }
  EXPECT_LE(pipeline.num_ticks(), 10);
  EXPECT_THAT(pipeline.sizes(), Each(AllOf(Ge(10u), Le(20u))));
}

TEST(PipelineSchedule, AFewRowsGoWithOthersButALongPromptIsLeftForTheNextStep) {
  Pipeline few(2, 16, 2048);
  for (int i = 0; i < 4; ++i) few.add(10, 1);
  few.tick();
  EXPECT_THAT(few.sizes(), ElementsAre(4u));
  Pipeline long_ones(2, 16, 2048);
  long_ones.add(600, 1);
  long_ones.add(600, 1);
  long_ones.ticks(2);
  EXPECT_THAT(long_ones.sizes(), ElementsAre(1u, 1u));
}

TEST(PipelineSchedule, MixesPromptsIntoTheStepsOfDecodes) {
  Pipeline pipeline(2, 32, 1024);
  for (int i = 0; i < 8; ++i) pipeline.add(10, 1000);
  pipeline.ticks(10);
  for (int i = 0; i < 4; ++i) pipeline.add(8000, 1);
  pipeline.ticks(4);
  pipeline.measure();
  pipeline.ticks(24);
  for (const worker::StepPlan& plan : pipeline.plans()) {
    EXPECT_EQ(std::count_if(plan.runs.begin(), plan.runs.end(), [](const auto& run) { return run.kind == RowKind::kDecode; }), 4);
    EXPECT_GE(std::count_if(plan.runs.begin(), plan.runs.end(), [](const auto& run) { return run.kind == RowKind::kPrompt; }), 1);
  }
  EXPECT_DOUBLE_EQ(pipeline.busy_share(), 1.0);
}

/// What a step takes on the whole model: 8.2 ms for its weights, and 0.1 ms for a row, as measured on an H200 with the 27B model; each stage its share of that. The host
/// needs 0.15 ms from a result to the next step, where it is not ahead. How long `total` requests take, of which `users` are there at a time.
double modelled_seconds(int32_t num_stages, int32_t users, int32_t total, int32_t prompt_tokens, int32_t max_tokens) {
  constexpr double kWeights = 8.2e-3, kRow = 1e-4, kHost = 1.5e-4;
  Scheduler scheduler({.num_slots = 64, .num_blocks = 200'000, .max_model_len = 100'000, .max_rows = 2048, .vocab_size = 211, .num_stages = num_stages},
                      {.max_num_seqs = 64,
                       .max_num_batched_tokens = 2048,
                       .max_steps_in_flight = num_stages == 1 ? 2 : num_stages + 1,
                       .num_micro_batches = num_stages});
  struct InFlight {
    PlannedStep step;
    double known = 0;
  };
  std::deque<InFlight> in_flight;
  std::vector<double> free_at(static_cast<size_t>(num_stages), 0);
  double now = 0;
  int32_t num_added = 0, num_done = 0;
  const auto add = [&] {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = static_cast<uint64_t>(num_added++);
    sequence->request = testing::make_request(std::vector<int32_t>(static_cast<size_t>(prompt_tokens + num_added * 37 % 200), num_added % 211), max_tokens);
    scheduler.add(std::move(sequence));
  };
  while (num_added < users) add();
  while (num_done < total) {
    while (in_flight.size() < (num_stages == 1 ? 2u : static_cast<size_t>(num_stages) + 1)) {
      std::optional<PlannedStep> step = scheduler.plan(static_cast<int32_t>(in_flight.size()));
      if (!step) break;
      double at = now, seconds = kWeights;
      for (const PlannedRun& run : step->runs) seconds += kRow * run.num_rows;
      for (double& free : free_at) at = free = std::max(at, free) + seconds / num_stages;
      in_flight.push_back({*std::move(step), at + kHost});
    }
    CHECK(!in_flight.empty());
    InFlight over = std::move(in_flight.front());
    in_flight.pop_front();
    now = std::max(now, over.known);
    for (const PlannedRun& run : over.step.runs) {
      Sequence& sequence = *run.sequence;
      if (run.samples && sequence.state != SequenceState::kFinished) sequence.generated.push_back(1);
      if (sequence.state != SequenceState::kFinished && sequence.num_generated() == sequence.token_limit) {
        scheduler.remove(sequence);
        ++num_done;
        if (num_added < total) add();
      }
      scheduler.retire(sequence, run.samples ? 1 : 0);
    }
  }
  return now;
}

TEST(PipelineSchedule, IsWorthItsDevicesByTheModelOfACard) {
  const auto speedup = [](int32_t num_stages, int32_t users, int32_t prompt_tokens, int32_t max_tokens) {
    const double gain = modelled_seconds(1, users, users * 3, prompt_tokens, max_tokens) / modelled_seconds(num_stages, users, users * 3, prompt_tokens, max_tokens);
    ::testing::Test::RecordProperty(fmt::format("pp{}_{}_users_{}_in_{}_out", num_stages, users, prompt_tokens, max_tokens), fmt::format("{:.2f}", gain));
    return gain;
  };
  EXPECT_GE(speedup(2, 1, 100, 400), 0.97) << "one stream";
  EXPECT_GE(speedup(2, 16, 100, 400), 0.95);
  EXPECT_GE(speedup(2, 64, 100, 400), 1.05);
  EXPECT_GE(speedup(2, 16, 8000, 128), 1.6);
  EXPECT_GE(speedup(4, 16, 8000, 128), 2.8);
}

}  // namespace
}  // namespace quern::engine
