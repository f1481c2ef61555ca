// `quern quantize` and `quern eval` on the shipped model: what FP8 weights and an FP8 cache cost on text (docs/quality.md has the whole table).

#include <iostream>

#include "app/program.h"
#include "base/file.h"
#include "base/json.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

namespace fs = std::filesystem;
using quern::testing::data_path;
using quern::testing::ProgramResult;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;

fs::path model_dir() { return fs::path(QUERN_SOURCE_DIR) / "models" / "quern-demo"; }

/// The shipped model's checkpoints, made once for all tests.
class QuantizedModel : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!fs::exists(model_dir() / "model.safetensors")) return;
    folder_ = new TemporaryFolder();
    const auto text = read_file(data_path("demo/heldout.txt"));
    ASSERT_OK(text);
    constexpr size_t kEvaluated = 9'000, kCalibrated = 24'000;  // bytes: about 2,600 and 6,900 tokens, from its two ends
    ASSERT_OK(write_file(file("eval.txt"), text->substr(0, text->find('\n', kEvaluated))));
    ASSERT_OK(write_file(file("calibration.txt"), text->substr(text->find('\n', text->size() - kCalibrated))));
    bf16_ = perplexity(model_dir());
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  void SetUp() override {
    if (folder_ == nullptr) GTEST_SKIP() << "this checkout has no weights of quern-demo";
  }

  static fs::path file(const char* name) { return folder_->path() / name; }

  static double perplexity(const fs::path& model, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments{"eval", model.string(), "--text", file("eval.txt").string(), "--max-model-len", "1024", "--json", "--log-level", "warning"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_quern(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.log;
    const auto json = parse_json(result.output, "eval");
    EXPECT_OK(json);
    return json ? (*json)["perplexity"].get<double>() : 0;
  }

  static ProgramResult quantize(const fs::path& to, std::vector<std::string> more) {
    std::vector<std::string> arguments{"quantize", model_dir().string(), to.string(), "--log-level", "warning"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_quern(arguments);
  }

  static fs::path quantized(const std::string& scheme, bool calibrated) {
    const fs::path to = folder_->path() / scheme;
    std::vector<std::string> more{"--scheme", scheme};
    if (calibrated) more.insert(more.end(), {"--calibration-text", file("calibration.txt").string()});
    const ProgramResult result = quantize(to, more);
    EXPECT_EQ(result.exit_code, 0) << result.log;
    EXPECT_THAT(result.output, HasSubstr("weights quantized"));
    return to;
  }

  static void expect_ratio(const char* what, double perplexity, double bar) {
    std::cout << fmt::format("{}: {:.4f}, bf16 {:.4f}, ratio {:.5f}\n", what, perplexity, bf16_, perplexity / bf16_);
    EXPECT_LT(perplexity / bf16_, 1 + bar) << what;
    EXPECT_GT(perplexity / bf16_, 1 - bar) << what;
    EXPECT_NE(perplexity, bf16_) << what << " changed nothing";
  }

  static inline TemporaryFolder* folder_ = nullptr;
  static inline double bf16_ = 0;
};

TEST_F(QuantizedModel, BlockFp8IsWithinOnePercent) { expect_ratio("block-fp8", perplexity(quantized("block-fp8", false)), 0.01); }

TEST_F(QuantizedModel, ChannelFp8IsWithinOnePercent) { expect_ratio("channel-fp8", perplexity(quantized("channel-fp8", false)), 0.01); }

TEST_F(QuantizedModel, StaticFp8WithItsFp8CacheIsWithinTwoPercent) {
  const fs::path model = quantized("static-fp8", true);
  expect_ratio("static-fp8, FP8 cache", perplexity(model), 0.02);
  expect_ratio("static-fp8, bf16 cache", perplexity(model, {"--kv-cache-dtype", "bfloat16"}), 0.02);
}

TEST_F(QuantizedModel, AnFp8CacheIsWithinHalfAPercent) {
  expect_ratio("FP8 cache, scales 1", perplexity(model_dir(), {"--kv-cache-dtype", "fp8"}), 0.005);
  const fs::path model = folder_->path() / "kv-scales";
  ASSERT_EQ(quantize(model, {"--scheme", "block-fp8", "--calibration-text", file("calibration.txt").string()}).exit_code, 0);
  const double with_bf16 = perplexity(model), with_fp8 = perplexity(model, {"--kv-cache-dtype", "fp8"});
  std::cout << fmt::format("FP8 cache with calibrated scales: ratio {:.5f}\n", with_fp8 / with_bf16);
  EXPECT_LT(with_fp8 / with_bf16, 1.005);
  EXPECT_GT(with_fp8 / with_bf16, 0.995);
  EXPECT_NE(with_fp8, with_bf16);
}

TEST_F(QuantizedModel, TheCommandLineSaysWhatIsWrong) {
  const fs::path to = folder_->path() / "never";
  const auto expect = [&](std::vector<std::string> arguments, int exit_code, const char* message) {
    const ProgramResult result = quantize(to, std::move(arguments));
    EXPECT_EQ(result.exit_code, exit_code) << result.log;
    EXPECT_THAT(result.log, HasSubstr(message));
    EXPECT_FALSE(fs::exists(to));
  };
  expect({}, 2, "--scheme is missing");
  expect({"--scheme", "int4"}, 2, "'int4' is not one of block-fp8, static-fp8, channel-fp8");
  expect({"--scheme", "static-fp8"}, 2, "needs --calibration-text");
  expect({"--scheme", "static-fp8", "--calibration-text", file("none.txt").string()}, 1, "none.txt");
  ASSERT_OK(write_file(file("empty.txt"), ""));
  expect({"--scheme", "static-fp8", "--calibration-text", file("empty.txt").string()}, 1, "too short");
  const ProgramResult onto_itself = run_quern({"quantize", model_dir().string(), model_dir().string(), "--scheme", "block-fp8"});
  EXPECT_EQ(onto_itself.exit_code, 1);
  EXPECT_THAT(onto_itself.log, HasSubstr("onto itself"));
  const ProgramResult missing = run_quern({"quantize", model_dir().string(), "--scheme", "block-fp8"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.log, HasSubstr("DST is missing"));
  const ProgramResult nowhere = run_quern({"quantize", "/no/such/model", to.string(), "--scheme", "block-fp8"});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.log, HasSubstr("there is no model directory"));
}

}  // namespace
}  // namespace quern::app
