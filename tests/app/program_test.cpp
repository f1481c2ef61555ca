#include "app/program.h"

#include <cmath>
#include <fstream>

#include "base/file.h"
#include "base/json.h"
#include "support/reference_checkpoint.h"
#include "support/test_support.h"

// The built program, from its command line to its output.

namespace quern::app {
namespace {

using quern::testing::data_path;
using quern::testing::ProgramResult;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The tiny reference checkpoint, its tokens in a file, and what is expected of it.
class TinyReference : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto written = quern::testing::tiny_reference(quern::testing::Scheme::kBf16, folder_.path() / "tiny");
    ASSERT_OK(written);
    model_ = written->string();
    const Result<Json> document = read_json_file(data_path("tiny-reference/expected.json"));
    ASSERT_OK(document);
    tokens_ = document->at("tokens").get<std::vector<int32_t>>();
    expected_ = document->at("bf16");
    tokens_file_ = (folder_.path() / "tokens.txt").string();
    std::ofstream file(tokens_file_);
    for (const int32_t token : tokens_) file << token << "\n";
  }

  /// `eval` with --json and float32 activations; its exit code must be 0.
  Json eval(std::vector<std::string> more) {
    std::vector<std::string> arguments = {"eval", model_, "--tokens", tokens_file_, "--dtype", "float32", "--threads", "2", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_quern(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.log;
    Result<Json> document = parse_json(result.output, "stdout");
    EXPECT_OK(document);
    return document ? *document : Json();
  }

  static double largest_difference(const Json& a, const Json& b) {
    double largest = a.size() == b.size() ? 0 : HUGE_VAL;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      largest = std::max(largest, std::abs(a[i].get<double>() - b[i].get<double>()));
    return largest;
  }

  TemporaryFolder folder_;
  std::string model_, tokens_file_;
  std::vector<int32_t> tokens_;
  Json expected_;
};

TEST_F(TinyReference, EvalPrintsTheExpectedLogitsForEveryChunk) {
  std::string positions;
  for (const auto& [position, values] : expected_["positions"].items()) positions += (positions.empty() ? "" : ",") + position;
  for (const std::string chunk : {"1", "7", "64", "150"}) {
    const Json result = eval({"--logits-at", positions, "--chunk", chunk});
    ASSERT_EQ(result["logits"].size(), expected_["positions"].size()) << chunk;
    for (const Json& at : result["logits"]) {
      const std::string position = std::to_string(at["position"].get<int>());
      EXPECT_LE(largest_difference(at["logits"], expected_["positions"][position]["logits"]), 1e-4)
          << "chunk " << chunk << ", position " << position;
    }
  }
}

TEST_F(TinyReference, EvalPrintsTheExpectedDrafts) {
  const Json result = eval({"--logits-at", "-1", "--mtp"});
  ASSERT_EQ(result["drafts"].size(), 2u);
  EXPECT_EQ(result["logits"][0]["position"], tokens_.size() - 1);
  EXPECT_EQ(result["drafts"][0]["draft"], expected_["mtp"]["draft"]);
  EXPECT_LE(largest_difference(result["drafts"][0]["logits"], expected_["mtp"]["logits"]), 1e-4);
  EXPECT_LE(largest_difference(result["drafts"][1]["logits"], expected_["mtp"]["chained_logits"]), 1e-4);
}

TEST_F(TinyReference, EvalPrintsThePerplexityThatItsLogitsGive) {
  std::string all;
  for (size_t i = 0; i + 1 < tokens_.size(); ++i) all += fmt::format("{}{}", i == 0 ? "" : ",", i);
  const Json logits = eval({"--logits-at", all});
  double nll = 0;
  for (size_t i = 0; i + 1 < tokens_.size(); ++i) {
    const std::vector<double> row = logits["logits"][i]["logits"].get<std::vector<double>>();
    double sum = 0;
    for (const double logit : row) sum += std::exp(logit);
    nll += std::log(sum) - row[static_cast<size_t>(tokens_[i + 1])];
  }
  const Json result = eval({});
  EXPECT_EQ(result["tokens"], tokens_.size() - 1);
  EXPECT_NEAR(result["nll"].get<double>(), nll, 1e-3);
  EXPECT_NEAR(result["perplexity"].get<double>(), std::exp(nll / static_cast<double>(tokens_.size() - 1)), 1e-3);
}

TEST_F(TinyReference, EvalRefusesPositionsAndTokensThatAreNotThere) {
  const ProgramResult position = run_quern({"eval", model_, "--tokens", tokens_file_, "--logits-at", "150"});
  EXPECT_EQ(position.exit_code, 1);
  EXPECT_THAT(position.log, HasSubstr("outside the prompt of 150 tokens"));
  std::ofstream(tokens_file_) << "1 2 320";
  const ProgramResult token = run_quern({"eval", model_, "--tokens", tokens_file_, "--logits-at", "0"});
  EXPECT_EQ(token.exit_code, 1);
  EXPECT_THAT(token.log, HasSubstr("token 320 at position 2"));
}

TEST_F(TinyReference, BenchLatencyWritesVllmsKeys) {
  const std::string file = (folder_.path() / "latency.json").string();
  const ProgramResult result = run_quern({"bench", "latency", model_, "--input-len", "20", "--output-len", "120", "--batch-size", "2",
                                          "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", file, "--threads", "2", "--plot",
                                          (folder_.path() / "latency.svg").string()});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  EXPECT_THAT(result.output, HasSubstr("Avg latency: "));
  EXPECT_THAT(result.output, HasSubstr("99% percentile latency: "));
  const Result<Json> document = read_json_file(file);
  ASSERT_OK(document);
  EXPECT_EQ(document->at("latencies").size(), 3u);
  EXPECT_GT(document->at("avg_latency").get<double>(), 0);
  EXPECT_THAT(result.output, HasSubstr("while all of it decodes: "));
  // Long enough for both sequences to decode at once whichever is begun late; the phase is part of a batch's time.
  EXPECT_GT(document->at("decode_phase_tokens_per_second").get<double>(), 2 / document->at("avg_latency").get<double>());
  EXPECT_EQ(document->at("percentiles").size(), 6u);
  EXPECT_EQ(document->at("charts")[1]["series"][0]["points"].size(), 3u);
  EXPECT_THAT(read_file(folder_.path() / "latency.svg").value(), HasSubstr("</svg>"));
}

TEST_F(TinyReference, BenchThroughputCountsEveryToken) {
  const std::string file = (folder_.path() / "throughput.json").string();
  const ProgramResult result = run_quern({"bench", "throughput", model_, "--input-len", "20", "--output-len", "5", "--num-prompts", "12",
                                          "--max-num-seqs", "4", "--output-json", file, "--threads", "2", "--plot",
                                          (folder_.path() / "throughput.svg").string()});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  EXPECT_THAT(result.output, HasSubstr("Total num output tokens:  60"));
  const Result<Json> document = read_json_file(file);
  ASSERT_OK(document);
  EXPECT_EQ(document->at("num_requests"), 12);
  EXPECT_EQ(document->at("total_num_tokens"), 12 * 25);
  EXPECT_EQ(document->at("charts")[0]["series"][1]["points"].size(), 13u) << "from nothing to twelve requests";
  EXPECT_THAT(read_file(folder_.path() / "throughput.svg").value(), HasSubstr("</svg>"));
}

TEST_F(TinyReference, KernelsTellsOfEveryCandidate) {
  const ProgramResult result = run_quern({"kernels", model_, "--device", "cpu", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  const Result<Json> rows = parse_json(result.output, "stdout");
  ASSERT_OK(rows);
  bool plain_attention = false;
  for (const Json& row : *rows) {
    for (const char* key : {"platform", "op", "candidate", "accepted", "reason"}) ASSERT_TRUE(row.contains(key)) << row.dump();
    EXPECT_TRUE(row["accepted"].get<bool>() || !row["reason"].get<std::string>().empty()) << row.dump();
    plain_attention |= row["op"] == "attention" && row["candidate"] == "cpu.plain" && row["accepted"] == true;
  }
  EXPECT_TRUE(plain_attention);
}

/// Programs started meanwhile see a processor with fewer instructions.
class HiddenInstructions {
 public:
  explicit HiddenInstructions(const char* isa) { setenv("QUERN_CPU_ISA", isa, 1); }
  ~HiddenInstructions() { unsetenv("QUERN_CPU_ISA"); }
};

TEST_F(TinyReference, RunsOnAMachineWithoutVectorInstructionsAndSaysWhy) {
  const double nll = eval({})["nll"].get<double>();
  for (const std::string isa : {"baseline", "avx2", "avx512"}) {
    const HiddenInstructions hidden(isa.c_str());
    const ProgramResult kernels = run_quern({"kernels", model_, "--device", "cpu", "--json"});
    ASSERT_EQ(kernels.exit_code, 0) << kernels.log;
    const Result<Json> rows = parse_json(kernels.output, "stdout");
    ASSERT_OK(rows);
    int num_refusals = 0;
    for (const Json& row : *rows) {
      const std::string candidate = row["candidate"];
      if (candidate == "cpu.plain") {
        EXPECT_EQ(row["accepted"], true) << row.dump();
      }
      const bool runs_with_avx512 = candidate == "cpu.avx2" || candidate == "cpu.avx512";
      if (candidate == "cpu.plain" || !candidate.starts_with("cpu.") || (isa == "avx512" && runs_with_avx512) || (isa == "avx2" && candidate == "cpu.avx2")) continue;
      EXPECT_EQ(row["accepted"], false) << row.dump();
      EXPECT_THAT(row["reason"].get<std::string>(), HasSubstr("QUERN_CPU_ISA")) << row.dump();
      ++num_refusals;
    }
    EXPECT_GT(num_refusals, 5);
    EXPECT_NEAR(eval({})["nll"].get<double>(), nll, 1e-3 * nll);
    const ProgramResult forced = run_quern({"eval", model_, "--tokens", tokens_file_, "--device", "cpu", "--kernel", isa == "avx512" ? "mlp_in=cpu.avx512_bf16" : "attention=cpu.avx512"});
    EXPECT_EQ(forced.exit_code, 1);
    EXPECT_THAT(forced.log, HasSubstr("QUERN_CPU_ISA"));
  }
}

/// A directory with the config.json of the 27B model in block FP8 and nothing else.
class Config27B : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = folder_.path() / "Qwen3.6-27B-FP8";
    std::filesystem::create_directory(model_);
    std::filesystem::copy_file(data_path("qwen3.6-27b/config.fp8.json"), model_ / "config.json");
  }
  Json plan(const std::string& device, int exit_code) const {
    const ProgramResult result = run_quern({"plan", model_.string(), "--device", device, "--json"});
    EXPECT_EQ(result.exit_code, exit_code) << result.log << result.output;
    Result<Json> document = parse_json(result.output, "stdout");
    EXPECT_OK(document);
    return document ? *document : Json();
  }
  TemporaryFolder folder_;
  std::filesystem::path model_;
};

TEST_F(Config27B, PlanFitsACardThatIsLargeEnough) {
  const Json plan = this->plan("h200", 0);
  EXPECT_EQ(plan["fits"], true);
  EXPECT_NEAR(plan["memory"]["weights_bytes"].get<double>(), 30e9, 2e9);
  EXPECT_GT(plan["limits"]["kv_tokens"].get<int64_t>(), 100'000);
  EXPECT_GT(plan["expected_decode_tokens_per_second"].get<double>(), 100);
}

TEST_F(Config27B, PlanExitsWithThreeAndSaysWhatIsMissingWhenItDoesNotFit) {
  const Json plan = this->plan("b60", 3);
  EXPECT_EQ(plan["fits"], false);
  EXPECT_THAT(plan["verdict"].get<std::string>(), ::testing::Not(IsEmpty()));
}

TEST(Program, TellsUsageErrorsFromFailures) {
  EXPECT_EQ(run_quern({}).exit_code, 2);
  EXPECT_EQ(run_quern({"eval"}).exit_code, 2);
  EXPECT_EQ(run_quern({"plan", "x", "--frobnicate"}).exit_code, 2);
  const ProgramResult missing = run_quern({"plan", "/nowhere/at/all"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.log, HasSubstr("there is no model directory /nowhere/at/all"));
  EXPECT_THAT(missing.output, IsEmpty());
  const ProgramResult version = run_quern({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.output, HasSubstr("quern 0."));
}

TEST(Program, DoctorDescribesMachineAndBuild) {
  const ProgramResult result = run_quern({"doctor", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.log;
  const Result<Json> found = parse_json(result.output, "stdout");
  ASSERT_OK(found);
  EXPECT_GT(found->at("cpu").at("cores").get<int>(), 0);
  EXPECT_GT(found->at("memory").at("total_bytes").get<uint64_t>(), 0u);
  EXPECT_FALSE(found->at("devices").empty());
  EXPECT_FALSE(found->at("libraries").empty());
  EXPECT_THAT(run_quern({"doctor"}).output, HasSubstr("cpu "));
}

}  // namespace
}  // namespace quern::app
