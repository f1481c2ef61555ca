#include <gtest/gtest.h>

#include "base/json.h"
#include "worker/runner_fixture.h"

// What is planned is what is allocated.

namespace quern::worker {
namespace {

/// Every rank's device has handed out what the plan says, beside what messages between ranks take.
void expect_planned(const TestRunner& runner) {
  for (size_t rank = 0; rank < runner.devices.size(); ++rank) {
    const MemoryPlan& memory = runner.plan.ranks[rank].memory;
    EXPECT_EQ(runner.devices[rank]->allocated_bytes() - runner.joined_bytes[rank], memory.planned_allocations()) << "rank " << rank;
    // A CPU's host memory, where messages are staged, is the device's as well.
    if (runner.traits.platform != ops::Platform::kCpu) {
      EXPECT_LE(runner.joined_bytes[rank], memory.message_bytes) << "rank " << rank;
    }
  }
}

TEST(Memory, DevicesAllocateWhatIsPlannedToTheByte) {
  for (const bool fp8_kv : {false, true}) {
    for (const bool with_mtp : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "fp8 KV " << fp8_kv << ", MTP " << with_mtp);
      WorkerOptions options;
      if (fp8_kv) options.kv_cache_dtype = KvCacheDType::kFp8;
      if (fp8_kv != with_mtp) options.ring_dtype = RingDType::kFloat32;
      options.load.with_mtp = with_mtp;
      options.num_snapshots = fp8_kv ? 3 : 0;
      TestRunner runner(tiny_fp8(), options);
      ASSERT_TRUE(runner.ready());
      ASSERT_EQ(runner.plan.memory.message_bytes, 0u);
      expect_planned(runner);
      // Steps allocate nothing.
      const std::vector<int32_t> prompt = random_tokens(5, 70);
      runner.start(0);
      StepPlan step;
      step.runs.push_back(given_rows(0, RowKind::kPrompt, prompt, 0));
      step.runs.back().want = Want::kSample;
      runner.run(step);
      expect_planned(runner);
    }
  }
}

TEST(Memory, KernelsOfEveryCandidateAllocateWhatIsPlanned) {
  WorkerOptions options;
  options.kernels = {};
  for (const std::string_view platform : {"cpu", "cuda", "opencl"}) {
    if (!device_under_test().starts_with(platform)) continue;
    for (const std::string_view op : {"attn_in", "attention", "gdn_in", "gdn_mix", "out_residual", "mlp_in", "down_residual", "head"}) options.kernels[std::string(op)] = fmt::format("{}.plain", platform);
  }
  TestRunner runner(tiny_fp8(), options);
  ASSERT_TRUE(runner.ready());
  expect_planned(runner);
}

TEST(Memory, RanksAllocateWhatIsPlanned) {
  for (const auto& [tp_size, pp_size] : {std::pair{2, 1}, {1, 2}}) {
    if (!has_devices(tp_size * pp_size)) continue;
    WorkerOptions options;
    options.tp_size = tp_size;
    options.pp_size = pp_size;
    TestRunner runner(tiny_fp8(), options);
    ASSERT_TRUE(runner.ready());
    expect_planned(runner);
  }
}

/// The released 27B model on cards: as much as may be used and no more, whatever the steps need.
TEST(Memory, PlansKeepToTheShareOfACardThatMayBeUsed) {
  const Json json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")).value();
  for (const char* card : {"h200", "h100", "l40s", "b70"}) {
    for (const double share : {0.7, 0.9, 1.0}) {
      for (const int32_t rows : {2048, 16384}) {
        SCOPED_TRACE(::testing::Message() << card << ", " << share << ", " << rows << " rows");
        WorkerOptions options;
        options.device = card;
        options.memory_utilization = share;
        options.max_num_batched_tokens = rows;
        model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
        weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
        ops::DeviceTraits traits = backends::traits_by_name(card).value();
        traits.device_code = true;  // also in builds without nvcc
        const auto plan = make_plan(options, std::move(config), std::move(inventory), {traits});
        ASSERT_OK(plan);
        if (!plan->fits) continue;
        EXPECT_LE(plan->memory.total_bytes(), plan->memory.budget_bytes);
        const int64_t most_blocks = int64_t{plan->limits.num_slots + plan->limits.num_snapshots} * ceil_div(plan->limits.max_model_len, ops::kGrid);
        if (plan->limits.num_blocks == most_blocks) continue;  // sequences and snapshots could use no more
        // Each of 34 tensors ends with a page of 2 MiB.
        EXPECT_GT(plan->memory.total_bytes() + 2 * plan->memory.block_bytes + (uint64_t{34 * 2} << 20), plan->memory.budget_bytes);
      }
    }
  }
}

/// What the driver says that its context takes is no room for KV blocks.
TEST(Memory, PlansLeaveToTheDriverWhatItTakes) {
  const Json json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")).value();
  const auto memory_with = [&](uint64_t overhead_bytes) {
    WorkerOptions options;
    options.device = "h200";
    model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
    weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
    ops::DeviceTraits traits = backends::traits_by_name("h200").value();
    traits.device_code = true;
    traits.overhead_bytes = overhead_bytes;
    return make_plan(options, std::move(config), std::move(inventory), {traits}).value().memory;
  };
  const uint64_t usual = backends::traits_by_name("h200").value().overhead_bytes;
  EXPECT_GT(usual, uint64_t{328} << 20) << "an H200's context takes 328.8 MiB";
  EXPECT_LT(usual, (uint64_t{328} + 180) << 20) << "and beside it no more is set aside than code, recorded steps and pages leave within 256 MB of the share";
  const MemoryPlan less = memory_with(usual), more = memory_with(usual + (uint64_t{1} << 30));
  EXPECT_EQ(less.driver_bytes, usual);
  EXPECT_LE(more.total_bytes(), more.budget_bytes);
  const uint64_t rounding = 2 * less.block_bytes + (uint64_t{34 * 2} << 20);
  EXPECT_NEAR(static_cast<double>(less.planned_allocations() - more.planned_allocations()), static_cast<double>(uint64_t{1} << 30), static_cast<double>(rounding));
}

/// Wider steps take more scratch, which is planned.
TEST(Memory, PlansCountWhatKernelsAskForALongerStep) {
  const Json json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")).value();
  const auto workspace = [&](int32_t rows) {
    WorkerOptions options;
    options.device = "h200";
    options.max_num_batched_tokens = rows;
    model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
    weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
    ops::DeviceTraits traits = backends::traits_by_name("h200").value();
    traits.device_code = true;
    return make_plan(options, std::move(config), std::move(inventory), {traits}).value().memory.workspace_bytes;
  };
  // Activations of a row, and e4m3 or bf16 copies of it in a projection's workspace.
  EXPECT_GT(workspace(16384), workspace(2048) + uint64_t{16384 - 2048} * (17408 * 2 + 5 * 5120 + 14336 * 2));
}

}  // namespace
}  // namespace quern::worker
