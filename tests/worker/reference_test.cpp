// The worker against values that other programs computed: tests/data/*/expected.json (tools/reference/README.md).

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/json.h"
#include "worker/runner_fixture.h"
#include "worker/selftest.h"

namespace quern::worker {
namespace {

using quern::testing::Scheme;

/// Ranks that share layers, and stages.
struct Layout {
  int32_t tp_size = 1, pp_size = 1;
};
constexpr Layout kLayouts[] = {{2, 1}, {3, 1}, {4, 1}, {1, 2}, {1, 4}, {2, 2}};

struct Reference {
  const char* name;     // folder in tests/data
  bool has_logit_ids;   // logits are given for chosen ids only
};
constexpr Reference kTiny{"tiny-reference", false}, kSecond{"second-reference", true};

std::filesystem::path checkpoint(const Reference& reference, Scheme scheme) {
  // Written once per program run and kept until it ends.
  static quern::testing::TemporaryFolder folder;
  const auto path = folder.path() / reference.name / (scheme == Scheme::kBf16 ? "bf16" : "fp8");
  if (!std::filesystem::exists(path)) {
    const auto written = reference.has_logit_ids ? quern::testing::second_reference(scheme, path) : quern::testing::tiny_reference(scheme, path);
    EXPECT_OK(written);
  }
  return path;
}

const Json& expected(const Reference& reference) {
  static std::map<std::string, Json> cache;
  auto& entry = cache[reference.name];
  if (entry.is_null()) entry = std::move(read_json_file(quern::testing::data_path(std::string(reference.name) + "/expected.json"))).value();
  return entry;
}
const Json& scheme_of(const Json& file, Scheme scheme) { return file[scheme == Scheme::kBf16 ? "bf16" : "fp8_block"]; }

/// Distance of a row of logits from the expected ones, over the ids that the file lists.
struct Distance {
  double square_sum = 0, worst = 0;
  int64_t count = 0;
  void add(const std::vector<float>& logits, const Json& want, const Json* ids) {
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t id = ids != nullptr ? (*ids)[i].get<size_t>() : i;
      const double difference = std::abs(logits[id] - want[i].get<double>());
      square_sum += difference * difference;
      worst = std::max(worst, difference);
      ++count;
    }
  }
  [[nodiscard]] double rms() const { return std::sqrt(square_sum / static_cast<double>(count)); }
};

int64_t argmax(const std::vector<float>& logits) { return std::max_element(logits.begin(), logits.end()) - logits.begin(); }

/// Feeds all tokens in pieces of `chunk` and collects the logits of the listed positions.
std::map<int32_t, std::vector<float>> logits_at(TestRunner& runner, const std::vector<int32_t>& tokens, int32_t chunk, const std::vector<int32_t>& positions) {
  std::map<int32_t, std::vector<float>> found;
  runner.start(1);
  for (const Piece& piece : cut(static_cast<int32_t>(tokens.size()), chunk)) {
    StepRun run = given_rows(1, piece.kind, std::span(tokens).subspan(static_cast<size_t>(piece.begin), static_cast<size_t>(piece.end - piece.begin)), piece.begin);
    run.want = Want::kLogits;
    for (const int32_t p : positions)
      if (p >= piece.begin && p < piece.end) run.logit_rows.push_back(p - piece.begin);
    StepPlan step;
    step.runs.push_back(run);
    StepResult result = runner.run(step);
    for (size_t i = 0; i < run.logit_rows.size(); ++i) found[piece.begin + run.logit_rows[i]] = std::move(result.runs[0].logits[i]);
    EXPECT_EQ(result.computed_rows, piece.end - piece.begin);
  }
  return found;
}

/// Distance of the logits found from those of `want`, {position: {logits, argmax, top2_gap}}; where the best token is clear, it must be the same.
Distance distance_from(const Json& want, const std::map<int32_t, std::vector<float>>& found, const Json* ids) {
  Distance distance;
  int64_t compared_argmax = 0;
  for (const auto& [position, at] : want.items()) {
    const std::vector<float>& logits = found.at(std::stoi(position));
    distance.add(logits, at["logits"], ids);
    double gap = 0;
    int64_t best = 0;
    if (at.contains("top2_gap")) {
      gap = at["top2_gap"].get<double>();
      best = at["argmax"].get<int64_t>();
    } else {
      std::vector<double> sorted = at["logits"].get<std::vector<double>>();
      best = std::max_element(sorted.begin(), sorted.end()) - sorted.begin();
      std::sort(sorted.rbegin(), sorted.rend());
      gap = sorted[0] - sorted[1];
    }
    if (gap <= 0.15) continue;
    ++compared_argmax;
    EXPECT_EQ(argmax(logits), best) << "position " << position << ", expected gap " << gap;
  }
  EXPECT_GT(compared_argmax, 1);
  return distance;
}

std::vector<int32_t> positions_of(const Json& want) {
  std::vector<int32_t> positions;
  for (const auto& [position, values] : want.items()) positions.push_back(std::stoi(position));
  std::sort(positions.begin(), positions.end());
  return positions;
}

/// The references know no quantised activations.
void check_reference(const Reference& reference, Scheme scheme, ModelDType dtype, std::initializer_list<int32_t> chunks, const Layout& layout = {}, RingDType ring = RingDType::kAuto) {
  const Json& file = expected(reference);
  const Json& want = scheme_of(file, scheme);
  const auto tokens = file["tokens"].get<std::vector<int32_t>>();
  const Json* ids = reference.has_logit_ids ? &file["logit_ids"] : nullptr;

  TestRunner runner(checkpoint(reference, scheme), {.dtype = dtype, .ring_dtype = ring, .tp_size = layout.tp_size, .pp_size = layout.pp_size, .quantize_activations = false});
  ASSERT_TRUE(runner.ready());
  for (const int32_t chunk : chunks) {
    SCOPED_TRACE(::testing::Message() << reference.name << " chunk " << chunk << ", tp " << layout.tp_size << ", pp " << layout.pp_size);
    const Distance distance = distance_from(want["positions"], logits_at(runner, tokens, chunk, positions_of(want["positions"])), ids);
    ::testing::Test::RecordProperty("worst", std::to_string(distance.worst));
    if (dtype == ModelDType::kFloat32) {
      EXPECT_LE(distance.worst, 1e-4);
    } else {
      EXPECT_LE(distance.rms(), 0.03);
      EXPECT_LE(distance.worst, 0.25);
      EXPECT_GT(distance.rms(), 1e-4) << "bf16 activations leave a trace; this looks like float32";
    }
    if (dtype != ModelDType::kFloat32 || layout.tp_size * layout.pp_size > 1) continue;

    // Recurrent state of layer 0 after all tokens.
    const Json& state = want["state_after_all_tokens"];
    auto dump = runner.by_rank[0]->dump_state(1, 0);
    ASSERT_OK(dump);
    const auto sums = state["layer0_S_sum_per_head"].get<std::vector<double>>();
    const size_t per_head = dump->state.size() / sums.size();
    for (size_t h = 0; h < sums.size(); ++h) {
      const double sum = std::accumulate(dump->state.begin() + static_cast<int64_t>(h * per_head), dump->state.begin() + static_cast<int64_t>((h + 1) * per_head), 0.0);
      EXPECT_NEAR(sum, sums[h], 1e-4 * std::max(1.0, std::abs(sums[h]))) << "head " << h;
    }
    const auto first_row = state["layer0_S_head0_v0"].get<std::vector<double>>();
    for (size_t i = 0; i < first_row.size(); ++i) EXPECT_NEAR(dump->state[i], first_row[i], 1e-5);
    const auto columns = state["layer0_conv_head"].get<std::vector<std::vector<double>>>();
    const size_t channels = dump->columns.size() / 3;
    for (size_t c = 0; c < 3; ++c)
      for (size_t i = 0; i < columns[c].size(); ++i) EXPECT_NEAR(dump->columns[c * channels + i], columns[c][i], 1e-4);
  }
}

TEST(Reference, TinyBf16WeightsInFloat32MeetTheExpectedLogitsForEveryChunk) {
  check_reference(kTiny, Scheme::kBf16, ModelDType::kFloat32, {1, 7, 64, 150});
}
TEST(Reference, TinyBlockFp8WeightsInFloat32MeetTheExpectedLogitsForEveryChunk) {
  check_reference(kTiny, Scheme::kFp8Block, ModelDType::kFloat32, {1, 7, 64, 150});
}
TEST(Reference, SecondBf16WeightsInFloat32MeetTransformersForEveryChunk) {
  check_reference(kSecond, Scheme::kBf16, ModelDType::kFloat32, {1, 7, 64, 200});
}
TEST(Reference, SecondBlockFp8WeightsInFloat32MeetTransformersForEveryChunk) {
  check_reference(kSecond, Scheme::kFp8Block, ModelDType::kFloat32, {1, 7, 64, 200});
}
TEST(Reference, TinyInBfloat16MeetsTheBf16Bar) {
  check_reference(kTiny, Scheme::kBf16, ModelDType::kBFloat16, {7, 64});
  check_reference(kTiny, Scheme::kFp8Block, ModelDType::kBFloat16, {7, 64});
  check_reference(kTiny, Scheme::kBf16, ModelDType::kBFloat16, {7, 64}, {}, RingDType::kFloat32);
}
TEST(Reference, SecondInBfloat16MeetsTheBf16Bar) {
  check_reference(kSecond, Scheme::kBf16, ModelDType::kBFloat16, {7, 64});
  check_reference(kSecond, Scheme::kFp8Block, ModelDType::kBFloat16, {7, 64});
  check_reference(kSecond, Scheme::kBf16, ModelDType::kBFloat16, {7, 64}, {}, RingDType::kFloat32);
}

/// FP8 weights that meet FP8 activations. Rounding moves the logits, and where bf16 has moved a value across a tie it moves them elsewhere: after eight layers two such
/// computations agree with each other no better than with the exact one. So what is checked is the size of the error: it must be that of transformers with activations
/// rounded in the same way (tools/reference), 0.13.
void check_quantised_activations(ops::Device& device, std::string_view candidate, bool by_request) {
  SCOPED_TRACE(candidate);
  constexpr std::string_view kOps[] = {"attn_in", "gdn_in", "mlp_in", "out_residual", "down_residual"};
  WorkerOptions options{.dtype = ModelDType::kBFloat16};
  if (by_request)
    for (const std::string_view op : kOps) options.kernels.emplace(op, candidate);
  TestRunner runner(checkpoint(kSecond, Scheme::kFp8Block), options);
  ASSERT_TRUE(runner.ready());
  for (const OpChoice& choice : runner.plan.choices)
    if (std::find(std::begin(kOps), std::end(kOps), choice.op) != std::end(kOps)) {
      EXPECT_EQ(choice.candidate, candidate) << choice.op;
    }
  // What a start would say of them, at row counts of every launch.
  const auto tested = self_test(runner.plan, runner.plan.ranks[0], backends::kernel_table(device.traits().platform), {.forced = options.kernels, .disabled = {}}, device,
                                {{1, 3, 65, 193}, {8, 9, 16, 17, 32, 33}});
  ASSERT_OK(tested);
  EXPECT_GE(tested->num_tested, 5);
  for (const SelfTestReport::Fault& fault : tested->faults) ADD_FAILURE() << fault.op << " " << fault.candidate << ": " << fault.reason;
  const auto emulation = read_json_file(quern::testing::data_path("second-reference/expected-w8a8.json"));
  ASSERT_OK(emulation);
  const Json &file = expected(kSecond), &exact = file["fp8_block"]["positions"];
  Distance emulated;
  for (const auto& [position, at] : exact.items()) {
    const auto want = at["logits"].get<std::vector<float>>();
    emulated.add(want, (*emulation)["positions"][position]["logits"], nullptr);
  }
  for (const int32_t chunk : {7, 64}) {
    SCOPED_TRACE(::testing::Message() << "chunk " << chunk);
    Distance distance;
    for (const auto& [position, logits] : logits_at(runner, file["tokens"].get<std::vector<int32_t>>(), chunk, positions_of(exact)))
      distance.add(logits, exact[std::to_string(position)]["logits"], &file["logit_ids"]);
    EXPECT_LE(distance.rms(), 1.1 * emulated.rms());
    EXPECT_GE(distance.rms(), 0.5 * emulated.rms()) << "activations cannot have been quantised";
    EXPECT_LE(distance.worst, 1.5 * emulated.worst);
    ::testing::Test::RecordProperty("rms", std::to_string(distance.rms()));
  }
}

TEST(Reference, SecondWithQuantisedActivationsErrsAsMuchAsTheirEmulation) {
  const auto device = backends::open_device(device_under_test(), {});
  ASSERT_OK(device);
  const ops::DeviceTraits& traits = (*device)->traits();
  if (!traits.fp8_matrix) GTEST_SKIP() << traits.name << " has no FP8 matrix units";
  const bool hopper = traits.architecture == 90;
  check_quantised_activations(**device, hopper ? "cuda.sm90" : "cuda.mma.e4m3", false);
  if (hopper) check_quantised_activations(**device, "cuda.mma.e4m3.emulated", true);
}

/// Prompt in pieces with the MTP layer's KV filled; the last step proposes two drafts, whose logits the references list.
void check_drafts(const Reference& reference, Scheme scheme, int32_t chunk, const Layout& layout = {}) {
  SCOPED_TRACE(::testing::Message() << reference.name << " chunk " << chunk << ", tp " << layout.tp_size << ", pp " << layout.pp_size);
  const Json& file = expected(reference);
  const Json& want = scheme_of(file, scheme)["mtp"];
  const Json* ids = reference.has_logit_ids ? &file["logit_ids"] : nullptr;
  const auto tokens = file["tokens"].get<std::vector<int32_t>>();
  TestRunner runner(checkpoint(reference, scheme), {.dtype = ModelDType::kFloat32, .tp_size = layout.tp_size, .pp_size = layout.pp_size});
  ASSERT_TRUE(runner.ready());
  runner.start(2);
  const auto last = static_cast<int32_t>(tokens.size()) - 1;  // its row is not computed: the pair (x_last, h_(last - 1)) ends the references
  RunResult final_run;
  for (const Piece& piece : cut(last, chunk)) {
    StepRun run = given_rows(2, piece.kind, std::span(tokens).subspan(static_cast<size_t>(piece.begin), static_cast<size_t>(piece.end - piece.begin)), piece.begin);
    run.want = Want::kLogits;
    run.fill_mtp = true;
    run.following_token = tokens[static_cast<size_t>(piece.end)];
    if (piece.end == last) {
      run.propose = DraftMethod::kMtp;
      run.propose_depth = 2;
    }
    StepPlan step;
    step.runs.push_back(run);
    final_run = std::move(runner.run(step).runs[0]);
  }
  ASSERT_EQ(final_run.drafts.size(), 2u);
  ASSERT_EQ(final_run.draft_logits.size(), 2u);
  Distance first, chained;
  first.add(final_run.draft_logits[0], want["logits"], ids);
  chained.add(final_run.draft_logits[1], want["chained_logits"], ids);
  EXPECT_LE(first.worst, 1e-4);
  EXPECT_LE(chained.worst, 1e-4);
  EXPECT_EQ(final_run.drafts[0], want["draft"].get<int32_t>());
}

TEST(Reference, MtpDraftsMeetTheReferencesForEveryChunk) {
  for (const int32_t chunk : {1, 64, 1000}) {
    check_drafts(kTiny, Scheme::kBf16, chunk);
    check_drafts(kTiny, Scheme::kFp8Block, chunk);
  }
  check_drafts(kSecond, Scheme::kBf16, 64);
  check_drafts(kSecond, Scheme::kFp8Block, 1000);
}

// The same on several devices: heads, columns and ids shared out evenly and not, layers in stages.

TEST(Reference, ModelsSharedOutOrInStagesMeetTheReferencesAsOneDeviceDoes) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  for (const Layout& layout : kLayouts)
    for (const Scheme scheme : {Scheme::kBf16, Scheme::kFp8Block}) {
      if (!has_devices(layout.tp_size * layout.pp_size)) continue;
      check_reference(kTiny, scheme, ModelDType::kFloat32, {7, 64}, layout);
      check_reference(kTiny, scheme, ModelDType::kBFloat16, {64}, layout);
      if (scheme == Scheme::kFp8Block || device_under_test() == "cpu") check_reference(kSecond, scheme, ModelDType::kFloat32, {64}, layout);
    }
  check_reference(kSecond, Scheme::kFp8Block, ModelDType::kBFloat16, {64}, has_devices(3) ? Layout{3, 1} : Layout{2, 1});
}

