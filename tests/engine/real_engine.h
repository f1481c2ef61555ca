#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "support/test_support.h"
#include "worker/plan.h"
#include "worker/start.h"

// Engines over the real worker and the CPU's kernels, and texts that can be compared bit by bit.

namespace quern::engine::testing {

struct RealEngineSetup {
  std::filesystem::path model_dir;
  EngineOptions engine;
  worker::WorkerOptions worker;
  int64_t num_blocks = 0;  // KV blocks; 0: as the plan has them
  int32_t num_processes = 1;  // several: each has a stage, in place of worker.pp_size
  int32_t poison = -1;        // this token's embedding is NaN: rows that read it, and all behind them, are NaN
};

/// An engine on the CPU. Prints which candidates compute it, once for every set of them.
std::unique_ptr<Engine> start_real_engine(RealEngineSetup setup);

/// What a request gave: the tokens, and the bits of the log-probabilities of its prompt and of them.
struct Text {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> logprobs;
  friend bool operator==(const Text&, const Text&) = default;
};

struct Outcome {
  Text text;
  Finish finish;
};
Outcome read_outcome(RequestStream& stream);

/// Waits until no step is under way any more.
EngineStats settled(const Engine& engine);

/// The first place where two texts differ, for messages.
std::string difference(const Text& expected, const Text& found);

}  // namespace quern::engine::testing
