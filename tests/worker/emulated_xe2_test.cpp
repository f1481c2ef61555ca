// The kernels for Intel's Xe2 with its matrix units spelled out (device opencl-emulated:N): the program's own defences against wrong ones, and the demo model through all of them.

#include <algorithm>
#include <regex>

#include "backends/opencl/device.h"
#include "backends/opencl/programs.h"
#include "base/json.h"
#include "worker/kernel_cache.h"
#include "worker/runner_fixture.h"
#include "worker/selftest.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

bool is_emulated() { return device_under_test().starts_with("opencl-emulated:"); }
#define ONLY_EMULATED() \
  if (!is_emulated()) GTEST_SKIP() << "this test is about QUERN_TEST_DEVICE=opencl-emulated:N"

const ops::KernelTable& opencl_table() { return backends::kernel_table(ops::Platform::kOpenCl); }

/// The list of an op, with its plain kernel alone where another op is meant.
template <class Op>
ops::CandidateList<Op> list_for(std::string_view op) {
  static const ops::Candidate<Op> plain[] = {opencl_table().list<Op>().candidates().back()};
  return op == Op::kName ? opencl_table().list<Op>() : ops::CandidateList<Op>(plain);
}
/// Fast kernels for one op, plain ones for all others.
ops::KernelTable table_for(std::string_view op) {
  return {.embed = list_for<ops::Embed>(op), .attn_in = list_for<ops::AttnIn>(op), .attention = list_for<ops::Attention>(op), .gdn_in = list_for<ops::GdnIn>(op),
          .gdn_mix = list_for<ops::GdnMix>(op), .out_residual = list_for<ops::OutResidual>(op), .mlp_in = list_for<ops::MlpIn>(op),
          .down_residual = list_for<ops::DownResidual>(op), .mtp_in = list_for<ops::MtpIn>(op), .head = list_for<ops::Head>(op), .sample = list_for<ops::Sample>(op),
          .draft_rows = list_for<ops::DraftRows>(op), .state_copy = list_for<ops::StateCopy>(op), .combine = list_for<ops::Combine>(op)};
}

/// The second reference in block FP8, planned.
class EmulatedXe2 : public ::testing::Test {
 protected:
  void SetUp() override {
    ONLY_EMULATED();
    ASSERT_OK(quern::testing::second_reference(quern::testing::Scheme::kFp8Block, folder_.path()));
    auto plan = make_plan({.model_dir = folder_.path(), .device = device_under_test(), .dtype = ModelDType::kBFloat16, .max_model_len = 512, .max_num_seqs = 2});
    ASSERT_OK(plan);
    plan_ = std::move(*plan);
  }
  static std::unique_ptr<opencl::Device> open(std::function<void(std::string_view, std::string&)> edit) {
    const std::string name = device_under_test();
    return opencl::Device::open(std::stoi(name.substr(name.find(':') + 1)), {.emulates_xe2 = true, .edit_source = std::move(edit), .program_cache = {}}).value();
  }
  SelfTestReport report(std::string_view op, opencl::Device& device, const ops::SelectionRules& rules = {}) {
    auto report = self_test(plan_, plan_.ranks[0], table_for(op), rules, device, {{1, 3, 9}});
    EXPECT_OK(report);
    return report ? *report : SelfTestReport{};
  }

  quern::testing::TemporaryFolder folder_;
  ExecutionPlan plan_;
};

