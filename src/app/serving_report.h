#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

// What a serving benchmark measured, in the lines and JSON keys of vLLM's `bench serve`.

namespace quern::app {

/// One request as the client saw it; seconds, `start` since the benchmark began.
struct ServedRequest {
  bool succeeded = false;
  std::string error;
  double start = 0, ttft = 0, latency = 0;  // latency: to the last token
  std::vector<double> itls;                 // between consecutive events with text
  int64_t input_len = 0, output_len = 0;
};

struct ServingRun {
  double duration = 0;
  double request_rate = 0;  // infinite: all at once
  std::optional<int64_t> max_concurrency;
  std::vector<ServedRequest> requests;
};

struct ReportOptions {
  std::vector<std::string> metrics = {"ttft", "tpot", "itl"};  // also "e2el"
  std::vector<double> percentiles = {99};
};

/// Samples of one metric (ttft, tpot, itl, e2el) over all successful requests, in milliseconds.
std::vector<double> samples_ms(const ServingRun& run, std::string_view metric);

/// Output tokens (those of a request shared out evenly among its events), and requests under way, in each second of the run.
struct SecondsOfRun {
  std::vector<double> tokens;
  std::vector<int64_t> requests;
};
SecondsOfRun seconds_of_run(const ServingRun& run);

/// The block between "Serving Benchmark Result" and the last line of equals signs.
std::string serving_report_text(const ServingRun& run, const ReportOptions& options);
/// The same numbers; with `detailed` also the values of every request.
Json serving_report_json(const ServingRun& run, const ReportOptions& options, bool detailed);

}  // namespace quern::app
