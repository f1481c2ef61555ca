#include "worker/plan.h"

#include <iostream>
#include <map>
#include <set>

#include "backends/platforms.h"
#include "base/json.h"
#include "support/test_support.h"
#include "worker/rank_devices.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

/// The released 27B configurations, planned without a weight, for the card `device`.
Result<ExecutionPlan> plan_27b(std::string_view config_file, std::string_view device, WorkerOptions options = {}) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(quern::testing::data_path(fmt::format("qwen3.6-27b/{}", config_file))));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::parse_config(json, "Qwen3.6-27B"));
  ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
  options.device = device;
  ASSIGN_OR_RETURN(const ops::DeviceTraits traits, backends::traits_by_name(device));
  return make_plan(options, std::move(config), std::move(inventory), {traits});
}

constexpr double kGiB = 1ull << 30;

TEST(Plan, CountsTheWeightsOfTheReleasedFormats) {
  // model-spec.md section 5: text model and MTP head.
  const auto fp8 = plan_27b("config.fp8.json", "h200");
  ASSERT_OK(fp8);
  // With an FP8 copy of lm_head. Kernels pad in_proj_a and in_proj_b and repeat scales; the driver's pages are of 2 MiB.
  EXPECT_NEAR(static_cast<double>(fp8->memory.weights_bytes) / kGiB, 27.44 + 0.44 + 1.18, 0.7);
  const auto bf16 = plan_27b("config.json", "h200");
  ASSERT_OK(bf16);
  EXPECT_NEAR(static_cast<double>(bf16->memory.weights_bytes) / kGiB, 50.10 + 0.79 + 1.18, 0.7);
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
    const auto plan = make_plan(options, std::move(config), std::move(inventory), {traits});
    EXPECT_OK(plan);
    EXPECT_EQ(plan->traits.fp8_matrix, quantize_activations);
    for (const OpChoice& choice : plan->choices)
      if (choice.op == op) return choice.candidate;
    return "";
  };
  for (const std::string_view op : {"mlp_in", "down_residual", "gdn_in"}) {
    EXPECT_EQ(candidate_of(op, true), "cuda.sm90") << op;
    EXPECT_EQ(candidate_of(op, false), "cuda.mma") << op;
  }
}

/// Whatever card and scheme: linear layers, attention and gdn_mix are on matrix units.
TEST(Plan, LeavesNoLayerToPlainKernelsOnAnyNvidiaCard) {
  constexpr std::string_view kLinears[] = {"attn_in", "gdn_in", "mlp_in", "out_residual", "down_residual", "mtp_in", "head"};
  struct Case {
    const char* config;
    bool quantize_fp8, quantize_activations;
  };
  for (const char* card : {"h200", "h100", "a100", "rtxa6000", "rtx3090", "l40s", "rtx4090", "rtx6000ada", "rtx5090", "rtxpro6000"})
    for (const Case& c : {Case{"config.fp8.json", false, true}, {"config.fp8.json", false, false}, {"config.static.json", false, true}, {"config.json", false, true}, {"config.json", true, true}})
      for (const int32_t tp_size : {1, 2, 4}) {
        SCOPED_TRACE(::testing::Message() << card << ", " << c.config << (c.quantize_fp8 ? ", --quantization fp8" : "") << (c.quantize_activations ? "" : ", --activation-scheme none") << ", tp " << tp_size);
        const Json json = read_json_file(quern::testing::data_path(fmt::format("qwen3.6-27b/{}", c.config))).value();
        model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
        WorkerOptions options;
        options.device = card;
        options.tp_size = tp_size;
        options.load.quantize_fp8 = c.quantize_fp8;
        options.quantize_activations = c.quantize_activations;
        weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
        ops::DeviceTraits traits = backends::traits_by_name(card).value();
        traits.device_code = true;  // also in builds without nvcc
        const auto plan = make_plan(options, std::move(config), std::move(inventory), {traits});
        ASSERT_OK(plan);
        for (const OpChoice& choice : plan->choices)
          if (std::find(std::begin(kLinears), std::end(kLinears), choice.op) != std::end(kLinears)) {
            // FP8 weights meet FP8 activations where matrix units take both, unless that is not wanted.
            const bool fp8 = choice.problem.find("fp8") != std::string::npos, w8a8 = fp8 && c.quantize_activations && traits.fp8_matrix;
            const std::string_view expected = traits.architecture == 90 && (w8a8 || !fp8) ? "cuda.sm90" : w8a8 ? "cuda.mma.e4m3" : "cuda.mma";
            EXPECT_EQ(choice.candidate, expected) << choice.op << " " << choice.problem;
          } else if (choice.op == "attention") {
            EXPECT_EQ(choice.candidate, traits.architecture == 90 ? "cuda.sm90" : "cuda.mma") << choice.problem;
          } else if (choice.op == "gdn_mix") {
            EXPECT_EQ(choice.candidate, "cuda.mma.chunked") << choice.problem;
          } else if (choice.op == "sample") {
            EXPECT_EQ(choice.candidate, traits.architecture == 90 ? "cuda.sm90" : "cuda.rows") << choice.problem;
          }
      }
}

