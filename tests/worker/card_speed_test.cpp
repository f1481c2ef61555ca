#include "worker/card_speed.h"

#include "backends/platforms.h"
#include "base/json.h"
#include "support/test_support.h"

// The modelled speed: each term by hand, and that the whole is made of them.

namespace quern::worker {
namespace {

Result<ExecutionPlan> plan_27b(std::string_view config_file, std::string_view device, WorkerOptions options = {}) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(quern::testing::data_path(fmt::format("qwen3.6-27b/{}", config_file))));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::parse_config(json, "Qwen3.6-27B"));
  ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
  ASSIGN_OR_RETURN(const ops::DeviceTraits traits, backends::traits_by_name(device));
  return make_plan(options, std::move(config), std::move(inventory), {traits});
}
/// Its speed over tp x pp cards.
CardSpeed speed_of(std::string_view card, int32_t tp_size, int32_t pp_size, std::string_view config_file = "config.fp8.json", const SpeedAssumptions& assumed = {}) {
  WorkerOptions options;
  options.tp_size = tp_size;
  options.pp_size = pp_size;
  const auto plan = plan_27b(config_file, card, options);
  EXPECT_OK(plan);
  if (!plan) return {};
  EXPECT_TRUE(plan->fits) << plan->verdict;
  EXPECT_EQ(plan->refusals(), "");
  const auto speed = card_speed(*plan, assumed);
  EXPECT_TRUE(speed.has_value());
  return speed.value_or(CardSpeed{});
}

constexpr CardRates kCard{.read_bandwidth = 400e9, .issue_rate = 300e9, .num_cores = 20};
constexpr auto kDecode = ops::RowKind::kDecode;
constexpr auto kPrompt = ops::RowKind::kPrompt;

TEST(CardSpeed, EachTermIsWhatItsFormulaSays) {
  RankWork work;
  work.weight_bytes = 34e9;
  work.weight_slots = 3e9;
  StepTerms terms = step_terms(work, kCard, kDecode, {});
  EXPECT_DOUBLE_EQ(terms.weight_read, 0.1);  // 34 GB at 0.85 x 400 GB/s
  EXPECT_DOUBLE_EQ(terms.weight_issue, 0.01);
  EXPECT_DOUBLE_EQ(terms.seconds(), 0.1) << "the longer of the two";
  work.weight_slots = 60e9;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).seconds(), 0.2);
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kPrompt, {}).seconds(), 0.2 / 0.6) << "tiles of prompt rows reach a share of the peak";

  work = {};
  work.launches = 1000;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).seconds(), 3e-3);

  work = {};
  work.all_reduces = 128;
  work.all_reduce_bytes = 10240;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).seconds(), 128 * 30e-6) << "small ones take a latency";
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {.all_reduce_seconds = 13e-6}).seconds(), 128 * 13e-6);
  work.all_reduce_bytes = 25e6;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).seconds(), 128e-3) << "large ones their bytes";

  work = {};
  work.gather_bytes = 50e6;
  work.hand_over_bytes = 1;
  terms = step_terms(work, kCard, kDecode, {});
  EXPECT_DOUBLE_EQ(terms.gather, 2e-3);
  EXPECT_DOUBLE_EQ(terms.hand_over, 30e-6);

  work = {};
  work.mixer_bytes = 3.4e9;
  work.attention_products = 12e9;  // 16 lanes at a quarter of 300 G/s: 1.2 T products a second
  work.gdn_groups = 40;
  terms = step_terms(work, kCard, kDecode, {});
  EXPECT_DOUBLE_EQ(terms.mixer_read, 0.01);
  EXPECT_DOUBLE_EQ(terms.mixer_issue, 0.01);
  work.attention_products = 0;
  work.attention_slots = 0.75e9;  // of decode rows: 8 engines a core
  work.attention_sub_groups = 8 * 20;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).mixer_issue, 0.01);
  work.attention_sub_groups = 40;
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).mixer_issue, 0.04);
  work.attention_slots = 0;
  work.gdn_slots = 0.75e9;  // at a quarter of 300 G/s, those that need not wait on all cores
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kPrompt, {}).mixer_issue, 0.01);
  work.gdn_walk_slots = 0.75e9;  // rows and chunks that follow each other
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kDecode, {}).mixer_issue, 0.02);
  work.gdn_groups = 5;  // a quarter of the cores has a head
  EXPECT_DOUBLE_EQ(step_terms(work, kCard, kPrompt, {}).mixer_issue, 0.05);
}

