#include "engine/budget.h"

#include "engine/running_engine.h"

namespace quern::engine {
namespace {

TEST(Budget, IsWhatTheWorkersHaveWhenNothingIsAsked) {
  const Budget budget = resolve_budget({}, {.num_slots = 16, .num_blocks = 10, .max_rows = 2048});
  EXPECT_EQ(budget.max_num_seqs, 16);
  EXPECT_EQ(budget.max_num_batched_tokens, 2048);
}

TEST(Budget, LowersTheNumberOfSequencesToTheSlots) {
  EXPECT_EQ(
      resolve_budget({.max_num_seqs = 1024}, {.num_slots = 614, .num_blocks = 10, .max_rows = 2048}).max_num_seqs,
      614);
}

TEST(Budget, HoldsARowOfEachSequenceAndAChunkOfAPrompt) {
  const worker::WorkerLimits limits{.num_slots = 16, .num_blocks = 10, .max_rows = 512};
  EXPECT_EQ(resolve_budget({.max_num_batched_tokens = 1}, limits).max_num_batched_tokens, 80);
  EXPECT_EQ(resolve_budget({.max_num_seqs = 3, .max_num_batched_tokens = 10}, limits).max_num_batched_tokens, 67);
  EXPECT_EQ(resolve_budget({.max_num_batched_tokens = 100000}, limits).max_num_batched_tokens, 512);
}

TEST(Budget, LowersTheNumberOfSequencesWhenAStepIsShort) {
  const Budget budget = resolve_budget({}, {.num_slots = 16, .num_blocks = 10, .max_rows = 70});
  EXPECT_EQ(budget.max_num_seqs, 6);
  EXPECT_EQ(budget.max_num_batched_tokens, 70);
}

}  // namespace
}  // namespace quern::engine
