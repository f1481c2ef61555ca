#pragma once

#include <span>
#include <string>
#include <vector>

#include "app/chart.h"
#include "app/serving_report.h"

// What a serving benchmark measured, as diagrams.

namespace quern::app {

/// What a sweep changes from run to run.
enum class SweptQuantity : uint8_t { kConcurrency, kRequestRate };

struct SweptRun {
  double value = 0;  // requests under way, or requests per second
  ServingRun run;
};

/// One run: output tokens over time, latencies by percentile.
std::vector<Chart> charts_of_run(const ServingRun& run);
/// Several: throughput, time to first token and time per output token over what was changed.
std::vector<Chart> charts_of_sweep(std::span<const SweptRun> runs, SweptQuantity swept);

}  // namespace quern::app
