#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "backends/platforms.h"
#include "support/reference_checkpoint.h"
#include "support/test_support.h"
#include "worker/model_runner.h"
#include "worker/plan.h"

namespace quern::worker {

/// The device on which models run in these tests: QUERN_TEST_DEVICE, the CPU without it. CTest runs the program once for each; main() skips where it is missing.
inline std::string device_under_test() {
  const char* name = std::getenv("QUERN_TEST_DEVICE");
  return name != nullptr ? name : "cpu";
}

/// One model on that device, driven with StepPlans by hand.
class TestRunner {
 public:
  explicit TestRunner(const std::filesystem::path& model_dir, WorkerOptions options = {}, bool records = false) {
    options.model_dir = model_dir;
    options.device = device_under_test();
    if (options.max_num_seqs == 0) options.max_num_seqs = 4;
    if (options.max_model_len == 0) options.max_model_len = 512;
    auto made_plan = make_plan(options);
    if (!made_plan) {
      ADD_FAILURE() << made_plan.error().message;
      return;
    }
    plan = std::move(*made_plan);
    EXPECT_TRUE(plan.fits) << plan.verdict;
    EXPECT_EQ(plan.refusals(), "");
    device = std::move(backends::open_device(options.device, {.num_threads = options.num_threads, .records = records, .quantizes_activations = options.quantize_activations})).value();
    auto source = weights::open_weights(model_dir, plan.config, options.load);
    if (!source) {
      ADD_FAILURE() << source.error().message;
      return;
    }
    auto made = ModelRunner::create(plan, **source, backends::kernel_table(device->traits().platform), {}, *device, {});
    if (!made) ADD_FAILURE() << made.error().message;
    else runner = std::move(*made);
  }

  StepResult run(StepPlan step) {
    step.step = next_step_++;
    StepResult result = runner->run(step, [] { return StepMasks{}; });
    EXPECT_FALSE(result.error.has_value()) << result.error->message;
    return result;
  }

  /// A fresh sequence in `slot` whose blocks are slot, slot + num_slots, ...: neighbours' blocks are interleaved.
  void start(int32_t slot, const SamplingParams& sampling = {}) {
    StepPlan step;
    step.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = slot});
    step.slot_updates.push_back({.slot = slot, .sampling = sampling});
    BlockTableUpdate blocks{.slot = slot};
    const int32_t count = plan.limits.num_blocks / plan.limits.num_slots;
    for (int32_t b = 0; b < count; ++b) blocks.blocks.push_back(b * plan.limits.num_slots + slot);
    step.block_table_updates.push_back(blocks);
    run(step);
  }

  ExecutionPlan plan;
  std::unique_ptr<ops::Device> device;
  std::unique_ptr<ModelRunner> runner;

 private:
  uint64_t next_step_ = 1;
};

/// A prompt run, or committed decode rows with given tokens.
inline StepRun given_rows(int32_t slot, RowKind kind, std::span<const int32_t> tokens, int32_t index) {
  StepRun run;
  run.slot = slot;
  run.kind = kind;
  run.num_rows = static_cast<int32_t>(tokens.size());
  run.tokens.assign(tokens.begin(), tokens.end());
  run.position = {index, index, index};
  return run;
}

/// Cuts [0, size) into pieces: prompt chunks where `chunk` is a multiple of 64 or not below `size`, else decode rows cut at 64-boundaries too.
struct Piece {
  int32_t begin, end;
  RowKind kind;
};
inline std::vector<Piece> cut(int32_t size, int32_t chunk) {
  const bool prompt = chunk % 64 == 0 || chunk >= size;
  std::vector<Piece> pieces;
  for (int32_t begin = 0; begin < size;) {
    int32_t end = std::min(size, begin + chunk);
    if (!prompt) end = std::min(end, (begin / 64 + 1) * 64);
    pieces.push_back({begin, end, prompt ? RowKind::kPrompt : RowKind::kDecode});
    begin = end;
  }
  return pieces;
}

}  // namespace quern::worker