TEST_F(EmulatedXe2, ACandidateThatDoesNotBuildIsSkippedWithItsReasonAndPlainTakesItsPlace) {
  const auto device = open([](std::string_view unit, std::string& source) {
    if (unit == "gdn_simd16") source += "\nthis is no kernel;\n";
  });
  const ops::KernelTable table = table_for("gdn_mix");
  const SelfTestReport found = report("gdn_mix", *device);
  ASSERT_EQ(found.faults.size(), 2u);  // both candidates have kernels of it
  ops::SelectionRules rules;           // as the start makes them of the report
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found.faults[i].op, "gdn_mix");
    EXPECT_EQ(found.faults[i].candidate, i == 0 ? "opencl.dpas" : "opencl.simd16");
    EXPECT_THAT(found.faults[i].reason, HasSubstr("does not build the OpenCL source 'gdn_simd16'"));
    rules.disabled.emplace(fmt::format("gdn_mix {}", found.faults[i].candidate), found.faults[i].reason);
  }
  const RankPlan& rank = plan_.ranks[0];
  const Problems problems(rank.config, rank.inventory, rank.shard, {plan_.activation, plan_.kv, plan_.ring, plan_.options.k_max});
  KernelCache kernels(table, *device, rules);
  const auto taken = kernels.get<ops::GdnMix>(problems.gdn_mix());
  ASSERT_OK(taken);
  EXPECT_EQ((*taken)->arithmetic(), "opencl.plain.bf16");
  KernelCache demanded(table, *device, {.forced = {{"gdn_mix", "opencl.simd16"}}, .disabled = rules.disabled});
  const auto refused = demanded.get<ops::GdnMix>(problems.gdn_mix());
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, HasSubstr("does not build"));
}

struct WrongKernel {
  const char *what, *op, *unit, *from, *to;
  const char* candidate = nullptr;  // where it is not the first that has the unit
};
class EmulatedXe2Fault : public EmulatedXe2, public ::testing::WithParamInterface<WrongKernel> {};

TEST_P(EmulatedXe2Fault, IsFoundByTheSelfTest) {
  const WrongKernel& wrong = GetParam();
  int num_planted = 0;
  const auto device = open([&](std::string_view unit, std::string& source) {
    if (unit != wrong.unit) return;
    const std::string from = wrong.from;
    for (size_t at = source.find(from); at != std::string::npos; at = source.find(from, at + std::strlen(wrong.to))) {
      source.replace(at, from.size(), wrong.to);
      ++num_planted;
    }
    source = "#ifdef SIMD16\n#define WRONG 1\n#else\n#define WRONG 0\n#endif\n" + source;  // a text that plain shares is wrong in the other build alone
  });
  ops::SelectionRules rules;
  if (wrong.candidate != nullptr) rules.forced.emplace(wrong.op, wrong.candidate);
  const SelfTestReport found = report(wrong.op, *device, rules);
  EXPECT_GT(num_planted, 0) << "the text is not in the source any more";
  ASSERT_GE(found.faults.size(), 1u);  // more where the next candidate has the same source
  EXPECT_EQ(found.faults[0].op, wrong.op);
  EXPECT_NE(found.faults[0].candidate, "opencl.plain");
  EXPECT_THAT(found.faults[0].reason, Not(HasSubstr("does not build")));  // what is planted computes something wrong
  RecordProperty("reason", found.faults[0].reason);
}

