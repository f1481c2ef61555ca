// The launches that OpenCL candidates declare (ops::LaunchCounts), against those of whole steps.

#include "backends/opencl/device.h"
#include "worker/runner_fixture.h"

namespace quern::worker {
namespace {

/// What the candidates chosen for `op` declare; of several problems, all the same.
template <class Op>
ops::LaunchCounts declared(const ExecutionPlan& plan) {
  std::optional<ops::LaunchCounts> found;
  for (const OpChoice& choice : plan.choices) {
    if (choice.op != Op::kName) continue;
    for (const auto& candidate : backends::kernel_table(plan.traits.platform).list<Op>().candidates()) {
      if (candidate.name != choice.candidate) continue;
      EXPECT_TRUE(!found || (found->decode == candidate.launches.decode && found->prompt == candidate.launches.prompt)) << Op::kName << " is not one candidate's alone";
      found = candidate.launches;
    }
  }
  EXPECT_TRUE(found) << Op::kName;
  return found.value_or(ops::LaunchCounts{});
}

TEST(Launches, OfAStepAreThoseThatTheCandidatesDeclare) {
  if (!device_under_test().starts_with("opencl")) GTEST_SKIP() << "this test is about OpenCL devices";
  quern::testing::TemporaryFolder folder;
  ASSERT_OK(quern::testing::second_reference(quern::testing::Scheme::kFp8Block, folder.path()));
  TestRunner runner(folder.path(), {.load = {.with_mtp = false}, .dtype = ModelDType::kBFloat16});
  ASSERT_TRUE(runner.ready());
  const std::atomic<uint64_t>& launches = opencl::opencl_device(*runner.devices[0]).context().num_launches;
  runner.start(1);

  const auto of_step = [&](RowKind kind, int32_t num_rows, int32_t index) {
    const std::vector<int32_t> tokens(static_cast<size_t>(num_rows), 5);
    StepRun run = given_rows(1, kind, tokens, index);
    run.want = Want::kSample;
    StepPlan step;
    step.runs.push_back(run);
    const uint64_t before = launches;
    runner.run(step);
    return static_cast<int64_t>(launches - before);
  };
  const auto expected = [&](int32_t ops::LaunchCounts::* of) {
    const ExecutionPlan& plan = runner.plan;
    const auto num_attention = plan.config.num_attention_layers(), num_gdn = plan.config.num_layers() - num_attention;
    const int64_t in_both = declared<ops::OutResidual>(plan).*of + declared<ops::MlpIn>(plan).*of + declared<ops::DownResidual>(plan).*of;
    const int64_t gdn = declared<ops::GdnIn>(plan).*of + declared<ops::GdnMix>(plan).*of + in_both;
    const int64_t attention = declared<ops::AttnIn>(plan).*of + declared<ops::Attention>(plan).*of + in_both;
    const int64_t beside = declared<ops::Embed>(plan).*of + declared<ops::Head>(plan).*of + declared<ops::Sample>(plan).*of + declared<ops::StateCopy>(plan).*of;
    ::testing::Test::RecordProperty(of == &ops::LaunchCounts::decode ? "decode" : "prompt", fmt::format("a GDN layer {}, an attention layer {}, beside layers {}", gdn, attention, beside));
    return num_gdn * gdn + num_attention * attention + beside;
  };
  EXPECT_EQ(of_step(RowKind::kPrompt, 9, 0), expected(&ops::LaunchCounts::prompt));
  EXPECT_EQ(of_step(RowKind::kDecode, 1, 9), expected(&ops::LaunchCounts::decode));
  // Several rows of a sequence, as a verify has: what the model of a card's speed adds.
  std::string_view gdn_mix;
  for (const OpChoice& choice : runner.plan.choices)
    if (choice.op == ops::GdnMix::kName) gdn_mix = choice.candidate;
  const auto pass = backends::gdn_row_pass(gdn_mix, runner.plan.ring, RowKind::kDecode, 2);
  const auto num_gdn = runner.plan.config.num_linear_layers();
  EXPECT_EQ(of_step(RowKind::kDecode, 2, 10), expected(&ops::LaunchCounts::decode) + (pass ? num_gdn * pass->launches : 0));
}

}  // namespace
}  // namespace quern::worker
