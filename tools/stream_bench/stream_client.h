#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "token_times.h"

namespace quern::tools {

struct StreamLoad {
  uint16_t port = 0;
  int32_t num_streams = 1000;
  int32_t num_tokens = 300;
  double streams_per_second = 250;  // how fast they begin
};

struct StreamLatencies {
  std::vector<double> first_token_ms;  // per stream: from sending the request to its first token
  std::vector<double> token_ms;        // per token: from the engine to the client
  std::vector<double> steady_token_ms; // of these, while all streams ran
  int32_t num_complete = 0;            // streams that had all their tokens
};

/// Opens the streams on one thread and reads all of them to their end. `times`: the engine's.
Result<StreamLatencies> read_streams(const StreamLoad& load, const TokenTimes& times);

}  // namespace quern::tools
