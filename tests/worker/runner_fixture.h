#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "backends/platforms.h"
#include "base/hash.h"
#include "support/reference_checkpoint.h"
#include "support/test_support.h"
#include "worker/model_runner.h"
#include "worker/plan.h"
#include "worker/rank_devices.h"
#include "worker/rank_group.h"

namespace quern::worker {

/// The tiny reference in block FP8, made once a program.
inline std::filesystem::path tiny_fp8() {
  static quern::testing::TemporaryFolder folder;
  const auto path = folder.path() / "tiny";
  if (!std::filesystem::exists(path)) {
    EXPECT_OK(quern::testing::tiny_reference(quern::testing::Scheme::kFp8Block, path));
  }
  return path;
}

/// Ids below the tiny reference's vocabulary.
inline std::vector<int32_t> random_tokens(uint64_t seed, int32_t n) {
  SplitMix64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& t : tokens) t = static_cast<int32_t>(random.next() % 320);
  return tokens;
}

/// The device on which models run in these tests: QUERN_TEST_DEVICE, the CPU without it. CTest runs the program once for each; main() skips where it is missing.
inline std::string device_under_test() {
  const char* name = std::getenv("QUERN_TEST_DEVICE");
  return name != nullptr ? name : "cpu";
}

/// For --device: so many of that device. The CPU shares itself out, and an OpenCL device may have several ranks.
inline std::string devices_under_test(int32_t count) {
  std::string list = device_under_test();
  if (list.starts_with("opencl"))
    for (int32_t i = 1; i < count; ++i) list += "," + device_under_test();
  return list;
}
/// Whether the machine has them; what is left out otherwise is said once.
inline bool has_devices(int32_t count) {
  if (!device_under_test().starts_with("cuda")) return true;
  static int32_t found = 1, told = 0;  // main() has opened the first
  while (found < count && backends::open_device(fmt::format("cuda:{}", found), {})) ++found;
  if (found < count && told < count) std::cout << fmt::format("SKIPPED: what takes {} GPUs, of which this machine has {}\n", told = count, found);
  return found >= count;
}

/// Devices of all ranks of a plan, joined.
inline Result<JoinedDevices> join_devices(const ExecutionPlan& plan, bool records = false) {
  JoinedDevices joined;
  std::vector<std::string> names;
  for (const RankPlan& rank : plan.ranks) names.push_back(rank.device);
  const backends::DeviceOptions options{
      .num_threads = plan.options.num_threads, .num_sharing = num_sharing_cpu(names), .records = records, .quantizes_activations = plan.options.quantize_activations};
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(joined.devices.emplace_back(), backends::open_device(name, options));
  }
  RETURN_IF_ERROR(join_ranks(plan, joined));
  return joined;
}

/// One model on that device, or on several of its kind, driven with StepPlans by hand.
class TestRunner {
 public:
  explicit TestRunner(const std::filesystem::path& model_dir, WorkerOptions options = {}, bool records = false, const std::string& on_device = {}) {
    options.model_dir = model_dir;
    options.device = on_device.empty() ? devices_under_test(options.tp_size * options.pp_size) : on_device;
    // A start among several GPUs tries every transport; one is enough but where transports are what is tested (ranks_test.cpp).
    if (options.tp_size * options.pp_size > 1 && options.collective.transport.empty() && device_under_test() != "cpu") options.collective.transport = "staged";
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
    auto joined = join_devices(plan, records);
    if (!joined) {
      ADD_FAILURE() << joined.error().message;
      return;
    }
    traits = joined->devices[0]->traits();
    for (const auto& device : joined->devices) joined_bytes.push_back(device->allocated_bytes());
    auto source = weights::open_weights(model_dir, plan.config, options.load);
    if (!source) {
      ADD_FAILURE() << source.error().message;
      return;
    }
    std::vector<std::unique_ptr<ModelRunner>> runners;
    for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
      auto made = ModelRunner::create(
          plan, rank, **source,
          {.table = backends::kernel_table(plan.traits.platform), .rules = {.forced = plan.options.kernels, .disabled = {}}, .device = *joined->devices[rank], .links = joined->links(rank), .progress = {}});
      if (!made) {
        ADD_FAILURE() << made.error().message;
        return;
      }
      runners.push_back(std::move(*made));
    }
    for (const auto& each : runners) by_rank.push_back(each.get());
    for (const auto& each : joined->devices) devices.push_back(each.get());
    group = std::make_unique<RankGroup>(plan, std::move(*joined), std::move(runners));
  }

  [[nodiscard]] bool ready() const { return group != nullptr; }

  StepResult run(StepPlan step) {
    step.step = next_step_++;
    group->submit(std::move(step));
    StepResult result = group->wait();
    EXPECT_FALSE(result.error.has_value()) << result.error->message;
    return result;
  }

  /// A fresh sequence in `slot` whose blocks are slot, slot + num_slots, ...: neighbours' blocks are interleaved.
  void start(int32_t slot, const SamplingParams& sampling = {}) {
    StepPlan step;
    step.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = slot});
    step.slot_updates.push_back({.slot = slot, .sampling = sampling});
    BlockTableUpdate blocks{.slot = slot};
    const int32_t count = std::min(plan.limits.num_blocks / plan.limits.num_slots, static_cast<int32_t>(ceil_div(plan.limits.max_model_len, ops::kGrid)));
    for (int32_t b = 0; b < count; ++b) blocks.blocks.push_back(b * plan.limits.num_slots + slot);
    step.block_table_updates.push_back(blocks);
    run(step);
  }

  ExecutionPlan plan;
  ops::DeviceTraits traits;
  std::unique_ptr<RankGroup> group;
  std::vector<ModelRunner*> by_rank;  // the group's; at rest between steps
  std::vector<ops::Device*> devices;
  std::vector<size_t> joined_bytes;  // of each device, for messages alone

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
