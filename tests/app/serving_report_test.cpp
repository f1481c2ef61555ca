#include "app/serving_report.h"

#include <cmath>

#include "app/bench_engine.h"
#include "app/random_prompts.h"
#include "app/statistics.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TEST(Statistics, AreNumpys) {
  const std::vector<double> samples = {4, 1, 3, 2};
  EXPECT_DOUBLE_EQ(mean(samples), 2.5);
  EXPECT_DOUBLE_EQ(standard_deviation(samples), std::sqrt(1.25));
  EXPECT_DOUBLE_EQ(percentile(samples, 50), 2.5);
  EXPECT_DOUBLE_EQ(percentile(samples, 99), 3.97);
  EXPECT_DOUBLE_EQ(percentile(samples, 0), 1);
  EXPECT_DOUBLE_EQ(percentile({7}, 99), 7);
  EXPECT_DOUBLE_EQ(percentile({}, 50), 0);
}

TEST(BenchTimes, HaveADecodeRateOfTheTokensAfterTheFirstEvent) {
  EXPECT_EQ((BenchTimes{.first_token = 2, .last_token = 2, .num_tokens = 4, .num_first = 4}.decode_rate()), std::nullopt);  // all at once
  EXPECT_EQ((BenchTimes{.first_token = 2, .last_token = 2, .num_tokens = 1, .num_first = 1}.decode_rate()), std::nullopt);
  EXPECT_EQ(BenchTimes{}.decode_rate(), std::nullopt);
  EXPECT_EQ((BenchTimes{.first_token = 2, .last_token = 4, .num_tokens = 9, .num_first = 1}.decode_rate()), 4.0);
  EXPECT_EQ((BenchTimes{.first_token = 2, .last_token = 4, .num_tokens = 9, .num_first = 3}.decode_rate()), 3.0);
}

TEST(RandomPrompts, AreEqualForEqualSeedsAndStayInTheVocabulary) {
  EXPECT_EQ(random_prompt(5, 100, 320), random_prompt(5, 100, 320));
  EXPECT_NE(random_prompt(5, 100, 320), random_prompt(6, 100, 320));
  EXPECT_THAT(random_prompt(1, 1000, 320), Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(320))));
  EXPECT_THAT(random_prompt(1, 1000, 248320), Each(::testing::Lt(10000)));
}

TEST(RandomPrompts, HaveLengthsInTheirRange) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    EXPECT_EQ(random_length(seed, 128, 0), 128);
    const int32_t length = random_length(seed, 100, 0.25);
    EXPECT_GE(length, 75);
    EXPECT_LE(length, 125);
    EXPECT_GE(random_length(seed, 1, 0.9), 1);
  }
}

ServingRun sample_run() {
  ServingRun run{.duration = 2.0, .request_rate = HUGE_VAL, .max_concurrency = 4};
  run.requests.push_back(
      {.succeeded = true, .start = 0, .ttft = 0.1, .latency = 0.5, .itls = {0.2, 0.2}, .input_len = 10, .output_len = 3});
  run.requests.push_back(
      {.succeeded = true, .start = 0.5, .ttft = 0.3, .latency = 1.1, .itls = {0.4, 0.4}, .input_len = 20, .output_len = 5});
  run.requests.push_back({.succeeded = false, .error = "HTTP 503"});
  return run;
}

TEST(ServingReport, PrintsTheLinesThatOtherToolsParse) {
  const std::string text = serving_report_text(sample_run(), {.metrics = {"ttft", "tpot", "itl", "e2el"}, .percentiles = {50, 99}});
  const std::vector<std::string> in_order = {
      "============ Serving Benchmark Result ============\n",  "Successful requests:                     2         \n",
      "Failed requests:                         1         \n", "Maximum request concurrency:             4         \n",
      "Benchmark duration (s):                  2.00      \n", "Total input tokens:                      30        \n",
      "Total generated tokens:                  8         \n", "Request throughput (req/s):              1.00      \n",
      "Output token throughput (tok/s):         4.00      \n", "Peak output token throughput (tok/s):    ",
      "Peak concurrent requests:                2.00      \n", "Total token throughput (tok/s):          19.00     \n",
      "---------------Time to First Token----------------\n",  "Mean TTFT (ms):                          200.00    \n",
      "Median TTFT (ms):                        200.00    \n", "P50 TTFT (ms):",
      "P99 TTFT (ms):                           298.00    \n", "-----Time per Output Token (excl. 1st token)------\n",
      "Mean TPOT (ms):                          200.00    \n", "---------------Inter-token Latency----------------\n",
      "Mean ITL (ms):                           300.00    \n", "----------------End-to-end Latency----------------\n",
      "Mean E2EL (ms):                          800.00    \n", "==================================================",
  };
  size_t at = 0;
  for (const std::string& line : in_order) {
    const size_t found = text.find(line, at);
    ASSERT_NE(found, std::string::npos) << line << "\nin\n" << text;
    at = found;
  }
  EXPECT_EQ(text.find("Request rate"), std::string::npos) << "an infinite rate is not configured";
}

TEST(ServingReport, HasTheKeysThatOtherToolsRead) {
  const Json result = serving_report_json(sample_run(), {}, true);
  for (const char* key : {"duration",
                          "completed",
                          "failed",
                          "total_input_tokens",
                          "total_output_tokens",
                          "request_throughput",
                          "request_goodput",
                          "output_throughput",
                          "total_token_throughput",
                          "input_lens",
                          "output_lens",
                          "ttfts",
                          "itls",
                          "latencies",
                          "start_times",
                          "errors",
                          "max_output_tokens_per_s",
                          "max_concurrent_requests",
                          "mean_ttft_ms",
                          "median_tpot_ms",
                          "std_itl_ms",
                          "p99_ttft_ms"}) {
    EXPECT_TRUE(result.contains(key)) << key;
  }
  EXPECT_EQ(result["errors"][2], "HTTP 503");
  EXPECT_FALSE(serving_report_json(sample_run(), {}, false).contains("ttfts"));
}

}  // namespace
}  // namespace quern::app