INSTANTIATE_TEST_SUITE_P(
    Planted, EmulatedXe2Fault,
    ::testing::Values(
        WrongKernel{"lane", "mlp_in", "dpas", "shared[split][t][g * 8 + m][lane] = rows[m]", "shared[split][t][g * 8 + m][lane ^ 1] = rows[m]"},
        WrongKernel{"k_offset", "down_residual", "dpas", "operands[k / 16 + half_k]", "operands[k / 16]"},
        WrongKernel{"scale", "out_residual", "dpas", "s[j][block - 1] / s[j][block]", "s[j][block] / s[j][block - 1]"},
        WrongKernel{"second_weights", "gdn_in", "dpas", "tiles2 + (first_tile - num_first)", "tiles2 + 0 * (first_tile - num_first)"},
        WrongKernel{"part", "attn_in", "dpas", "part.tile = tile - end0", "part.tile = tile - end0 + 1"},
        WrongKernel{"page", "attention", "attention_simd16", "block_table[index / GRID]", "block_table[0]", "opencl.simd16"},
        WrongKernel{"merge", "attention", "attention_simd16", "sum = sum * before + p[D + 1] * now", "sum = sum + p[D + 1] * now", "opencl.simd16"},
        WrongKernel{"block", "attention", "attention_dpas", "block_table[read_first / GRID]", "block_table[0]"},
        WrongKernel{"turn", "attention", "attention_dpas", "(turn + split) * KEYS", "turn * KEYS"},
        WrongKernel{"sub_groups", "attention", "attention_dpas", "factors[s][item] = factor_to(largest_of[s][item], most)", "factors[s][item] = 1.0f"},
        WrongKernel{"groups", "attention", "attention_dpas", "sum = fma(factors[z][item], shares_at", "sum = fma(1.0f, shares_at"},
        WrongKernel{"future", "attention", "attention_dpas", "key <= index[m]", "key <= index[m] + 1"},
        WrongKernel{"diagonal", "gdn_mix", "gdn_prompt", "j < row + m + (is_query ? 1 : 0)", "j < row + m"},
        WrongKernel{"walk", "gdn_mix", "gdn_prompt", "state[i] *= total", "state[i] *= 1.0f"},
        WrongKernel{"known", "gdn_mix", "gdn_prompt", "beta[item] = is_known ? 1.0f : own_beta", "beta[item] = own_beta"},
        WrongKernel{"decay", "gdn_mix", "gdn_simd16", "along[0][item] = item <= before ? factor * ", "along[0][item] = item <= before ? "},
        WrongKernel{"ring", "gdn_mix", "gdn_simd16", "in_turn(index, length)) * width + in_k", "in_turn(index + 1, length)) * width + in_k"},
        WrongKernel{"kept", "gdn_mix", "gdn_simd16", "RING_KEY(place)[item] = ring_of(k)", "RING_KEY(place + 1)[item] = ring_of(k)"},
        WrongKernel{"column", "gdn_mix", "gdn_simd16", "window_here[kept[n]] = columns.rows[kept[n]]", "window_here[kept[n]] = columns.rows[kept[n] ^ 1]"},
        WrongKernel{"row", "embed", "embed", "token * width + i)", "(token ^ WRONG) * width + i)"},
        WrongKernel{"logit", "sample", "sample", "float x = row->logits[id - row->begin]", "float x = (WRONG ? -1.0f : 1.0f) * row->logits[id - row->begin]"},
        WrongKernel{"depth", "draft_rows", "draft_rows", "draft.depth > pass + 1", "draft.depth > pass + 1 + WRONG"},
        WrongKernel{"window", "state_copy", "state_copy", "index % window_length) * width + i] = hidden", "(index + WRONG) % window_length) * width + i] = hidden"}),
    [](const auto& fault) { return fmt::format("{}_{}", fault.param.op, fault.param.what); });

/// The released model's plan for the cards, with what the kernels are made of.
Result<ExecutionPlan> plan_27b(const char* card, int32_t tp_size) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json")));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::parse_config(json, "Qwen3.6-27B"));
  WorkerOptions options;
  options.device = card;
  options.tp_size = tp_size;
  ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
  ASSIGN_OR_RETURN(const ops::DeviceTraits traits, backends::traits_by_name(card));
  return make_plan(options, std::move(config), std::move(inventory), {traits});
}

TEST(IntelPlan, OfTheReleasedModelHasNoPlainKernel) {
  for (const auto& [card, tp_size] : {std::pair{"b60", 1}, {"b60", 2}, {"b70", 1}, {"b70", 4}}) {
    const auto plan = plan_27b(card, tp_size);
    ASSERT_OK(plan);
    EXPECT_GT(plan->choices.size(), 10u);
    for (const OpChoice& choice : plan->choices) {
      EXPECT_NE(choice.candidate, "opencl.plain") << tp_size << " " << card << ": " << choice.op << " " << choice.problem;
      EXPECT_GT(choice.launches.decode, 0) << choice.op;
      EXPECT_GT(choice.launches.prompt, 0) << choice.op;
    }
  }
}

/// Makes what the plan chooses for a problem.
struct Maker {
  opencl::Device& device;
  KernelCache cache{opencl_table(), device, {}};
  template <class Op>
  void operator()(const typename Op::Problem& problem, const std::string&) {
    EXPECT_OK(cache.get<Op>(problem));
  }
};

