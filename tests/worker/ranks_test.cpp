// Models on several devices: transports, schemes, and ranks that fail. (Against references: reference_test.cpp; bits: invariance_test.cpp.)

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>

#include "base/hash.h"
#include "synth_checkpoint/synth.h"
#include "worker/runner_fixture.h"

namespace quern::worker {
namespace {

using quern::testing::Scheme;
using ::testing::HasSubstr;

/// Logits of the last row of a prompt of 100 tokens and of 10 decode rows behind it.
std::vector<std::vector<float>> some_logits(TestRunner& runner) {
  const std::vector<int32_t> tokens = random_tokens(5, 110);
  runner.start(1);
  std::vector<std::vector<float>> logits;
  const auto compute = [&](RowKind kind, int32_t begin, int32_t end) {
    StepRun run = given_rows(1, kind, std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), begin);
    run.want = Want::kLogits;
    run.logit_rows = {end - begin - 1};
    StepPlan step;
    step.runs.push_back(run);
    logits.push_back(std::move(runner.run(step).runs.at(0).logits.at(0)));
  };
  compute(RowKind::kPrompt, 0, 100);
  for (int32_t i = 100; i < 110; ++i) compute(RowKind::kDecode, i, i + 1);
  return logits;
}

/// Whether the platform's transport reaches between so many of its devices.
bool transport_works(WorkerOptions options) {
  options.model_dir = tiny_fp8();
  options.device = devices_under_test(options.tp_size * options.pp_size);
  const auto plan = make_plan(options);
  return plan && join_devices(*plan).has_value();
}

TEST(Ranks, GiveTheSameBitsOverEveryTransportAndInEveryRun) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  for (const auto& [tp_size, pp_size] : {std::pair{2, 1}, {3, 1}, {2, 2}}) {
    if (!has_devices(tp_size * pp_size)) continue;
    std::vector<std::vector<float>> first;
    // Twice each, those of the platform that work between these devices; on the CPU there are two.
    std::vector<std::string> transports;
    for (const ops::Transport& transport : backends::transports(backends::open_device(device_under_test(), {}).value()->traits().platform).transports()) transports.emplace_back(transport.name);
    const std::vector<std::string> once = transports;  // a vector does not take in its own elements
    transports.insert(transports.end(), once.rbegin(), once.rend());
    int32_t num_run = 0;
    for (const std::string& transport : transports) {
      WorkerOptions options{.tp_size = tp_size, .pp_size = pp_size};
      options.collective.transport = transport;
      if (!transport_works(options)) continue;
      TestRunner runner(tiny_fp8(), options);
      ASSERT_TRUE(runner.ready());
      const auto found = some_logits(runner);
      if (first.empty()) first = found;
      EXPECT_EQ(found, first) << transport << ", tp " << tp_size << ", pp " << pp_size;
      ++num_run;
    }
    EXPECT_GE(num_run, device_under_test() == "cpu" ? 4 : 2);
  }
}

/// Every scheme that a checkpoint may have, and BF16 that is quantized while loading: what the ranks compute together is what one computes.
TEST(Ranks, ComputeWhatOneDeviceComputesInEveryScheme) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  using tools::SynthScheme;
  struct Case {
    const char* name;
    SynthScheme scheme;
    bool quantize = false;
  };
  for (const Case& c : {Case{"bf16", SynthScheme::kBf16}, Case{"bf16, quantized while loading", SynthScheme::kBf16, true}, Case{"block fp8", SynthScheme::kBlockFp8},
                        Case{"block fp8 with vocabulary", SynthScheme::kBlockFp8Vocab}, Case{"static fp8", SynthScheme::kStaticFp8}, Case{"channel fp8", SynthScheme::kChannelFp8},
                        Case{"mixed", SynthScheme::kMixed}}) {
    SCOPED_TRACE(c.name);
    const quern::testing::TemporaryFolder folder;
    tools::SynthOptions made;
    made.config = tools::preset_config("tiny").value();
    made.scheme = c.scheme;
    made.text_files = false;
    made.seed = 3;
    ASSERT_OK(tools::write_checkpoint(made, folder.path()));
    std::vector<std::vector<float>> whole;
    for (const auto& [tp_size, pp_size] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 2}}) {
      if (!has_devices(tp_size * pp_size)) continue;
      WorkerOptions options{.dtype = ModelDType::kFloat32, .tp_size = tp_size, .pp_size = pp_size};
      options.load.quantize_fp8 = c.quantize;
      TestRunner runner(folder.path(), options);
      ASSERT_TRUE(runner.ready());
      const auto found = some_logits(runner);
      if (whole.empty()) whole = found;
      double worst = 0, largest = 0;
      for (size_t row = 0; row < whole.size(); ++row)
        for (size_t i = 0; i < whole[row].size(); ++i) {
          worst = std::max(worst, std::fabs(static_cast<double>(found[row][i]) - whole[row][i]));
          largest = std::max(largest, std::fabs(static_cast<double>(whole[row][i])));
        }
      EXPECT_GT(largest, 0.1);
      EXPECT_LE(worst, tp_size == 1 ? 0 : 1e-4 * largest) << "tp " << tp_size << ", pp " << pp_size;
    }
  }
}

