#include "app/serving_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "app/statistics.h"

namespace quern::app {
namespace {

constexpr int kWidth = 50;

struct Metric {
  std::string_view key, name, title;
};
constexpr Metric kMetrics[] = {
    {"ttft", "TTFT", "Time to First Token"},
    {"tpot", "TPOT", "Time per Output Token (excl. 1st token)"},
    {"itl", "ITL", "Inter-token Latency"},
    {"e2el", "E2EL", "End-to-end Latency"},
};

struct Totals {
  int64_t completed = 0, failed = 0, input_tokens = 0, output_tokens = 0;
  double peak_output_tokens_per_s = 0;
  int64_t peak_concurrent_requests = 0;
};

Totals totals_of(const ServingRun& run) {
  Totals totals;
  for (const ServedRequest& request : run.requests) {
    if (!request.succeeded) {
      ++totals.failed;
      continue;
    }
    ++totals.completed;
    totals.input_tokens += request.input_len;
    totals.output_tokens += request.output_len;
  }
  const SecondsOfRun seconds = seconds_of_run(run);
  totals.peak_output_tokens_per_s = *std::max_element(seconds.tokens.begin(), seconds.tokens.end());
  totals.peak_concurrent_requests = *std::max_element(seconds.requests.begin(), seconds.requests.end());
  return totals;
}

/// "99", "99.9"
std::string percent_name(double percent) { return fmt::format("{:g}", percent); }

bool is_selected(const Metric& metric, const ReportOptions& options) {
  return std::find(options.metrics.begin(), options.metrics.end(), metric.key) != options.metrics.end();
}

}  // namespace

std::vector<double> samples_ms(const ServingRun& run, std::string_view metric) {
  std::vector<double> samples;
  for (const ServedRequest& request : run.requests) {
    if (!request.succeeded) continue;
    if (metric == "ttft") samples.push_back(request.ttft * 1e3);
    if (metric == "e2el") samples.push_back(request.latency * 1e3);
    if (metric == "tpot" && request.output_len > 1)
      samples.push_back((request.latency - request.ttft) * 1e3 / static_cast<double>(request.output_len - 1));
    if (metric == "itl")
      std::transform(request.itls.begin(), request.itls.end(), std::back_inserter(samples), [](double s) { return s * 1e3; });
  }
  return samples;
}

SecondsOfRun seconds_of_run(const ServingRun& run) {
  const auto num_seconds = static_cast<size_t>(std::ceil(run.duration)) + 1;
  SecondsOfRun seconds{std::vector<double>(num_seconds, 0), std::vector<int64_t>(num_seconds, 0)};
  const auto second_of = [&](double time) { return std::min(static_cast<size_t>(std::max(time, 0.0)), num_seconds - 1); };
  for (const ServedRequest& request : run.requests) {
    if (!request.succeeded) continue;
    double at = request.start + request.ttft;
    const double per_event = static_cast<double>(request.output_len) / static_cast<double>(request.itls.size() + 1);
    seconds.tokens[second_of(at)] += per_event;
    for (const double itl : request.itls) seconds.tokens[second_of(at += itl)] += per_event;
    for (size_t second = second_of(request.start); second <= second_of(request.start + request.latency); ++second) ++seconds.requests[second];
  }
  return seconds;
}

std::string serving_report_text(const ServingRun& run, const ReportOptions& options) {
  const Totals totals = totals_of(run);
  std::string text = fmt::format("{:=^{}}\n", " Serving Benchmark Result ", kWidth);
  auto out = std::back_inserter(text);
  const auto count = [&](std::string_view name, int64_t value) { fmt::format_to(out, "{:<40} {:<10}\n", name, value); };
  const auto number = [&](std::string_view name, double value) { fmt::format_to(out, "{:<40} {:<10.2f}\n", name, value); };
  count("Successful requests:", totals.completed);
  count("Failed requests:", totals.failed);
  if (run.max_concurrency) count("Maximum request concurrency:", *run.max_concurrency);
  if (std::isfinite(run.request_rate)) number("Request rate configured (RPS):", run.request_rate);
  number("Benchmark duration (s):", run.duration);
  count("Total input tokens:", totals.input_tokens);
  count("Total generated tokens:", totals.output_tokens);
  number("Request throughput (req/s):", static_cast<double>(totals.completed) / run.duration);
  number("Output token throughput (tok/s):", static_cast<double>(totals.output_tokens) / run.duration);
  number("Peak output token throughput (tok/s):", totals.peak_output_tokens_per_s);
  number("Peak concurrent requests:", static_cast<double>(totals.peak_concurrent_requests));
  number("Total token throughput (tok/s):", static_cast<double>(totals.input_tokens + totals.output_tokens) / run.duration);
  for (const Metric& metric : kMetrics) {
    if (!is_selected(metric, options)) continue;
    const std::vector<double> samples = samples_ms(run, metric.key);
    fmt::format_to(out, "{:-^{}}\n", metric.title, kWidth);
    number(fmt::format("Mean {} (ms):", metric.name), mean(samples));
    number(fmt::format("Median {} (ms):", metric.name), percentile(samples, 50));
    for (const double percent : options.percentiles)
      number(fmt::format("P{} {} (ms):", percent_name(percent), metric.name), percentile(samples, percent));
  }
  fmt::format_to(out, "{:=^{}}", "", kWidth);
  return text;
}

Json serving_report_json(const ServingRun& run, const ReportOptions& options, bool detailed) {
  const Totals totals = totals_of(run);
  Json result{
      {"duration", run.duration},
      {"completed", totals.completed},
      {"failed", totals.failed},
      {"total_input_tokens", totals.input_tokens},
      {"total_output_tokens", totals.output_tokens},
      {"request_throughput", static_cast<double>(totals.completed) / run.duration},
      {"request_goodput", nullptr},
      {"output_throughput", static_cast<double>(totals.output_tokens) / run.duration},
      {"total_token_throughput", static_cast<double>(totals.input_tokens + totals.output_tokens) / run.duration},
      {"max_output_tokens_per_s", totals.peak_output_tokens_per_s},
      {"max_concurrent_requests", totals.peak_concurrent_requests},
  };
  if (detailed) {
    for (const char* key : {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors"})
      result[key] = Json::array();
    for (const ServedRequest& request : run.requests) {
      result["input_lens"].push_back(request.input_len);
      result["output_lens"].push_back(request.output_len);
      result["ttfts"].push_back(request.ttft);
      result["itls"].push_back(request.itls);
      result["latencies"].push_back(request.latency);
      result["start_times"].push_back(request.start);
      result["errors"].push_back(request.error);
    }
  }
  for (const Metric& metric : kMetrics) {
    if (!is_selected(metric, options)) continue;
    const std::vector<double> samples = samples_ms(run, metric.key);
    result[fmt::format("mean_{}_ms", metric.key)] = mean(samples);
    result[fmt::format("median_{}_ms", metric.key)] = percentile(samples, 50);
    result[fmt::format("std_{}_ms", metric.key)] = standard_deviation(samples);
    for (const double percent : options.percentiles)
      result[fmt::format("p{}_{}_ms", percent_name(percent), metric.key)] = percentile(samples, percent);
  }
  return result;
}

}  // namespace quern::app