TEST(Plan, CopiesLmHeadForDraftsWhereThereIsRoomAndWhereItIsWished) {
  const auto has_copy = [](const char* card, DraftHead wish, double share = 0.9) {
    WorkerOptions options;
    options.draft_head = wish;
    options.memory_utilization = share;
    const auto plan = plan_27b("config.fp8.json", card, options);
    EXPECT_OK(plan);
    EXPECT_EQ(plan->options.draft_head, wish);
    return plan->draft_head;
  };
  EXPECT_TRUE(has_copy("h200", DraftHead::kAuto));
  EXPECT_FALSE(has_copy("h200", DraftHead::kModel));
  EXPECT_FALSE(has_copy("h200", DraftHead::kAuto, 0.25));  // weights take most of that
  EXPECT_FALSE(has_copy("b70", DraftHead::kAuto));
  EXPECT_TRUE(has_copy("b70", DraftHead::kFp8));
  WorkerOptions with, without;
  without.draft_head = DraftHead::kModel;
  const auto large = plan_27b("config.fp8.json", "h200", with), small = plan_27b("config.fp8.json", "h200", without);
  ASSERT_OK(large);
  ASSERT_OK(small);
  EXPECT_NEAR(static_cast<double>(large->memory.weights_bytes - small->memory.weights_bytes), 248320.0 * 5120, 8e6);
  WorkerOptions no_mtp = with;
  no_mtp.load.with_mtp = false;
  EXPECT_FALSE(plan_27b("config.fp8.json", "h200", no_mtp)->draft_head);
}

TEST(Plan, CountsKvOfTheAttentionLayersOnlyAndTheRingOfEverySequence) {
  WorkerOptions options;
  options.load.with_mtp = false;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_EQ(plan->memory.block_bytes, 65536u * 64);  // 64 KiB a token
  EXPECT_NEAR(static_cast<double>(plan->memory.ring_bytes / plan->limits.num_slots) / (1 << 20), 52 + 7.5, 2);
  EXPECT_NEAR(static_cast<double>(plan->memory.state_bytes / plan->limits.num_slots) / (1 << 20), 144 + 2.8, 1);
}

