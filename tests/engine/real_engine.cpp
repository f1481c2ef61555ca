#include "engine/real_engine.h"

#include <algorithm>
#include <bit>
#include <iostream>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/float_convert.h"
#include "worker/local_processes.h"

namespace quern::engine::testing {
namespace {

/// A checkpoint as it is, but for one row of its embedding. (A file with NaN in it would be refused.)
class PoisonedSource final : public weights::WeightSource {
 public:
  PoisonedSource(std::unique_ptr<weights::WeightSource> sound, int32_t token) : sound_(std::move(sound)), token_(token) {}

  [[nodiscard]] const weights::Inventory& inventory() const override { return sound_->inventory(); }
  Result<weights::StagedLinear> linear(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    ASSIGN_OR_RETURN(weights::StagedLinear staged, sound_->linear(name, slice, device, stream));
    if (name != "embed_tokens.weight") return staged;
    ops::TensorView& table = staged.source.weight;
    CHECK(table.dtype == DType::kBF16);
    ASSIGN_OR_RETURN(auto copy, device.allocate(table.size_bytes(), "a poisoned embedding"));
    std::copy_n(table.data<std::byte>(), table.size_bytes(), copy->address());
    table = {copy.get(), 0, table.dtype, table.shape};
    const int64_t row = token_ - slice.row_begin;  // of the rank that has it
    if (row >= 0 && row < table.shape[0]) std::fill_n(table.at(row).data<uint16_t>(), table.shape[1], uint16_t{0x7fc0});
    staged.buffers.push_back(std::move(copy));
    return staged;
  }
  Result<weights::StagedLinear> linear_in_fp8(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    return sound_->linear_in_fp8(name, slice, device, stream);
  }
  Result<weights::StagedTensor> vector(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    return sound_->vector(name, slice, device, stream);
  }
  void done_with(std::string_view name) override { sound_->done_with(name); }

 private:
  const std::unique_ptr<weights::WeightSource> sound_;
  const int32_t token_;
};

/// Workers in several processes, with the sources that each of them reads.
class WorkersInProcesses final : public worker::WorkerGroup {
 public:
  WorkersInProcesses(const RealEngineSetup& setup, const worker::ExecutionPlan& plan) : processes_(setup.num_processes) {
    for (int32_t process = 0; process < setup.num_processes; ++process) {
      auto sound = weights::open_weights(plan.options.model_dir, plan.config, plan.options.load);
      EXPECT_OK(sound);
      if (setup.poison >= 0) sources_.push_back(std::make_unique<PoisonedSource>(std::move(*sound), setup.poison));
      else sources_.push_back(std::move(*sound));
    }
    worker::WorkerOptions options = setup.worker;
    auto started = worker::ModelInProcesses::start(processes_, {.options = options, .source_of = [this](int32_t process) { return sources_[static_cast<size_t>(process)].get(); }});
    EXPECT_OK(started);
    if (started) model_ = std::move(*started);
  }
  [[nodiscard]] bool ready() const { return model_ != nullptr; }
  [[nodiscard]] const worker::WorkerLimits& limits() const override { return model_->limits(); }
  void submit(worker::StepPlan plan) override { model_->submit(std::move(plan)); }
  void submit_masks(worker::StepMasks masks) override { model_->submit_masks(std::move(masks)); }
  worker::StepResult wait() override { return model_->wait(); }
  std::optional<worker::StepResult> wait_or_wake() override { return model_->wait_or_wake(); }
  void wake() override { model_->wake(); }
  std::optional<worker::StepResult> poll() override { return model_->poll(); }

 private:
  worker::LocalProcesses processes_;
  std::vector<std::unique_ptr<weights::WeightSource>> sources_;
  std::unique_ptr<worker::ModelInProcesses> model_;
};

}  // namespace

std::unique_ptr<Engine> start_real_engine(RealEngineSetup setup) {
  setup.worker.model_dir = setup.model_dir;
  if (setup.num_processes > 1) setup.worker.pp_size = setup.num_processes;
  if (setup.worker.num_threads == 0) setup.worker.num_threads = 2;
  Result<worker::ExecutionPlan> plan = worker::make_plan(setup.worker);
  EXPECT_OK(plan);
  if (setup.num_blocks > 0) {
    setup.worker.kv_cache_memory_bytes = plan->kv_bytes_for(setup.num_blocks);
    plan = worker::make_plan(setup.worker);
    EXPECT_OK(plan);
    EXPECT_EQ(plan->limits.num_blocks, setup.num_blocks);
  }
  static std::set<std::string> shown;
  std::set<std::string> candidates;
  for (const worker::OpChoice& choice : plan->choices) {
    EXPECT_NE(choice.candidate, "") << choice.op;
    candidates.insert(fmt::format("{} {}", choice.op, choice.candidate));
  }
  const std::string text = fmt::format("{}: {}", plan->config.name, fmt::join(candidates, ", "));
  if (shown.insert(text).second) std::cout << text << "\n";
  setup.engine.max_num_batched_tokens = setup.worker.max_num_batched_tokens;
  if (setup.num_processes > 1) {
    auto workers = std::make_unique<WorkersInProcesses>(setup, *plan);
    return workers->ready() ? Engine::start(std::move(workers), setup.engine) : nullptr;
  }
  std::optional<PoisonedSource> poisoned;
  if (setup.poison >= 0) {
    auto sound = weights::open_weights(plan->options.model_dir, plan->config, plan->options.load);
    EXPECT_OK(sound);
    poisoned.emplace(std::move(*sound), setup.poison);
  }
  auto workers = worker::start_workers(*plan, {}, nullptr, poisoned ? &*poisoned : nullptr);
  EXPECT_OK(workers);
  return Engine::start(std::move(*workers), setup.engine);
}

Outcome read_outcome(RequestStream& stream) {
  Outcome outcome;
  for (;;) {
    TokenEvent event = stream.next();
    outcome.text.tokens.insert(outcome.text.tokens.end(), event.tokens.begin(), event.tokens.end());
    for (const auto* list : {&event.prompt_logprobs, &event.logprobs})
      for (const TokenLogprobs& logprobs : *list) {
        outcome.text.logprobs.push_back(std::bit_cast<uint32_t>(logprobs.chosen));
        for (const auto& [id, value] : logprobs.top) outcome.text.logprobs.push_back(std::bit_cast<uint32_t>(value) ^ static_cast<uint32_t>(id));
      }
    if (!event.finish) continue;
    outcome.finish = *std::move(event.finish);
    return outcome;
  }
}

EngineStats settled(const Engine& engine) {
  EngineStats stats = engine.stats();
  while (stats.num_free_slots != stats.num_slots || stats.num_running + stats.num_waiting > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    stats = engine.stats();
  }
  return stats;
}

std::string difference(const Text& expected, const Text& found) {
  const auto [a, b] = std::mismatch(expected.tokens.begin(), expected.tokens.end(), found.tokens.begin(), found.tokens.end());
  if (a != expected.tokens.end() || b != found.tokens.end())
    return fmt::format("token {} of {} and {}", a - expected.tokens.begin(), expected.tokens.size(), found.tokens.size());
  const auto [c, d] = std::mismatch(expected.logprobs.begin(), expected.logprobs.end(), found.logprobs.begin(), found.logprobs.end());
  if (c != expected.logprobs.end() || d != found.logprobs.end())
    return fmt::format("log-probability {}: {} and {}", c - expected.logprobs.begin(), std::bit_cast<float>(*c), std::bit_cast<float>(*d));
  return "none";
}

}  // namespace quern::engine::testing