TEST(IntelPlan, BuildsOnlyProgramsWhoseMachineCodeIsDeclared) {
  ONLY_EMULATED();
  const auto plan = plan_27b("b60", 2);
  ASSERT_OK(plan);
  const RankPlan& rank = plan->ranks[0];
  const auto device = backends::open_device(device_under_test(), {}).value();
  Maker maker{opencl::opencl_device(*device)};
  Problems(rank.config, rank.inventory, rank.shard, plan->numerics()).for_each(plan->with_mtp, maker);

  const auto common = [](std::string text) {  // what emulation, and the version that is meant where none is named, leave of a program's name
    for (const char* part : {" -DEMULATED", " -cl-opt-disable", " -cl-intel-256-GRF-per-thread", " -cl-std=CL1.2", " -cl-std=CL3.0"}) text = std::regex_replace(text, std::regex(part), "");
    return text;
  };
  std::set<std::string> declared;
  for (const opencl::DeclaredProgram& program : opencl::declarations().programs) declared.insert(common(fmt::format("{} {}", program.unit, program.definitions)));
  const std::vector<std::string> built = maker.device.programs();
  EXPECT_GT(built.size(), 20u);
  for (const std::string& program : built) {
    const std::string name = common(program);
    EXPECT_TRUE(declared.contains(name.ends_with(' ') ? name.substr(0, name.size() - 1) : name)) << program;
  }
}

TEST(EmulatedDemo, GeneratesWhatFloat32OnTheCpuFindsAmongTheBest) {
  ONLY_EMULATED();
  const std::filesystem::path demo = std::filesystem::path(QUERN_SOURCE_DIR) / "models" / "quern-demo";
  const auto prompts = read_json_file(quern::testing::data_path("demo/token_prompts.json"));
  ASSERT_OK(prompts);
  auto tokens = (*prompts)[0]["tokens"].get<std::vector<int32_t>>();
  ASSERT_LE(tokens.size(), 64u);
  const size_t prompt = tokens.size();
  constexpr size_t kGenerated = 16;
  {
    TestRunner runner(demo, {.load = {.with_mtp = false}, .dtype = ModelDType::kBFloat16});
    ASSERT_TRUE(runner.ready());
    for (const OpChoice& choice : runner.plan.choices) {
      if (choice.op == "head") continue;  // tied to the embedding, whose rows are not in tiles
      EXPECT_TRUE(choice.candidate == "opencl.dpas" || choice.candidate == "opencl.simd16") << choice.op << ": " << choice.candidate;
    }
    runner.start(1, {.temperature = 0});
    StepRun run = given_rows(1, RowKind::kPrompt, tokens, 0);
    while (tokens.size() < prompt + kGenerated) {
      run.want = Want::kSample;
      StepPlan step;
      step.runs.push_back(run);
      const StepResult result = runner.run(step);
      ASSERT_EQ(result.runs.size(), 1u);
      ASSERT_EQ(result.runs[0].tokens.size(), 1u);
      tokens.push_back(result.runs[0].tokens[0]);
      run = StepRun{.slot = 1, .kind = RowKind::kDecode, .num_rows = 1};  // the token that the device has drawn
    }
  }
  TestRunner cpu(demo, {.load = {.with_mtp = false}, .dtype = ModelDType::kFloat32}, false, "cpu");
  ASSERT_TRUE(cpu.ready());
  cpu.start(1);
  StepRun run = given_rows(1, RowKind::kPrompt, tokens, 0);
  run.want = Want::kLogits;
  for (size_t i = prompt; i < tokens.size(); ++i) run.logit_rows.push_back(static_cast<int32_t>(i) - 1);
  StepPlan step;
  step.runs.push_back(run);
  const StepResult result = cpu.run(step);
  size_t num_best = 0;
  for (size_t i = 0; i < kGenerated; ++i) {
    const std::vector<float>& logits = result.runs[0].logits[i];
    const float best = *std::max_element(logits.begin(), logits.end()), taken = logits[static_cast<size_t>(tokens[prompt + i])];
    EXPECT_GE(taken, best - 0.5f) << "token " << i;  // twice the bar of bf16 logits
    num_best += taken == best ? 1 : 0;
  }
  EXPECT_GE(num_best, kGenerated - 2);
}

}  // namespace
}  // namespace quern::worker