TEST(CardSpeed, WorkOfOneTokenIsTheModelsBytesAndTheKernelsLaunches) {
  const auto plan = plan_27b("config.fp8.json", "b70");
  ASSERT_OK(plan);
  const RankPart part{plan->config, plan->inventory, plan->traits, 1, true, true};
  const RankWork one = rank_work(*plan, part, {});
  EXPECT_NEAR(one.weight_bytes, 26.93e9, 0.03e9);  // performance.md 2.1
  EXPECT_NEAR(one.mixer_bytes, 151e6 + 64 * 1024.0 * 1024 + 27e6, 30e6) << "a state, keys and values of 1k tokens, half a ring";
  EXPECT_EQ(one.all_reduces, 0);
  EXPECT_EQ(one.hand_over_bytes, 0);
  // Instructions of 16 lanes for a byte of weight: measured when the kernels were compiled (programs.txt).
  EXPECT_GT(one.weight_slots / one.weight_bytes, 0.05);
  EXPECT_LT(one.weight_slots / one.weight_bytes, 0.25);
  int64_t launches = 0;
  for (const OpChoice& choice : plan->choices) {
    EXPECT_GT(choice.launches.decode, 0) << choice.op << ' ' << choice.candidate;
    if (choice.wanted_by.starts_with("mtp") || choice.op == "draft_rows" || choice.op == "mtp_in") continue;
    launches += int64_t{choice.num_wanting} * choice.launches.decode;
  }
  // The plan's choices count the MTP layer, whose problems are those of other layers; one token does not run it.
  const auto of = [&](std::string_view op) {
    int32_t most = 0;
    for (const OpChoice& choice : plan->choices)
      if (choice.op == op) most = std::max(most, choice.launches.decode);
    return most;
  };
  EXPECT_LE(one.launches, launches);
  EXPECT_EQ(one.launches, 16 * (of("attn_in") + of("attention")) + 48 * (of("gdn_in") + of("gdn_mix")) + 64 * (of("out_residual") + of("mlp_in") + of("down_residual")) + of("embed") +
                              of("head") + of("sample") + of("state_copy"));

  // Ranks of two: the embedding's sum and two a layer, each a row of bf16; logits of the other half.
  const RankWork of_two = rank_work(*plan, RankPart{plan->config, plan->inventory, plan->traits, 2, true, true}, {});
  EXPECT_EQ(of_two.all_reduces, 129);
  EXPECT_DOUBLE_EQ(of_two.all_reduce_bytes, 10240);
  EXPECT_DOUBLE_EQ(of_two.gather_bytes, 65 * 8) << "candidates of the other rank";
  const RankWork of_four = rank_work(*plan, RankPart{plan->config, plan->inventory, plan->traits, 4, true, true}, {.kind = kPrompt, .rows_each = 512, .context = 512});
  EXPECT_DOUBLE_EQ(of_four.all_reduce_bytes, 3 * 512 * 10240.0) << "what three others send";
  EXPECT_DOUBLE_EQ(of_four.gather_bytes, 65 * 8 * 3) << "of a prompt one row has logits";
  const RankWork first = rank_work(*plan, RankPart{plan->config, plan->inventory, plan->traits, 1, true, false}, {});
  EXPECT_DOUBLE_EQ(first.hand_over_bytes, 10240);
  EXPECT_NEAR(one.weight_bytes - first.weight_bytes, 2.54e9, 0.01e9) << "the head is the last stage's";
}