TEST(Reference, DraftsOfModelsSharedOutOrInStagesMeetTheReferences) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  for (const Layout& layout : kLayouts)
    for (const Scheme scheme : {Scheme::kBf16, Scheme::kFp8Block})
      if (has_devices(layout.tp_size * layout.pp_size)) check_drafts(kTiny, scheme, 64, layout);
  check_drafts(kSecond, Scheme::kFp8Block, 1000, has_devices(4) ? Layout{2, 2} : Layout{2, 1});
}

TEST(Reference, StagesGiveTheBitsOfOneDevice) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  const auto tokens = expected(kTiny)["tokens"].get<std::vector<int32_t>>();
  const std::vector<int32_t> positions = {0, 63, 64, 100, 149};
  for (const int32_t tp_size : {1, 2}) {
    std::map<int32_t, std::vector<float>> whole;
    for (const int32_t pp_size : {1, 2, 4}) {
      if (tp_size * pp_size > 4 || !has_devices(tp_size * pp_size)) continue;
      TestRunner runner(checkpoint(kTiny, Scheme::kFp8Block), {.tp_size = tp_size, .pp_size = pp_size});
      ASSERT_TRUE(runner.ready());
      const auto found = logits_at(runner, tokens, 64, positions);
      if (pp_size == 1) whole = found;
      else EXPECT_EQ(found, whole) << "tp " << tp_size << ", pp " << pp_size;
    }
  }
}

}  // namespace
}  // namespace quern::worker
