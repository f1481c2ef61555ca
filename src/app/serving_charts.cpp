#include "app/serving_charts.h"

#include <algorithm>
#include <cmath>

#include "app/statistics.h"

namespace quern::app {
namespace {

/// Median and 99th percentile of one metric over what was changed.
Chart latency_chart(std::string title, std::string_view metric, std::span<const SweptRun> runs, const ChartAxis& x) {
  Chart chart{.title = std::move(title), .x = x, .y = {"latency", "ms"}, .series = {{"median", {}}, {"99th percentile", {}}}};
  for (const SweptRun& swept : runs) {
    const std::vector<double> samples = samples_ms(swept.run, metric);
    if (samples.empty()) continue;
    chart.series[0].points.emplace_back(swept.value, percentile(samples, 50));
    chart.series[1].points.emplace_back(swept.value, percentile(samples, 99));
  }
  return chart;
}

}  // namespace

std::vector<Chart> charts_of_run(const ServingRun& run) {
  ChartSeries tokens{"output tokens", {}}, requests{"requests under way", {}};
  const SecondsOfRun seconds = seconds_of_run(run);
  for (size_t i = 0; i < seconds.tokens.size(); ++i) {
    tokens.points.emplace_back(static_cast<double>(i), seconds.tokens[i]);
    requests.points.emplace_back(static_cast<double>(i), static_cast<double>(seconds.requests[i]));
  }
  return {
      {.title = "Output over time", .x = {"time", "s"}, .y = {"output", "tokens/s"}, .series = {tokens}},
      {.title = "Requests under way within each second", .x = {"time", "s"}, .y = {"requests", ""}, .series = {requests}},
      {.title = "Latency by percentile",
       .x = {"share of the samples", "%"},
       .y = {"latency", "ms", true},
       .series = {percentile_curve("time to first token", samples_ms(run, "ttft")),
                  percentile_curve("time per output token", samples_ms(run, "tpot")),
                  percentile_curve("inter-token latency", samples_ms(run, "itl"))}},
  };
}

std::vector<Chart> charts_of_sweep(std::span<const SweptRun> runs, SweptQuantity swept) {
  const ChartAxis x =
      swept == SweptQuantity::kConcurrency ? ChartAxis{"requests under way", "", true} : ChartAxis{"request rate", "requests/s", true};
  Chart throughput{.title = "Throughput", .x = x, .y = {"throughput", "tokens/s"}, .series = {{"output", {}}, {"input and output", {}}}};
  for (const SweptRun& one : runs) {
    int64_t input = 0, output = 0;
    for (const ServedRequest& request : one.run.requests) {
      if (!request.succeeded) continue;
      input += request.input_len;
      output += request.output_len;
    }
    throughput.series[0].points.emplace_back(one.value, static_cast<double>(output) / one.run.duration);
    throughput.series[1].points.emplace_back(one.value, static_cast<double>(input + output) / one.run.duration);
  }
  return {throughput, latency_chart("Time to first token", "ttft", runs, x), latency_chart("Time per output token", "tpot", runs, x)};
}

}  // namespace quern::app