TEST(CardSpeed, MoreRowsCostInstructionsBeforeTheyCostBytes) {
  const auto plan = plan_27b("config.fp8.json", "b60");
  ASSERT_OK(plan);
  const RankPart part{plan->config, plan->inventory, plan->traits, 1, true, true};
  const RankWork one = rank_work(*plan, part, {}), eight = rank_work(*plan, part, {.num_sequences = 8}), many = rank_work(*plan, part, {.num_sequences = 64}),
                 prompt = rank_work(*plan, part, {.kind = kPrompt, .rows_each = 512, .context = 512});
  EXPECT_DOUBLE_EQ(eight.weight_bytes, one.weight_bytes);
  EXPECT_GT(eight.weight_slots, one.weight_slots) << "rows become operands where they are multiplied";
  EXPECT_LT(eight.weight_slots, 3 * one.weight_slots) << "eight of them meet one converted weight";
  EXPECT_DOUBLE_EQ(many.weight_bytes, 2 * one.weight_bytes) << "launches of up to 32 rows";
  EXPECT_GT(many.weight_slots, 2 * one.weight_slots);
  EXPECT_DOUBLE_EQ(eight.mixer_bytes, 8 * one.mixer_bytes);
  EXPECT_EQ(eight.launches, one.launches);
  EXPECT_LT(prompt.weight_bytes, 2 * one.weight_bytes);
  // GDN is counted by the instructions of its rows and chunks: of decode rows, which one core has for a head, and of prompts that go one after the other, many more.
  EXPECT_DOUBLE_EQ(eight.gdn_walk_slots, 8 * one.gdn_walk_slots);
  EXPECT_EQ(one.gdn_slots, 0) << "a single row leaves nothing to another launch";
  EXPECT_GT(one.gdn_walk_slots, 48 * 48 * 3000.0);
  EXPECT_LT(one.gdn_walk_slots, 48 * 48 * 18000.0);
  EXPECT_EQ(one.attention_products, 0);
  EXPECT_EQ(one.attention_sub_groups, 4 * 32) << "a turn of 32 keys each, of 1024 and four kv heads";
  EXPECT_EQ(eight.attention_sub_groups, 8 * one.attention_sub_groups);
  EXPECT_DOUBLE_EQ(eight.attention_slots, 8 * one.attention_slots);
  const RankWork later = rank_work(*plan, part, {.context = 65536});  // 64 sub-groups of a kv head with 32 turns each
  EXPECT_EQ(later.attention_sub_groups, 4 * 64);
  EXPECT_GT(later.attention_slots / later.attention_sub_groups, 10 * one.attention_slots / one.attention_sub_groups);
  EXPECT_GT(prompt.attention_products, 0);
  const RankWork verify = rank_work(*plan, part, {.rows_each = 4});
  EXPECT_GT(verify.gdn_walk_slots, 3 * one.gdn_walk_slots);
  EXPECT_LT(verify.gdn_walk_slots, 4 * one.gdn_walk_slots) << "what stands before the rows is done once";
  EXPECT_GT(verify.gdn_slots, 0);
  EXPECT_EQ(verify.launches, one.launches + 48);
  WorkerOptions in_turn;
  in_turn.kernels = {{"gdn_mix", "opencl.simd16"}};
  const auto plan_in_turn = plan_27b("config.fp8.json", "b60", in_turn);
  ASSERT_OK(plan_in_turn);
  const RankWork rows = rank_work(*plan_in_turn, part, {.kind = kPrompt, .rows_each = 512, .context = 512});
  EXPECT_LT(prompt.gdn_slots + prompt.gdn_walk_slots, 0.3 * (rows.gdn_slots + rows.gdn_walk_slots));
  const RankWork ragged = rank_work(*plan, part, {.kind = kPrompt, .num_sequences = 2, .rows_each = 65, .context = 65});
  EXPECT_DOUBLE_EQ(ragged.gdn_walk_slots, prompt.gdn_walk_slots / 2) << "two chunks each, of eight";
  // 512 rows of 24.4 G products on the matrix units: 2048 of them in 16 slots.
  EXPECT_NEAR(prompt.weight_slots, 512 * 24.36e9 / 2048 * 16, 0.02 * 512 * 24.36e9 / 2048 * 16);
}

TEST(CardSpeed, MeetsTheBarsOfTwoB60AndFourB70) {
  // At 1k context, and by the formula of the published figures, which counts the prompt, with the instructions of GDN and attention counted in their machine code.
  EXPECT_GE(speed_of("b60", 2, 1).tokens_per_second(), 24.5);
  EXPECT_GE(speed_of("b70", 4, 1).latency_tokens_per_second(), 53);
}