/// What was drawn and drafted of four sequences, and how many rows ranks saw whole.
struct Drawn {
  std::vector<std::vector<int32_t>> tokens, drafts;
  int64_t gathered_rows = 0, sampled_rows = 0;
};
Drawn draw_with_drafts(TestRunner& runner, const std::vector<SamplingParams>& sampling) {
  constexpr int32_t kPrompt = 40, kDrafts = 2;
  Drawn drawn;
  const auto take = [&](StepPlan step) {
    const StepResult result = runner.run(std::move(step));
    drawn.gathered_rows += result.gathered_rows;
    for (const RunResult& run : result.runs) {
      EXPECT_FALSE(run.non_finite);
      drawn.tokens.push_back(run.tokens);
      drawn.drafts.push_back(run.drafts);
      drawn.sampled_rows += 1 + run.num_draft_rows;
    }
  };
  const auto with_drafts = [](StepRun run) {
    run.want = Want::kSample;
    run.fill_mtp = true;
    run.propose = DraftMethod::kMtp;
    run.propose_depth = kDrafts;
    return run;
  };
  StepPlan prompts;
  for (size_t slot = 0; slot < sampling.size(); ++slot) {
    runner.start(static_cast<int32_t>(slot), sampling[slot]);
    prompts.runs.push_back(with_drafts(given_rows(static_cast<int32_t>(slot), RowKind::kPrompt, random_tokens(slot, kPrompt), 0)));
  }
  take(std::move(prompts));
  for (int i = 0; i < 12; ++i) {
    StepPlan verify;
    for (size_t slot = 0; slot < sampling.size(); ++slot)
      verify.runs.push_back(with_drafts({.slot = static_cast<int32_t>(slot), .kind = RowKind::kDecode, .num_rows = 1 + kDrafts}));
    take(std::move(verify));
  }
  return drawn;
}

TEST(Ranks, DrawTheSameTokensFromCandidatesAsFromWholeLogits) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  std::vector<SamplingParams> sampling(4);
  sampling[0].temperature = 0;
  sampling[1].seed = 7;
  sampling[2] = {.temperature = 0.8f, .top_k = 20, .top_p = 0.95f, .min_p = 0.01f, .presence_penalty = 1.5f, .seed = 3, .logit_bias = {{5, 2.0f}, {300, 3.0f}}};
  sampling[3] = {.temperature = 1.2f, .top_k = ops::kMaxCandidates, .frequency_penalty = 0.5f, .repetition_penalty = 1.2f, .seed = 11, .min_tokens = 30, .stop_ids = {9}};
  const auto with_logprobs = [](std::vector<SamplingParams> params) {
    params[0].num_logprobs = 2;  // its rows have to be seen whole, and all others with them
    return params;
  };
  for (const auto& [tp_size, records] : {std::pair{2, false}, {2, true}, {3, true}}) {
    if (!has_devices(tp_size)) continue;
    SCOPED_TRACE(::testing::Message() << "tp " << tp_size << (records ? ", recorded" : ""));
    TestRunner runner(tiny_fp8(), {.tp_size = tp_size}, records);
    ASSERT_TRUE(runner.ready());
    const Drawn candidates = draw_with_drafts(runner, sampling), whole = draw_with_drafts(runner, with_logprobs(sampling)), again = draw_with_drafts(runner, sampling);
    EXPECT_EQ(candidates.tokens, whole.tokens);
    EXPECT_EQ(candidates.drafts, whole.drafts);
    EXPECT_EQ(candidates.tokens, again.tokens) << "after steps of the other kind";
    EXPECT_EQ(candidates.gathered_rows, 0);
    EXPECT_EQ(whole.gathered_rows, whole.sampled_rows);
    EXPECT_GT(std::count_if(candidates.drafts.begin(), candidates.drafts.end(), [](const auto& drafts) { return !drafts.empty(); }), 40);
  }
}

