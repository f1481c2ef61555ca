#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/http_client.h"
#include "app/serving_report.h"

namespace quern::app {

enum class ServeBackend : uint8_t { kCompletions, kChat };

/// A body to post and how long its prompt is by our count; the server's usage replaces it.
struct PlannedRequest {
  std::string body;
  int64_t input_len = 0;
};

struct LoadOptions {
  ServeBackend backend = ServeBackend::kCompletions;
  std::string endpoint = "/v1/completions";
  std::vector<std::string> headers;
  double request_rate = 0;  // per second, exponential gaps; infinite: all at once
  std::optional<int64_t> max_concurrency;
  uint64_t seed = 0;  // of the gaps
};

/// Sends all requests as scheduled and reads their streams to the end, on the calling thread. A failed request is part of the result.
ServingRun generate_load(const HttpAddress& address, const std::vector<PlannedRequest>& requests, const LoadOptions& options);

}  // namespace quern::app