TEST(Plan, KeepsRingsInTheTypeOfActivationsUnlessFloatIsAskedFor) {
  const auto planned = [](ModelDType dtype, RingDType ring) {
    WorkerOptions options;
    options.dtype = dtype;
    options.ring_dtype = ring;
    return plan_27b("config.fp8.json", "h200", options);
  };
  const auto usual = planned(ModelDType::kAuto, RingDType::kAuto), wide = planned(ModelDType::kBFloat16, RingDType::kFloat32);
  ASSERT_OK(usual);
  ASSERT_OK(wide);
  EXPECT_EQ(usual->ring, DType::kBF16);
  EXPECT_EQ(wide->ring, DType::kF32);
  ASSERT_EQ(usual->limits.num_slots, wide->limits.num_slots);
  // 69 rows of 16 keys and 48 updates of 128, in 48 layers.
  EXPECT_EQ(wide->memory.ring_bytes - usual->memory.ring_bytes, uint64_t(usual->limits.num_slots) * 48 * 69 * (16 + 48) * 128 * 2);
  EXPECT_GT(usual->memory.kv_bytes, wide->memory.kv_bytes);
  EXPECT_EQ(wide->decode_bytes_per_token - usual->decode_bytes_per_token, 48.0 * 32 * (16 + 48) * 128 * 2 + 48.0 * 48 * 128 * 128 * 2) << "half a ring is read, and half of each element of S";
  EXPECT_EQ(planned(ModelDType::kBFloat16, RingDType::kBFloat16)->ring, DType::kBF16);
  for (const RingDType ring : {RingDType::kAuto, RingDType::kFloat32}) EXPECT_EQ(planned(ModelDType::kFloat32, ring)->ring, DType::kF32);
  EXPECT_THAT(planned(ModelDType::kFloat32, RingDType::kBFloat16).error().message, HasSubstr("--gdn-ring-dtype bfloat16 with --dtype float32"));
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

TEST(Plan, LetsAllSequencesThatHaveAPlaceDecodeInOneStep) {
  for (const int32_t wanted : {0, 1, 64, 65, 256, 600}) {
    WorkerOptions options;
    options.max_num_seqs = wanted;
    const auto plan = plan_27b("config.fp8.json", "h200", options);
    ASSERT_OK(plan);
    EXPECT_LE(plan->limits.num_slots, wanted > 0 ? wanted : 64);
    EXPECT_GE(plan->max_logit_rows, plan->limits.num_slots) << wanted;
    EXPECT_GE(plan->max_logit_rows, std::min(plan->limits.num_slots * (plan->limits.k_max + 1), 256)) << "the verifies of a usual number of sequences are one group";
    EXPECT_GE(plan->limits.max_rows, plan->limits.num_slots + 64) << wanted;
  }
}

TEST(Plan, HasNoPlacesForLogitsOfSequencesThatHaveNone) {
  WorkerOptions options;
  options.device = "b60";
  options.pp_size = 2;
  const auto plan = plan_27b("config.fp8.json", "b60", options);
  ASSERT_OK(plan);
  ASSERT_TRUE(plan->fits) << plan->verdict;
  ASSERT_LT(plan->limits.num_slots, 40);
  EXPECT_EQ(plan->max_logit_rows, std::max(plan->limits.num_slots * (plan->limits.k_max + 1), 64));
  EXPECT_LE(plan->memory.total_bytes(), plan->memory.budget_bytes);
}

TEST(Plan, HasAPlaceForTheLogitsOfAVerifyHoweverFewAreAskedFor) {
  WorkerOptions options;
  options.max_logit_rows = 1;
  options.k_max = 7;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_OK(plan);
  EXPECT_EQ(plan->max_logit_rows, 8);
}

TEST(Plan, RefusesOptionsThatContradictTheModelAllAtOnce) {
  WorkerOptions options;
  options.max_model_len = 300000;
  options.tp_size = 25;
  options.memory_utilization = 1.5;
  const auto plan = plan_27b("config.fp8.json", "h200", options);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("262144"));
  EXPECT_THAT(plan.error().message, HasSubstr("-tp 25: Qwen3.6-27B has 24 query heads"));
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

/// Shards are as good as whole layers to the fast kernels: each op of a rank is taken by what takes it on one card.
TEST(Plan, ChoosesForShardsTheKernelsOfWholeLayers) {
  for (const char* card : {"h200", "b60", "b70"}) {
    const auto chosen = [&](int32_t tp_size, int32_t pp_size) {
      const Json json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")).value();
      model::ModelConfig config = model::parse_config(json, "Qwen3.6-27B").value();
      WorkerOptions options;
      options.device = card;
      options.tp_size = tp_size;
      options.pp_size = pp_size;
      weights::Inventory inventory = weights::inventory_from_config(config, options.load).value();
      ops::DeviceTraits traits = backends::traits_by_name(card).value();
      traits.device_code = true;  // also in builds without nvcc
      const auto plan = make_plan(options, std::move(config), std::move(inventory), {traits});
      EXPECT_OK(plan);
      std::map<std::string, std::set<std::string>> by_op;
      for (const OpChoice& choice : plan->choices) by_op[choice.op].insert(choice.candidate);
      by_op.erase("combine");  // one card has nothing to add up
      return by_op;
    };
    const auto whole = chosen(1, 1);
    for (const auto& [tp_size, pp_size] : {std::pair{2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}}) EXPECT_EQ(chosen(tp_size, pp_size), whole) << card << ", tp " << tp_size << ", pp " << pp_size;
  }
}

Result<ExecutionPlan> plan_ranks(std::string_view config_file, std::string device, int32_t tp_size, int32_t pp_size) {
  WorkerOptions options;
  options.tp_size = tp_size;
  options.pp_size = pp_size;
  return plan_27b(config_file, device, options);
}

TEST(Plan, FitsTheLayoutsThatTheCardsAreBoughtFor) {
  // model-spec.md section 5: weights of the fullest rank, text and MTP head, in GiB; and what is left for a context.
  struct Case {
    const char *config, *card;
    int32_t tp_size, pp_size;
    double weights;
    int64_t kv_tokens;  // at least
  };
  for (const Case& c : {Case{"config.fp8.json", "b60", 2, 1, 13.72 + 0.22 + 0.05, 100'000}, Case{"config.fp8.json", "b70", 4, 1, 6.86 + 0.11 + 0.08, 262'144},
                        Case{"config.fp8.json", "b70", 3, 1, 9.29 + 0.15 + 0.07, 262'144}, Case{"config.static.json", "b70", 2, 1, 16.30, 100'000},
                        Case{"config.static.json", "b70", 4, 1, 8.15, 262'144}}) {
    SCOPED_TRACE(::testing::Message() << c.config << ", " << c.card << ", tp " << c.tp_size << ", pp " << c.pp_size);
    WorkerOptions options;
    options.tp_size = c.tp_size;
    options.pp_size = c.pp_size;
    if (std::string_view(c.config) == "config.static.json") options.load.with_mtp = false;  // that release has no head
    const auto plan = plan_27b(c.config, c.card, options);
    ASSERT_OK(plan);
    EXPECT_TRUE(plan->fits) << plan->verdict;
    EXPECT_EQ(plan->refusals(), "");
    ASSERT_EQ(std::ssize(plan->ranks), c.tp_size * c.pp_size);
    EXPECT_NEAR(static_cast<double>(plan->ranks[0].memory.weights_bytes) / kGiB, c.weights, 0.15);
    EXPECT_GE(int64_t{plan->limits.num_blocks} * 64, c.kv_tokens) << plan->verdict;
    for (const RankPlan& rank : plan->ranks) {
      EXPECT_LE(rank.memory.total_bytes(), rank.memory.budget_bytes);
      EXPECT_GT(rank.memory.margin_bytes(), 0);
    }
    std::cout << fmt::format("{} on {} x {}, tp {} pp {}: {}, margin {:.2f} GiB\n", c.config, c.tp_size * c.pp_size, c.card, c.tp_size, c.pp_size, plan->verdict,
                             static_cast<double>(plan->memory.margin_bytes()) / kGiB);
  }
}

TEST(Plan, PutsTheStagesWhereTheyReadAsMuch) {
  for (const bool with_mtp : {true, false}) {
    WorkerOptions options;
    options.pp_size = 2;
    options.load.with_mtp = with_mtp;
    const auto plan = plan_27b("config.fp8.json", "b70", options);
    ASSERT_OK(plan);
    EXPECT_TRUE(plan->fits) << plan->verdict;
    ASSERT_EQ(plan->ranks.size(), 2u);
    EXPECT_EQ(plan->ranks[0].shard.layers.end, plan->ranks[1].shard.layers.begin);
    EXPECT_EQ(plan->ranks[1].shard.layers.end, 64);
    EXPECT_EQ(plan->limits.num_stages, 2);
    // Within a layer of each other; the head counts, the embedding does not.
    EXPECT_NEAR(plan->ranks[0].decode_bytes_per_token, plan->ranks[1].decode_bytes_per_token + (with_mtp ? 0.44 * kGiB : 0), 0.4 * kGiB);
    EXPECT_GT(plan->ranks[0].shard.layers.size(), 34);
  }
}

TEST(Plan, SaysOfTwoStagesOnSmallCardsWhetherTheyFit) {
  const auto plan = plan_ranks("config.fp8.json", "b60", 1, 2);
  ASSERT_OK(plan);
  EXPECT_TRUE(plan->fits) << plan->verdict;
  std::cout << fmt::format("config.fp8.json on 2 x b60, pp 2: {}, margin {:.2f} GiB, layers {} + {}\n", plan->verdict, static_cast<double>(plan->memory.margin_bytes()) / kGiB,
                           plan->ranks[0].shard.layers.size(), plan->ranks[1].shard.layers.size());
  const auto wide = plan_ranks("config.json", "b60", 2, 1);
  ASSERT_OK(wide);
  EXPECT_FALSE(wide->fits);
  EXPECT_THAT(wide->verdict, HasSubstr("rank 0 (b60)"));
  EXPECT_LT(wide->memory.margin_bytes(), 0);
}

TEST(Plan, AgreesOnWhatEveryRankHasRoomFor) {
  // Uneven stages: what is common is what the fuller one holds.
  const auto plan = plan_ranks("config.fp8.json", "b60", 1, 2);
  ASSERT_OK(plan);
  for (const RankPlan& rank : plan->ranks) EXPECT_EQ(rank.memory.kv_bytes, static_cast<uint64_t>(plan->limits.num_blocks) * rank.memory.block_bytes);
  EXPECT_EQ(plan->limits.block_bytes, plan->ranks[0].memory.block_bytes + plan->ranks[1].memory.block_bytes);
  EXPECT_EQ(plan->ranks[0].memory.sampler_bytes, static_cast<uint64_t>(plan->limits.num_slots) * sizeof(ops::SlotSampling)) << "the last stage samples";
  WorkerOptions options;
  options.pp_size = 2;
  options.kv_cache_memory_bytes = plan->kv_bytes_for(100);
  const auto hundred = plan_27b("config.fp8.json", "b60", options);
  ASSERT_OK(hundred);
  EXPECT_EQ(hundred->limits.num_blocks, 100);
}

TEST(Plan, HasRoomForAllSequencesAndForThePrefixesOfAllSnapshots) {
  WorkerOptions options;
  options.max_num_seqs = 4;
  options.max_model_len = 8192;
  const auto with = [&](int32_t num_snapshots) {
    options.num_snapshots = num_snapshots;
    return plan_27b("config.fp8.json", "h200", options);
  };
  for (const int32_t num_snapshots : {0, 10}) {
    const auto plan = with(num_snapshots);
    ASSERT_OK(plan);
    EXPECT_EQ(plan->limits.num_blocks, (4 + num_snapshots) * 8192 / 64);
  }
  const auto full = with(200);  // what is left of a card, if that is less
  ASSERT_OK(full);
  EXPECT_LT(full->limits.num_blocks, (4 + full->limits.num_snapshots) * 8192 / 64);
  EXPECT_GT(full->memory.total_bytes() + (uint64_t{256} << 20), full->memory.budget_bytes);
}

TEST(Plan, ForMoreSequencesHasNeverRoomForFewer) {
  int num_fitting = 0;
  for (int permille = 880; permille <= 920; permille += 4) {
    int32_t before = 0;
    for (const int32_t wanted : {1, 8, 32, 64, 256}) {
      SCOPED_TRACE(::testing::Message() << wanted << " sequences of " << permille << " of 1000");
      WorkerOptions options;
      options.memory_utilization = permille / 1000.0;
      options.max_num_seqs = wanted;
      options.k_max = 3;
      const auto plan = plan_27b("config.fp8.json", "b70", options);
      ASSERT_OK(plan);
      const int32_t now = plan->fits ? plan->limits.num_slots : 0;
      EXPECT_GE(now, before) << plan->verdict;
      before = now;
      num_fitting += plan->fits ? 1 : 0;
    }
  }
  EXPECT_GT(num_fitting, 10);
  EXPECT_LT(num_fitting, 55);  // the edge is among them
}

TEST(Plan, RefusesRanksThatCannotWorkTogether) {
  const auto refusal = [](std::string device, int32_t tp_size, int32_t pp_size) -> std::string {
    const auto devices = rank_devices(device, tp_size, pp_size);
    if (!devices) return devices.error().message;
    const auto traits = traits_of_ranks(*devices, tp_size);
    return traits ? "" : traits.error().message;
  };
  EXPECT_THAT(refusal("b60,b60,b60", 2, 1), HasSubstr("names 3 devices, but -tp 2 -pp 1 run on 2"));
  EXPECT_THAT(refusal("cuda:0,cuda:1", 1, 1), HasSubstr("names 2 devices, but -tp 1 -pp 1 runs on 1"));
  EXPECT_THAT(refusal("cuda:1,cuda:1", 2, 1), HasSubstr("cuda:1 is named twice"));
  for (const char* same : {"cuda,cuda", "cuda,cuda:0", "cuda:0,cuda-emulated:0", "cuda-emulated,cuda", "cuda-emulated:0,cuda-emulated:0"})
    EXPECT_THAT(refusal(same, 2, 1), HasSubstr("cuda:0 is named twice")) << same;
  EXPECT_THAT(refusal("b60,b70", 2, 1), HasSubstr("same kind of device"));
  EXPECT_THAT(refusal("b60,h200", 1, 2), HasSubstr("two platforms"));
  EXPECT_THAT(refusal("cpu:0,,cpu:1", 3, 1), HasSubstr("a name is missing"));
  EXPECT_THAT(refusal("opencl", 64, 1), HasSubstr("64 ranks want as many Intel GPUs"));
  EXPECT_EQ(refusal("b60,b70", 1, 2), "") << "stages may differ";
  EXPECT_EQ(refusal("b60", 2, 2), "");
}

TEST(Plan, LetsDevicesFollowTheFirst) {
  const auto names = [](std::string_view device, int32_t tp_size, int32_t pp_size) { return rank_devices(device, tp_size, pp_size).value(); };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names("cuda", 2, 2), (Names{"cuda:0", "cuda:1", "cuda:2", "cuda:3"}));
  EXPECT_EQ(names("cuda:2", 2, 1), (Names{"cuda:2", "cuda:3"}));
  EXPECT_EQ(names("cpu", 1, 1), (Names{"cpu"}));
  EXPECT_EQ(names("cpu", 3, 1), (Names{"cpu:0", "cpu:1", "cpu:2"}));
  EXPECT_EQ(names("b60", 1, 2), (Names{"b60", "b60"}));
  EXPECT_EQ(names("cuda:3,cuda:1", 1, 2), (Names{"cuda:3", "cuda:1"}));
  EXPECT_EQ(names("opencl:1,opencl:1", 2, 1), (Names{"opencl:1", "opencl:1"})) << "an OpenCL device may have several ranks";
}

}  // namespace
}  // namespace quern::worker