TEST(CardSpeed, RanksShareTheBytesAndPayForTheSums) {
  const CardSpeed two = speed_of("b60", 2, 1), piped = speed_of("b60", 1, 2), four = speed_of("b70", 4, 1), three = speed_of("b70", 3, 1), both = speed_of("b70", 2, 2);
  ASSERT_EQ(two.stages.size(), 1u);
  ASSERT_EQ(piped.stages.size(), 2u);
  ASSERT_EQ(both.stages.size(), 2u);
  EXPECT_NEAR(two.stages[0].work.weight_bytes, 26.93e9 / 2, 0.02e9);
  EXPECT_NEAR(four.stages[0].work.weight_bytes, 26.93e9 / 4, 0.02e9);
  EXPECT_GT(three.stages[0].work.weight_bytes, 26.93e9 / 3) << "the largest share of three";
  EXPECT_LT(three.stages[0].work.weight_bytes, 27.6e9 / 3);
  EXPECT_NEAR(piped.stages[0].work.weight_bytes + piped.stages[1].work.weight_bytes, 26.93e9, 0.02e9);
  EXPECT_EQ(two.stages[0].work.all_reduces, 129);
  EXPECT_EQ(piped.stages[0].work.all_reduces + piped.stages[1].work.all_reduces, 0);
  EXPECT_EQ(both.stages[0].work.all_reduces + both.stages[1].work.all_reduces, 129);
  EXPECT_GT(piped.stages[0].terms.hand_over, 0);
  EXPECT_EQ(piped.stages[1].terms.hand_over, 0);
  EXPECT_DOUBLE_EQ(piped.decode_seconds, piped.stages[0].terms.seconds() + piped.stages[1].terms.seconds()) << "one token passes one stage after the other";
  EXPECT_GT(two.tokens_per_second(), 1.5 * piped.tokens_per_second());
  EXPECT_GT(four.tokens_per_second(), three.tokens_per_second());
  // 16 sequences are two groups of 8 in the pipeline, and each stage has one of them at any time.
  EXPECT_LT(piped.decode_seconds_16, 1.1 * piped.decode_seconds);
  const SpeedAssumptions slow{.all_reduce_seconds = 48e-6};
  EXPECT_NEAR(speed_of("b60", 2, 1, "config.fp8.json", slow).decode_seconds - two.decode_seconds, 129 * 18e-6 + 8e-6, 12e-6);
}

TEST(CardSpeed, IsModelledWhereEnginesAreKnownAndNowhereElse) {
  for (const char* card : {"b60", "b70"}) {
    const auto plan = plan_27b("config.fp8.json", card);
    ASSERT_OK(plan);
    const auto speed = card_speed(*plan);
    ASSERT_TRUE(speed.has_value()) << card;
    ASSERT_EQ(speed->stages.size(), 1u);
    EXPECT_DOUBLE_EQ(speed->decode_seconds, speed->stages[0].terms.seconds());
    EXPECT_DOUBLE_EQ(plan->expected_decode_tokens_per_second, speed->tokens_per_second()) << "one number, wherever it is printed";
    EXPECT_LT(speed->tokens_per_second(), plan->traits.read_bandwidth / 26.9e9) << "no faster than its memory";
    EXPECT_LT(speed->latency_tokens_per_second(), speed->tokens_per_second()) << "the prompt counts";
    EXPECT_GT(speed->tokens_per_second_16(), 5 * speed->tokens_per_second());
    EXPECT_GT(speed->verify_seconds[3], speed->decode_seconds);
    EXPECT_GT(speed->tokens_per_second_mtp(3, 3.3), 2 * speed->tokens_per_second());
    EXPECT_GT(speed->long_prompt_seconds, 10 * speed->prompt_seconds);
    EXPECT_LT(speed->long_prompt_seconds, 32 * speed->prompt_seconds);
  }
  for (const char* card : {"h200", "l40s", "cpu"}) {
    const auto plan = plan_27b("config.fp8.json", card);
    ASSERT_OK(plan);
    EXPECT_FALSE(card_speed(*plan).has_value()) << card;
  }
  for (const char* op : {"mlp_in", "gdn_mix", "head"}) {
    WorkerOptions options;
    options.kernels = {{op, "opencl.plain"}};
    const auto plan = plan_27b("config.fp8.json", "b70", options);
    ASSERT_OK(plan);
    EXPECT_FALSE(card_speed(*plan).has_value()) << op << ": what plain compiles to is not counted";
    EXPECT_LT(plan->expected_decode_tokens_per_second, 17);
  }
}

}  // namespace
}  // namespace quern::worker