TEST(Ranks, SeeLogitsWholeWhereCandidatesAreNotEnough) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  TestRunner runner(tiny_fp8(), {.tp_size = 2});
  ASSERT_TRUE(runner.ready());
  for (const SamplingParams& wide : {SamplingParams{.top_p = 0.9f}, SamplingParams{.min_p = 0.1f}, SamplingParams{.top_k = ops::kMaxCandidates + 1}}) {
    const Drawn drawn = draw_with_drafts(runner, {SamplingParams{.temperature = 0}, wide});
    EXPECT_EQ(drawn.gathered_rows, drawn.sampled_rows);
  }
}

/// A checkpoint on a rank whose memory ends at some tensor.
class SourceWithoutRoom final : public weights::WeightSource {
 public:
  SourceWithoutRoom(std::unique_ptr<weights::WeightSource> sound, std::string tensor) : sound_(std::move(sound)), tensor_(std::move(tensor)) {}
  [[nodiscard]] const weights::Inventory& inventory() const override { return sound_->inventory(); }
  Result<weights::StagedLinear> linear(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    if (name == tensor_ && slice.row_begin > 0) {  // not the first rank's rows
      ASSIGN_OR_RETURN(const auto buffer, device.allocate(2 * device.traits().memory_bytes, name));
    }
    return sound_->linear(name, slice, device, stream);
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
  const std::string tensor_;
};

size_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  size_t pages = 0, resident = 0;
  EXPECT_EQ(std::fscanf(file, "%zu %zu", &pages, &resident), 2);
  std::fclose(file);
  return resident * 4096;
}

TEST(Ranks, OneThatRunsOutOfMemoryWhileLoadingEndsTheStartWithOneMessage) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  WorkerOptions options{.model_dir = tiny_fp8(), .device = devices_under_test(2), .max_num_seqs = 4, .tp_size = 2};
  const auto plan = make_plan(options);
  ASSERT_OK(plan);
  SourceWithoutRoom source(weights::open_weights(options.model_dir, plan->config, options.load).value(), "layers.2.mlp.up_proj.weight");
  const auto before = resident_bytes();
  for (int attempt = 0; attempt < 3; ++attempt) {
    double most = 0;
    const auto workers = start_workers(*plan, [&](double share) { most = std::max(most, share); }, nullptr, &source);
    ASSERT_FALSE(workers);
    EXPECT_EQ(workers.error().code, ErrorCode::kResourceExhausted);
    EXPECT_THAT(workers.error().message, HasSubstr(fmt::format("rank 1 ({})", plan->ranks[1].device)));
    EXPECT_THAT(workers.error().message, HasSubstr("layers.2.mlp.up_proj.weight"));
    EXPECT_EQ(workers.error().message.find("rank 0"), std::string::npos) << "the others' errors are a consequence";
    EXPECT_GT(most, 0.1);
    EXPECT_LT(most, 1.0);
  }
  EXPECT_LT(resident_bytes(), before + (size_t{64} << 20)) << "what was loaded is given back";
}

/// A link whose device is lost at some call.
class LinkThatFails final : public ops::Collective {
 public:
  LinkThatFails(std::unique_ptr<ops::Collective> sound, int32_t calls) : sound_(std::move(sound)), calls_left_(calls) {}
  [[nodiscard]] std::string_view transport() const override { return sound_->transport(); }
  [[nodiscard]] int32_t rank() const override { return sound_->rank(); }
  [[nodiscard]] int32_t size() const override { return sound_->size(); }
  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    count();
    sound_->all_gather(mine, all, widths, launch);
  }
  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    count();
    sound_->add_partials(combine, partial, x, launch);
  }
  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    count();
    sound_->send(message, to, launch);
  }
  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    count();
    sound_->receive(message, from, launch);
  }
  void abort(const Error& error) override { sound_->abort(error); }

 private:
  void count() {
    if (--calls_left_ == 0) sound_->abort(make_error(ErrorCode::kInternal, "the device is lost"));
  }
  const std::unique_ptr<ops::Collective> sound_;
  int32_t calls_left_;
};

