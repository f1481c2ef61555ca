#include "engine/speculator.h"

#include <map>

#include "support/test_support.h"

namespace quern::engine {
namespace {

worker::WorkerLimits limits(bool has_mtp = true) { return {.k_max = 4, .has_mtp = has_mtp}; }

/// Steps as they would be measured: `seconds_per_draft` beside a second for the rest; each draft is right with probability `right`.
int32_t settle(Speculator& speculator, double seconds_per_draft, double right, int32_t num_sequences = 1) {
  SplitMix64 random(3);
  int32_t depth = 0;
  for (int32_t i = 0; i < 1000; ++i) {
    depth = speculator.choose_depth(num_sequences, 4);
    speculator.observe_step(num_sequences, depth, 1 + seconds_per_draft * depth);
    if (depth == 0) continue;
    int32_t accepted = 0;
    while (accepted < depth && static_cast<double>(random.next() >> 11) * 0x1p-53 < right) ++accepted;
    speculator.observe_verify(depth, accepted, false);
  }
  return depth;
}

TEST(Speculator, UsesTheHeadWhereThereIsOne) {
  EXPECT_EQ(Speculator({}, limits()).method(), SpeculationMethod::kMtp);
  EXPECT_EQ(Speculator({}, limits(false)).method(), SpeculationMethod::kNone);
  EXPECT_EQ(Speculator({.method = SpeculationMethod::kNgram}, limits(false)).method(), SpeculationMethod::kNgram);
}

TEST(Speculator, GuessesAsFarAsItPays) {
  Speculator cheap({.num_speculative_tokens = 4}, limits());
  EXPECT_EQ(settle(cheap, 0.02, 0.8), 4);
  Speculator hopeless({.num_speculative_tokens = 4}, limits());
  EXPECT_EQ(settle(hopeless, 0.2, 0.05), 0);
  Speculator between({.num_speculative_tokens = 4}, limits());
  const int32_t depth = settle(between, 0.3, 0.6);
  EXPECT_GT(depth, 0);
  EXPECT_LT(depth, 4);
}

TEST(Speculator, LearnsForEachSizeOfBatch) {
  Speculator speculator({.num_speculative_tokens = 4}, limits());
  EXPECT_EQ(settle(speculator, 0.02, 0.6, 1), 4);
  EXPECT_LT(settle(speculator, 0.9, 0.6, 16), 2);
  EXPECT_EQ(settle(speculator, 0.02, 0.6, 1), 4);
}

TEST(Speculator, IsNotMisledByStepsThatWereRecordedAsTheyRan) {
  for (const int32_t num_sequences : {1, 64}) {
    Speculator speculator({.num_speculative_tokens = 4}, limits());
    SplitMix64 random(3);
    std::map<int32_t, int32_t> num_steps;
    for (int32_t i = 0; i < 200; ++i) {
      const int32_t depth = speculator.choose_depth(num_sequences, 4);
      const bool first = num_steps[depth]++ == 0;
      const bool recorded = depth == 0 && (first || random.next() % 32 == 0);
      speculator.observe_step(num_sequences, depth, recorded ? 5 : 0.02 + 0.02 * depth);  // a draft costs as much as a token
      if (depth > 0) speculator.observe_verify(depth, 0, false);
    }
    EXPECT_GT(num_steps[0], 150) << num_sequences;
  }
}

TEST(Speculator, KeepsWithinWhatAStepCanVerify) {
  Speculator speculator({.num_speculative_tokens = 9, .adaptive = false}, limits());
  EXPECT_EQ(speculator.choose_depth(1, 100), 4);
  EXPECT_EQ(speculator.choose_depth(1, 2), 2);
  EXPECT_EQ(speculator.choose_depth(1, 0), 0);
}

TEST(Speculator, CountsAcceptedDraftsByPosition) {
  Speculator speculator({}, limits());
  speculator.observe_verify(3, 0, false);
  speculator.observe_verify(3, 2, true);
  speculator.observe_verify(2, 2, false);
  const SpeculationCounts& counts = speculator.counts();
  EXPECT_EQ(counts.num_drafts, 3u);
  EXPECT_EQ(counts.num_draft_tokens, 8u);
  EXPECT_EQ(counts.num_accepted_tokens, 4u);
  EXPECT_EQ(counts.num_partly_accepted, 1u);
  EXPECT_EQ(counts.num_across_boundary, 1u);
  EXPECT_EQ(counts.accepted_at[0], 2u);
  EXPECT_EQ(counts.accepted_at[1], 2u);
  EXPECT_EQ(counts.accepted_at[2], 0u);
}

TEST(Speculator, SyntheticAcceptanceHasTheMeanThatIsAsked) {
  Speculator speculator({.num_speculative_tokens = 4, .synthetic_acceptance_length = 3.28}, limits());
  double sum = 0;
  for (int32_t i = 0; i < 10000; ++i) sum += 1 + speculator.synthetic_acceptance(4);
  EXPECT_NEAR(sum / 10000, 3.28, 0.02);
  EXPECT_EQ(Speculator({}, limits()).synthetic_acceptance(4), -1);
}

}  // namespace
}  // namespace quern::engine
