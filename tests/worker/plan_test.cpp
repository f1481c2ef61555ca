#include "worker/plan.h"

#include "backends/platforms.h"
#include "base/json.h"
#include "support/test_support.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

/// The released 27B configurations, planned without a weight, for the card `device`.
Result<ExecutionPlan> plan_27b(std::string_view config_file, std::string_view device, WorkerOptions options = {}) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(quern::testing::data_path(fmt::format("qwen3.6-27b/{}", config_file))));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::parse_config(json, "Qwen3.6-27B"));
  ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
  ASSIGN_OR_RETURN(const ops::DeviceTraits traits, backends::traits_by_name(device));
  return make_plan(options, std::move(config), std::move(inventory), traits);
}

constexpr double kGiB = 1ull << 30;

TEST(Plan, CountsTheWeightsOfTheReleasedFormats) {
  // model-spec.md section 5: text model and MTP head.
  const auto fp8 = plan_27b("config.fp8.json", "h200");
  ASSERT_OK(fp8);
  EXPECT_NEAR(static_cast<double>(fp8->memory.weights_bytes) / kGiB, 27.44 + 0.44, 0.05);
  const auto bf16 = plan_27b("config.json", "h200");
  ASSERT_OK(bf16);
  EXPECT_NEAR(static_cast<double>(bf16->memory.weights_bytes) / kGiB, 50.10 + 0.79, 0.05);
}

TEST(Plan, ActivationsThatStayFloatTakeNoKernelForQuantisedOnes) {
  const auto candidate_of = [](std::string_view op, bool quantize_activations) -> std::string {
    const Json json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")).value();
    model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
    WorkerOptions options;
    options.quantize_activations = quantize_activations;
    weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
    ops::DeviceTraits traits = backends::traits_by_name("h200").value();
    traits.device_code = true;  // also in builds without nvcc
    const auto plan = make_plan(options, std::move(config), std::move(inventory), traits);
    EXPECT_OK(plan);
    EXPECT_EQ(plan->traits.fp8_matrix, quantize_activations);
    for (const OpChoice& choice : plan->choices)
      if (choice.op == op) return choice.candidate;
    return "";
  };
  for (const std::string_view op : {"mlp_in", "down_residual", "gdn_in"}) {
    EXPECT_EQ(candidate_of(op, true), "cuda.sm90") << op;
    EXPECT_NE(candidate_of(op, false), "cuda.sm90") << op;
  }
}

TEST(Plan, CountsKvOfTheAttentionLayersOnlyAndTheRingOfEverySequence) {
  WorkerOptions options;
  options.load.with_mtp = false;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_EQ(plan->memory.block_bytes, 65536u * 64);  // 64 KiB a token
  EXPECT_NEAR(static_cast<double>(plan->memory.ring_bytes / plan->limits.num_slots) / (1 << 20), 104 + 7.5, 2);
  EXPECT_NEAR(static_cast<double>(plan->memory.state_bytes / plan->limits.num_slots) / (1 << 20), 144 + 2.8, 1);
}

TEST(Plan, ExpectsTheDecodeSpeedThatWasMeasured) {
  // docs/performance.md, H200: most linear layers on cuda.plain, with the mixers of cuda.mma and of cuda.plain, 1k context.
  for (const auto& [mixers, measured] : {std::pair{"cuda.mma", 44.9}, {"cuda.plain", 26.1}}) {
    WorkerOptions options;
    options.kernels = {{"gdn_in", "cuda.plain"}, {"attn_in", "cuda.plain"}, {"mlp_in", "cuda.plain"}, {"gdn_mix", mixers}, {"attention", mixers}};
    const auto plan = plan_27b("config.fp8.json", "h200", options);
    ASSERT_OK(plan);
    if (!plan->traits.device_code) GTEST_SKIP() << plan->traits.why_no_device_code;
    EXPECT_NEAR(plan->expected_decode_tokens_per_second, measured, 0.15 * measured) << mixers;
  }
}

TEST(Plan, DeclaredFp8KvHalvesTheBlocks) {
  WorkerOptions options;
  options.load.with_mtp = false;
  const auto plan = plan_27b("config.static.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_EQ(plan->kv, DType::kE4M3);
  EXPECT_EQ(plan->memory.block_bytes, 32768u * 64);
}

TEST(Plan, SaysWhereTheFp8CacheHasNoScales) {
  WorkerOptions options;
  options.load.with_mtp = false;
  options.kv_cache_dtype = KvCacheDType::kFp8;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_THAT(plan->notes, ::testing::Contains(HasSubstr("16 of 16 attention layers have no k and v scales")));
  options.kv_cache_dtype = KvCacheDType::kAuto;
  const auto wide = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(wide);
  EXPECT_THAT(wide->notes, ::testing::Not(::testing::Contains(HasSubstr("k and v scales"))));
}

TEST(Plan, SaysWhatDoesNotFitAndWhatWould) {
  const auto fp8 = plan_27b("config.fp8.json", "b60");
  ASSERT_OK(fp8);
  EXPECT_FALSE(fp8->fits);
  EXPECT_THAT(fp8->verdict, HasSubstr("a device with"));
  const auto bf16 = plan_27b("config.json", "b70");
  ASSERT_OK(bf16);
  EXPECT_FALSE(bf16->fits);
  WorkerOptions tight;
  tight.memory_utilization = 0.15;
  const auto small_share = plan_27b("config.fp8.json", "h200", tight);
  ASSERT_OK(small_share);
  EXPECT_THAT(small_share->verdict, HasSubstr("--gpu-memory-utilization 0.2"));
}

TEST(Plan, ClampsSequencesWithANoteInsteadOfFailing) {
  WorkerOptions options;
  options.max_num_seqs = 4096;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_TRUE(plan->fits) << plan->verdict;
  EXPECT_LT(plan->limits.num_slots, 4096);
  EXPECT_THAT(plan->notes, ::testing::Contains(HasSubstr("max_num_seqs lowered from 4096")));
}

TEST(Plan, RefusesOptionsThatContradictTheModelAllAtOnce) {
  WorkerOptions options;
  options.max_model_len = 300000;
  options.tp_size = 2;
  options.memory_utilization = 1.5;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("262144"));
  EXPECT_THAT(plan.error().message, HasSubstr("-tp 2"));
  EXPECT_THAT(plan.error().message, HasSubstr("1.5"));
}

TEST(Plan, NamesTheKernelsThatRefuseAndWhoWantsThem) {
  WorkerOptions options;
  options.kernels = {{"mlp_in", "cuda.sm90"}};
  const auto plan = plan_27b("config.fp8.json", "a100", options);
  ASSERT_OK(plan);
  EXPECT_THAT(plan->refusals(), HasSubstr("mlp_in"));
  EXPECT_THAT(plan->refusals(), HasSubstr("wanted by layers.0.mlp"));
  EXPECT_THAT(plan->refusals(), HasSubstr("cuda.plain"));
}

TEST(Plan, HasAKernelForEveryOpOnIntelCards) {
  for (const char* card : {"b60", "b70"}) {
    const auto plan = plan_27b("config.fp8.json", card);
    ASSERT_OK(plan);
    EXPECT_EQ(plan->refusals(), "") << card;
  }
}

TEST(Plan, RefusesAKernelNameThatThePlatformDoesNotHave) {
  WorkerOptions options;
  options.kernels = {{"attention", "cpu.imagined"}};
  const auto plan = plan_27b("config.fp8.json", "cpu", options);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("cpu.plain"));
}

}  // namespace
}  // namespace quern::worker