TEST(Ranks, ADeviceThatIsLostInAStepFailsThatStepAndAllThatFollow) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  for (const auto& [tp_size, pp_size] : {std::pair{3, 1}, {1, 2}, {2, 2}})
    for (const size_t lost : {size_t{0}, static_cast<size_t>(tp_size * pp_size - 1)}) {
      if (!has_devices(tp_size * pp_size)) continue;
      SCOPED_TRACE(::testing::Message() << "tp " << tp_size << ", pp " << pp_size << ", rank " << lost);
      WorkerOptions options{.model_dir = tiny_fp8(), .device = devices_under_test(tp_size * pp_size), .max_model_len = 256, .max_num_seqs = 4, .tp_size = tp_size, .pp_size = pp_size};
      options.enforce_eager = true;  // the link counts calls, and a step that is replayed makes none
      const auto plan = make_plan(options);
      ASSERT_OK(plan);
      auto joined = join_devices(*plan);
      ASSERT_OK(joined);
      auto& link = tp_size > 1 ? joined->stage[lost] : joined->pipeline[lost];
      link = std::make_unique<LinkThatFails>(std::move(link), tp_size > 1 ? 30 : 3);
      const auto source = weights::open_weights(options.model_dir, plan->config, options.load);
      ASSERT_OK(source);
      std::vector<std::unique_ptr<ModelRunner>> runners;
      for (size_t rank = 0; rank < plan->ranks.size(); ++rank) {
        auto made = ModelRunner::create(
            *plan, rank, **source,
            {.table = backends::kernel_table(plan->traits.platform), .rules = {}, .device = *joined->devices[rank], .links = joined->links(rank), .progress = {}});
        ASSERT_OK(made);
        runners.push_back(std::move(*made));
      }
      RankGroup group(*plan, std::move(*joined), std::move(runners));
      StepPlan start;
      start.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = 0});
      start.slot_updates.push_back({.slot = 0});
      start.block_table_updates.push_back({.slot = 0, .first_block = 0, .blocks = {0, 1, 2, 3}});
      group.submit(start);
      EXPECT_FALSE(group.wait().error);
      int32_t num_good = 0;
      std::optional<Error> failure;
      const std::vector<int32_t> tokens = random_tokens(1, 12);
      for (int32_t i = 0; i < 12; ++i) {
        StepPlan step;
        step.step = static_cast<uint64_t>(i + 1);
        step.runs.push_back(given_rows(0, RowKind::kDecode, std::span(tokens).subspan(static_cast<size_t>(i), 1), i));
        step.runs[0].want = Want::kSample;
        group.submit(std::move(step));
        const StepResult result = group.wait();
        if (failure) {
          ASSERT_TRUE(result.error) << "after a failure";
          EXPECT_EQ(result.error->message, failure->message);
        } else if (result.error) {
          failure = result.error;
        } else {
          ++num_good;
        }
      }
      EXPECT_GT(num_good, 0);
      ASSERT_TRUE(failure);
      EXPECT_THAT(failure->message, HasSubstr("the device is lost"));
    }
}

/// A link whose calls do not return until they are let go.
class LinkThatHangs final : public ops::Collective {
 public:
  LinkThatHangs(std::unique_ptr<ops::Collective> sound, std::shared_future<void> let_go) : sound_(std::move(sound)), let_go_(std::move(let_go)) {}
  [[nodiscard]] std::string_view transport() const override { return sound_->transport(); }
  [[nodiscard]] int32_t rank() const override { return sound_->rank(); }
  [[nodiscard]] int32_t size() const override { return sound_->size(); }
  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    let_go_.wait();
    sound_->all_gather(mine, all, widths, launch);
  }
  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    let_go_.wait();
    sound_->add_partials(combine, partial, x, launch);
  }
  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    let_go_.wait();
    sound_->send(message, to, launch);
  }
  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    let_go_.wait();
    sound_->receive(message, from, launch);
  }
  void abort(const Error& error) override { sound_->abort(error); }

 private:
  const std::unique_ptr<ops::Collective> sound_;
  const std::shared_future<void> let_go_;
};

TEST(Ranks, AStepThatARankNeverReturnsFromFailsAllTheSame) {
  if (!has_devices(2)) GTEST_SKIP() << "one " << device_under_test();
  for (const auto& [tp_size, pp_size] : {std::pair{2, 1}, {1, 2}}) {
    SCOPED_TRACE(::testing::Message() << "tp " << tp_size << ", pp " << pp_size);
    WorkerOptions options{.model_dir = tiny_fp8(), .device = devices_under_test(2), .max_model_len = 256, .max_num_seqs = 4, .tp_size = tp_size, .pp_size = pp_size};
    options.collective.deadline = std::chrono::milliseconds(100);
    const auto plan = make_plan(options);
    ASSERT_OK(plan);
    auto joined = join_devices(*plan);
    ASSERT_OK(joined);
    std::promise<void> let_go;
    auto& link = tp_size > 1 ? joined->stage[0] : joined->pipeline[0];
    link = std::make_unique<LinkThatHangs>(std::move(link), let_go.get_future().share());
    const auto source = weights::open_weights(options.model_dir, plan->config, options.load);
    ASSERT_OK(source);
    std::vector<std::unique_ptr<ModelRunner>> runners;
    for (size_t rank = 0; rank < plan->ranks.size(); ++rank) {
      auto made = ModelRunner::create(
          *plan, rank, **source,
          {.table = backends::kernel_table(plan->traits.platform), .rules = {}, .device = *joined->devices[rank], .links = joined->links(rank), .progress = {}});
      ASSERT_OK(made);
      runners.push_back(std::move(*made));
    }
    RankGroup group(*plan, std::move(*joined), std::move(runners));
    const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { let_go.set_value(); });  // before the group waits for its ranks
    for (int32_t i = 0; i < 20; ++i) {
      StepPlan step;
      step.step = static_cast<uint64_t>(i);
      step.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = 0});
      step.slot_updates.push_back({.slot = 0});
      step.block_table_updates.push_back({.slot = 0, .first_block = 0, .blocks = {0}});
      const std::vector<int32_t> token = {1};
      step.runs.push_back(given_rows(0, RowKind::kPrompt, token, 0));
      group.submit(std::move(step));
      const StepResult result = group.wait();
      EXPECT_EQ(result.step, static_cast<uint64_t>(i));
      ASSERT_TRUE(result.error) << "rank 0 is still in step 0";
      EXPECT_THAT(result.error->message, HasSubstr(fmt::format("rank 1 ({}): rank 1 waited", plan->ranks[1].device)));
    }
  }
}

/// A queue that passes everything on; who waits for its work does so until it is let go.
class StreamThatHangs final : public ops::Stream {
 public:
  StreamThatHangs(std::unique_ptr<ops::Stream> sound, std::shared_future<void> let_go) : sound_(std::move(sound)), let_go_(std::move(let_go)) {}
  void copy_to_device(const void* source, const ops::TensorView& destination) override { sound_->copy_to_device(source, destination); }
  void copy_to_host(const ops::TensorView& source, void* destination) override { sound_->copy_to_host(source, destination); }
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override { sound_->copy(source, destination); }
  void fill_zero(const ops::TensorView& destination) override { sound_->fill_zero(destination); }
  Result<void> finish() override { return sound_->finish(); }
  ops::Mark mark() override { return sound_->mark(); }
  Result<void> wait(ops::Mark mark) override {
    if (++num_waits_ > 3) let_go_.wait();
    return sound_->wait(mark);
  }

 private:
  const std::unique_ptr<ops::Stream> sound_;
  const std::shared_future<void> let_go_;
  int num_waits_ = 0;
};

/// One device, nobody else to miss it.
TEST(Ranks, AStepThatADeviceNeverEndsFailsByItsDeadlineAndSoDoAllThatFollow) {
  if (device_under_test() != "cpu") GTEST_SKIP() << "kernels of " << device_under_test() << " want its own stream";
  std::promise<void> let_go;
  const auto released = let_go.get_future().share();
  WorkerOptions options{.max_model_len = 256, .max_num_seqs = 4, .step_timeout = std::chrono::seconds(2)};
  options.wrap_stream = [&](std::unique_ptr<ops::Stream> stream) { return std::make_unique<StreamThatHangs>(std::move(stream), released); };
  TestRunner runner(tiny_fp8(), options);
  ASSERT_TRUE(runner.ready());
  const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { let_go.set_value(); });  // before the group waits for its worker
  std::vector<std::string> errors;
  for (int32_t i = 0; i < 12; ++i) {
    StepPlan step;
    step.step = static_cast<uint64_t>(i);
    step.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = 0});
    step.slot_updates.push_back({.slot = 0});
    step.block_table_updates.push_back({.slot = 0, .first_block = 0, .blocks = {0}});
    const std::vector<int32_t> token = {1};
    step.runs.push_back(given_rows(0, RowKind::kPrompt, token, 0));
    runner.group->submit(std::move(step));
    const StepResult result = runner.group->wait();
    EXPECT_EQ(result.step, static_cast<uint64_t>(i));
    if (result.error) errors.push_back(result.error->message);
  }
  ASSERT_EQ(errors.size(), 9u) << "three steps have ended before";
  for (const std::string& error : errors) EXPECT_EQ(error, "step 3 has not ended after 2.0 s (--step-timeout): the device, or its driver, does not answer");
}

}  // namespace
}  // namespace quern::worker
