// A model in several processes, which are threads here: what they agree on, what they compute, and what becomes of them when one is lost. (Over MPI: tests/app/with_server/mpi_test.cpp.)

#include <fstream>
#include <future>
#include <set>

#include "base/file.h"
#include "worker/local_processes.h"
#include "worker/process_channel.h"
#include "worker/runner_fixture.h"
#include "worker/stage_link.h"

namespace quern::worker {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr int32_t kChannelTag = 1, kFirstRowTag = 16;

WorkerOptions tiny_options(int32_t tp_size = 1) {
  WorkerOptions options{.model_dir = tiny_fp8(), .device = "cpu", .max_model_len = 256, .max_num_seqs = 4, .max_num_batched_tokens = 128};
  options.kv_cache_memory_bytes = uint64_t{8} << 20;
  options.num_threads = 1;
  options.tp_size = tp_size;
  return options;
}

/// Tokens that follow one prompt, sampled; through `submit` and `wait`.
struct Generation {
  std::vector<int32_t> tokens;
  std::optional<Error> error;
};
Generation generate(WorkerGroup& group, int32_t num_tokens) {
  Generation out;
  uint64_t number = 1;
  int32_t index = 0;
  const auto run = [&](StepPlan step) {
    step.step = number++;
    group.submit(std::move(step));
    StepResult result = group.wait();
    if (result.error) out.error = result.error;
    return result;
  };
  StepPlan start;
  start.state_ops.push_back({.kind = StateOp::Kind::kClear, .slot = 2});
  SlotUpdate update{.slot = 2, .sampling = {.temperature = 0.7f, .seed = 5}};
  start.slot_updates.push_back(update);
  start.block_table_updates.push_back({.slot = 2, .first_block = 0, .blocks = {3, 1, 4, 2}});
  const std::vector<int32_t> prompt = random_tokens(8, 70);
  start.runs.push_back(given_rows(2, RowKind::kPrompt, prompt, 0));
  start.runs[0].want = Want::kSample;
  const auto take = [&](const StepResult& result, int32_t num_rows) {
    index += num_rows;
    if (!result.error) out.tokens.insert(out.tokens.end(), result.runs.at(0).tokens.begin(), result.runs.at(0).tokens.end());
  };
  take(run(std::move(start)), 70);
  while (!out.error && std::ssize(out.tokens) < num_tokens) {
    StepPlan step;
    step.runs.push_back({.slot = 2, .kind = RowKind::kDecode, .num_rows = 1, .position = {index, index, index}, .want = Want::kSample});
    take(run(std::move(step)), 1);
  }
  return out;
}

TEST(ProcessChannel, HandsMessagesOnInOrderAndSaysWhenTheOtherIsSilent) {
  LocalProcesses processes(2);
  const ProcessChannel::Settings settings{.silence = 2000ms, .first_word = 60'000ms};
  std::vector<uint64_t> steps;
  std::promise<void> all;
  std::promise<Error> loss;
  ProcessChannel here(processes[0], 1, settings, {.on_message = [](const Message&) {}, .on_failure = [&](const Error& error) { loss.set_value(error); }});
  auto there = std::make_optional<ProcessChannel>(processes[1], 0, settings,
                                                  ProcessChannel::Callbacks{.on_message =
                                                                                [&](const Message& message) {
                                                                                  const auto* masks = std::get_if<StepMasks>(&message);
                                                                                  if (masks == nullptr) return;
                                                                                  steps.push_back(masks->step);
                                                                                  if (steps.size() == 20) all.set_value();
                                                                                },
                                                                            .on_failure = [](const Error&) {}});
  here.open();
  there->open();
  for (uint64_t i = 0; i < 20; ++i) here.send(StepMasks{.step = i, .rows = {}});
  all.get_future().wait();
  for (uint64_t i = 0; i < 20; ++i) EXPECT_EQ(steps[i], i);
  std::future<Error> lost = loss.get_future();
  EXPECT_EQ(lost.wait_for(5000ms), std::future_status::timeout) << "signs of life come for more than twice the patience";
  processes.lose(1);
  EXPECT_THAT(lost.get().message, HasSubstr("nothing was heard of it for "));
  there.reset();
}

TEST(ProcessChannel, HasLittlePatienceWhenTheEndIsNear) {
  LocalProcesses processes(2);
  const ProcessChannel::Settings settings{.silence = 600'000ms, .first_word = 600'000ms};
  std::promise<Error> loss;
  ProcessChannel here(processes[0], 1, settings, {.on_message = [](const Message&) {}, .on_failure = [&](const Error& error) { loss.set_value(error); }});
  here.open();
  std::future<Error> lost = loss.get_future();
  EXPECT_EQ(lost.wait_for(1000ms), std::future_status::timeout);
  processes[0].set_impatient(true);
  EXPECT_THAT(lost.get().message, HasSubstr("nothing was heard of it for "));
}

TEST(StageLink, NamesRanksMessageTransportAndAge) {
  LocalProcesses processes(2);
  const auto device = backends::open_device("cpu", {.num_threads = 1});
  ASSERT_OK(device);
  const auto rows = [&] { return StageRows(std::shared_ptr<ops::Buffer>((*device)->allocate_host(StageRows::room_for(256), "rows").value())); };
  const StageRows sent = rows(), received = rows();
  StageLink first(processes[0], {.rank = 1, .tp_rank = 1, .stage = 0, .tp_size = 2}, 200ms), second(processes[1], {.rank = 3, .tp_rank = 1, .stage = 1, .tp_size = 2}, 200ms);
  for (size_t i = 0; i < 256; ++i) sent.rows()[i] = static_cast<std::byte>(i * 7);
  ASSERT_OK(first.send(5, sent, 256));
  ASSERT_OK(second.receive(5, received, 256));
  EXPECT_TRUE(std::equal(sent.rows(), sent.rows() + 256, received.rows()));

  const Result<void> missed = second.receive(6, received, 256);
  ASSERT_FALSE(missed);
  EXPECT_THAT(missed.error().message, AllOf(HasSubstr("rank 3 waited "), HasSubstr(" s for rank 1 in receive (message 2, 256 bytes, transport memory)")));
  ASSERT_OK(first.send(7, sent, 256));
  EXPECT_THAT(second.receive(8, received, 256).error().message, AllOf(HasSubstr("rank 3 found the rows of step 7"), HasSubstr("those of step 8"), HasSubstr("rank 1")));
  ASSERT_OK(first.send(9, sent, 128));
  EXPECT_THAT(second.receive(9, received, 256).error().message, HasSubstr("(128 bytes)"));
  processes.on_the_way = [](int32_t, int32_t, int32_t, std::vector<std::byte>& bytes) { bytes.back() ^= std::byte{1}; };
  ASSERT_OK(first.send(10, sent, 256));
  EXPECT_THAT(second.receive(10, received, 256).error().message, AllOf(HasSubstr("changed bytes"), HasSubstr("checksum")));
  second.abort(make_error(ErrorCode::kInternal, "enough"));
  EXPECT_THAT(second.receive(11, received, 256).error().message, AllOf(HasSubstr("rank 3 has stopped"), HasSubstr("enough")));
}

/// On the device under test, which the processes share; stages never change bits, so that one device says what is right.
TEST(Processes, ComputeWhatOneProcessComputes) {
  const bool on_cpu = device_under_test() == "cpu";
  for (const auto& [num_processes, tp_size] : {std::pair{2, 1}, {4, 1}, {2, 2}}) {
    if (tp_size > 1 && !on_cpu) continue;
    SCOPED_TRACE(fmt::format("{} processes of {} ranks", num_processes, tp_size));
    WorkerOptions whole = tiny_options(tp_size);
    whole.device = device_under_test();
    whole.memory_utilization = 0.2;
    if (on_cpu) whole.pp_size = num_processes;
    const auto one_plan = make_plan(whole);
    ASSERT_OK(one_plan);
    const auto one = start_workers(*one_plan);
    ASSERT_OK(one);
    const Generation expected = generate(**one, 40);
    ASSERT_FALSE(expected.error) << expected.error->message;

    LocalProcesses processes(num_processes);
    auto model = ModelInProcesses::start(processes, {.options = whole});
    ASSERT_OK(model);
    const Generation found = generate(**model, 40);
    ASSERT_FALSE(found.error) << found.error->message;
    EXPECT_EQ(found.tokens, expected.tokens);
    const ExecutionPlan& plan = (*model)->plan();
    ASSERT_EQ(std::ssize(plan.ranks), num_processes * tp_size);
    for (const Result<void>& outcome : (*model)->end()) EXPECT_OK(outcome);
    // Rows go from each rank to the one behind it, and nowhere else.
    const uint64_t row_bytes = static_cast<uint64_t>(plan.config.hidden_size) * dtype_size(plan.activation), num_steps = 1 + 39, header = StageRows::room_for(0);
    for (int32_t process = 0; process + 1 < num_processes; ++process)
      for (int32_t tp_rank = 0; tp_rank < tp_size; ++tp_rank) EXPECT_EQ(processes.num_bytes(process, process + 1, kFirstRowTag + tp_rank), (70 + 39) * row_bytes + num_steps * header);
    EXPECT_EQ(processes.num_bytes(0, num_processes - 1, kFirstRowTag) > 0, num_processes == 2);
  }
}

/// Each process reads its own layers and no others.
class CountingSource final : public weights::WeightSource {
 public:
  explicit CountingSource(std::unique_ptr<weights::WeightSource> sound) : sound_(std::move(sound)) {}
  [[nodiscard]] const weights::Inventory& inventory() const override { return sound_->inventory(); }
  Result<weights::StagedLinear> linear(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    note(name);
    return sound_->linear(name, slice, device, stream);
  }
  Result<weights::StagedLinear> linear_in_fp8(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    note(name);
    return sound_->linear_in_fp8(name, slice, device, stream);
  }
  Result<weights::StagedTensor> vector(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
    note(name);
    return sound_->vector(name, slice, device, stream);
  }
  void done_with(std::string_view name) override { sound_->done_with(name); }
  std::set<std::string> names() {
    const std::lock_guard lock(mutex_);
    return names_;
  }
 private:
  void note(std::string_view name) {
    const std::lock_guard lock(mutex_);
    names_.emplace(name);
  }
  const std::unique_ptr<weights::WeightSource> sound_;
  std::mutex mutex_;
  std::set<std::string> names_;
};

TEST(Processes, ReadTheirOwnStagesAlone) {
  const WorkerOptions options = tiny_options();
  const auto plan = make_plan(options);
  ASSERT_OK(plan);
  std::vector<std::unique_ptr<CountingSource>> sources;
  for (int32_t process = 0; process < 2; ++process) sources.push_back(std::make_unique<CountingSource>(weights::open_weights(options.model_dir, plan->config, options.load).value()));
  LocalProcesses processes(2);
  auto model = ModelInProcesses::start(processes, {.options = options, .source_of = [&](int32_t process) { return sources[static_cast<size_t>(process)].get(); }});
  ASSERT_OK(model);
  std::set<std::string> both;
  for (const auto& name : sources[0]->names())
    if (sources[1]->names().contains(name)) both.insert(name);
  // Drafts look embeddings up, too, and so does a tied head.
  for (const std::string& name : both) EXPECT_EQ(name, "embed_tokens.weight");
  EXPECT_FALSE(sources[0]->names().empty());
  EXPECT_FALSE(sources[1]->names().empty());
  for (size_t process = 0; process < 2; ++process)
    for (const std::string& name : sources[process]->names()) {
      if (!name.starts_with("layers.")) continue;
      const int64_t layer = std::stoll(name.substr(7));
      const Range& own = (*model)->plan().ranks[process].shard.layers;
      EXPECT_TRUE(own.begin <= layer && layer < own.end) << "process " << process << " has read " << name;
    }
}

TEST(Processes, SayInOneSentenceWhatTheyDifferIn) {
  const quern::testing::TemporaryFolder folder;
  // The same shapes, other weights.
  ASSERT_OK(quern::testing::tiny_reference(quern::testing::Scheme::kFp8Block, folder.path() / "same"));
  ASSERT_OK(quern::testing::tiny_reference(quern::testing::Scheme::kFp8Block, folder.path() / "other"));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "other")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string bytes = read_file(entry.path()).value();
    const size_t header = 8 + *reinterpret_cast<const uint64_t*>(bytes.data());
    for (size_t i = header; i < bytes.size(); ++i) bytes[i] = static_cast<char>(bytes[i] ^ 1);
    std::ofstream(entry.path(), std::ios::binary) << bytes;
  }
  struct Case {
    const char* name;
    std::function<void(WorkerOptions&)> change;
    std::vector<const char*> wanted;
  };
  for (const Case& c : {Case{"sequences", [](WorkerOptions& o) { o.max_num_seqs = 8; }, {"process 1 (host1) differs from process 0 (host0)", "--max-num-seqs 8 there and 4 here"}},
                        Case{"two options", [](WorkerOptions& o) { o.enforce_eager = true, o.max_model_len = 128; }, {"--enforce-eager yes there and no here", "--max-model-len 128 there and 256 here"}},
                        Case{"types", [](WorkerOptions& o) { o.ring_dtype = RingDType::kFloat32; }, {"--gdn-ring-dtype"}},
                        Case{"devices", [](WorkerOptions& o) { o.device = "cpu:0,cpu:1"; }, {"process 1 (host1)", "--device names 2 devices, but -tp 1"}},
                        Case{"ranks", [](WorkerOptions& o) { o.tp_size = 2; }, {"-tp 2 there and 1 here"}},
                        Case{"stages", [](WorkerOptions& o) { o.pp_size = 3; }, {"process 1 (host1)", "-pp 3 in 2 processes"}},
                        Case{"a device that there is not", [](WorkerOptions& o) { o.device = "quantum:0"; }, {"process 1 (host1)", "quantum:0"}},
                        Case{"no checkpoint", [](WorkerOptions& o) { o.model_dir = "/nowhere"; }, {"process 1 (host1)", "/nowhere"}},
                        Case{"another checkpoint", [&](WorkerOptions& o) { o.model_dir = folder.path() / "other"; }, {"the checkpoint"}},
                        Case{"another program", [](WorkerOptions& o) { o.model_dir.clear(); }, {"process 1 (host1)"}}}) {
    SCOPED_TRACE(c.name);
    LocalProcesses processes(2);
    std::vector<Result<void>> others;
    const auto plan_in = [&](int32_t process) {
      WorkerOptions options = tiny_options();
      if (process == 1) c.change(options);
      return make_common_plan(options, processes[process], "a quern");
    };
    auto other = std::async(std::launch::async, [&] { return plan_in(1); });
    const auto mine = plan_in(0), theirs = other.get();
    ASSERT_FALSE(mine);
    ASSERT_FALSE(theirs);
    for (const char* wanted : c.wanted) EXPECT_THAT(mine.error().message, HasSubstr(wanted));
    EXPECT_EQ(mine.error().message.find('\n'), std::string::npos);
    EXPECT_THAT(theirs.error().message, AllOf(HasSubstr("process 0 says"), HasSubstr(mine.error().message)));
  }
  // In another place, the same checkpoint is the same; thread counts and places are each host's own.
  LocalProcesses processes(2);
  auto other = std::async(std::launch::async, [&] {
    WorkerOptions options = tiny_options();
    options.model_dir = folder.path() / "same";
    options.num_threads = 2;
    return make_common_plan(options, processes[1], "a quern");
  });
  const auto mine = make_common_plan(tiny_options(), processes[0], "a quern"), theirs = other.get();
  ASSERT_OK(mine);
  ASSERT_OK(theirs);
  EXPECT_EQ(mine->local_ranks(), (Range{0, 1}));
  EXPECT_EQ(theirs->local_ranks(), (Range{1, 2}));
  EXPECT_EQ(mine->limits.num_blocks, theirs->limits.num_blocks);
}

TEST(Processes, OfOtherProgramsOrProtocolsAreFoundAtTheStart) {
  for (const bool protocol : {false, true}) {
    LocalProcesses processes(2);
    if (protocol)
      processes.on_the_way = [](int32_t from, int32_t, int32_t, std::vector<std::byte>& bytes) {
        if (from == 1) bytes[4] ^= std::byte{4};
      };
    auto other = std::async(std::launch::async, [&] { return make_common_plan(tiny_options(), processes[1], "quern 2"); });
    const auto mine = make_common_plan(tiny_options(), processes[0], protocol ? "quern 2" : "quern 1");
    ASSERT_FALSE(mine);
    EXPECT_FALSE(other.get());
    EXPECT_THAT(mine.error().message, HasSubstr(protocol ? "all processes have to run the same quern" : "quern quern 2 there and quern 1 here"));
  }
}

TEST(Processes, AreTriedBeforeTheyAreUsed) {
  constexpr int32_t kTrialTag = 3;
  for (const bool there : {false, true}) {
    LocalProcesses processes(3);
    processes.on_the_way = [&](int32_t from, int32_t to, int32_t tag, std::vector<std::byte>& bytes) {
      if (tag == kTrialTag && from == (there ? 1 : 2) && to == (there ? 2 : 1) && bytes.size() > 100'000) bytes[77'777] ^= std::byte{1};
    };
    std::vector<std::future<Result<ExecutionPlan>>> others;
    for (const int32_t process : {1, 2}) others.push_back(std::async(std::launch::async, [&, process] { return make_common_plan(tiny_options(), processes[process], "a quern"); }));
    const auto mine = make_common_plan(tiny_options(), processes[0], "a quern");
    ASSERT_FALSE(mine);
    EXPECT_THAT(mine.error().message, AllOf(HasSubstr(fmt::format("process {} (host{})", there ? 2 : 1, there ? 2 : 1)), HasSubstr("over memory"), HasSubstr("changed from byte 77777 on")));
    for (auto& other : others) EXPECT_FALSE(other.get());
  }
}

TEST(Processes, OneThatIsLostFailsTheStepWithItsNameAndAge) {
  for (const int32_t lost : {1, 2}) {
    LocalProcesses processes(3);
    WorkerOptions options = tiny_options();
    options.collective_timeout = 2000ms;
    auto model = ModelInProcesses::start(processes, {.options = options});
    ASSERT_OK(model);
    EXPECT_FALSE(generate(**model, 5).error);
    EXPECT_FALSE(processes[0].failure());
    processes.lose(lost);
    const Generation end = generate(**model, 5);
    ASSERT_TRUE(end.error);
    // Whoever sees it first: process 0, which hears nothing of it, or the stage behind it, which gets no rows.
    EXPECT_THAT(end.error->message, AnyOf(AllOf(HasSubstr(fmt::format("process {} (host{}, rank {})", lost, lost, lost)), HasSubstr("nothing was heard of it for "), HasSubstr("step 1 was sent")),
                                          AllOf(HasSubstr("rank 2 waited "), HasSubstr(" s for rank 1 in receive"))));
    EXPECT_THAT(end.error->message, HasSubstr("transport memory"));
    EXPECT_TRUE(processes[0].failure());
    const auto& outcomes = (*model)->end();
    for (const size_t other : {size_t{1}, size_t{2}}) EXPECT_FALSE(outcomes[other]) << "all processes end";
  }
}

TEST(Processes, ALossIsNoticedWhileNothingRuns) {
  LocalProcesses processes(2);
  WorkerOptions options = tiny_options();
  options.collective_timeout = 2000ms;
  auto model = ModelInProcesses::start(processes, {.options = options});
  ASSERT_OK(model);
  processes.lose(1);
  while (!processes[0].failure()) std::this_thread::sleep_for(5ms);
  EXPECT_THAT(processes[0].failure()->message, HasSubstr("no step was under way"));
}

TEST(Processes, EndWhenProcess0IsLost) {
  LocalProcesses processes(2);
  WorkerOptions options = tiny_options();
  options.collective_timeout = 2000ms;
  auto model = ModelInProcesses::start(processes, {.options = options});
  ASSERT_OK(model);
  processes.lose(0);
  const auto& outcomes = (*model)->end();
  ASSERT_FALSE(outcomes[1]);
  EXPECT_THAT(outcomes[1].error().message, HasSubstr("process 0: nothing was heard of it for "));
}

TEST(Processes, ChangedMessagesEndTheStepWithAReason) {
  struct Case {
    int32_t from, to, tag;
    const char* reason;
  };
  for (const Case& c : {Case{0, 1, kFirstRowTag, "rank 1 found changed bytes (their checksum differs) from rank 0 in receive"}, Case{0, 1, kChannelTag, "changed on the way"},
                        Case{1, 0, kChannelTag, "changed on the way"}}) {
    LocalProcesses processes(2);
    std::atomic<bool> tamper = false;
    processes.on_the_way = [&](int32_t from, int32_t to, int32_t tag, std::vector<std::byte>& bytes) {
      if (tamper && from == c.from && to == c.to && tag == c.tag && bytes.size() > 40) bytes[bytes.size() - 3] ^= std::byte{8};
    };
    auto model = ModelInProcesses::start(processes, {.options = tiny_options()});
    ASSERT_OK(model);
    EXPECT_FALSE(generate(**model, 5).error);
    tamper = true;
    const Generation end = generate(**model, 5);
    ASSERT_TRUE(end.error);
    EXPECT_THAT(end.error->message, HasSubstr(c.reason));
    const auto& outcomes = (*model)->end();
    ASSERT_FALSE(outcomes[1]);
    EXPECT_THAT(outcomes[1].error().message, Not(HasSubstr("nothing was heard"))) << "both know why, and at once";
  }
}

TEST(Processes, OneThatCannotLoadEndsTheStartWithItsReason) {
  class Refusing final : public weights::WeightSource {
   public:
    explicit Refusing(std::unique_ptr<weights::WeightSource> sound) : sound_(std::move(sound)) {}
    [[nodiscard]] const weights::Inventory& inventory() const override { return sound_->inventory(); }
    Result<weights::StagedLinear> linear(std::string_view name, const weights::Slice&, ops::Device&, ops::Stream&) override {
      return make_error(ErrorCode::kResourceExhausted, "no room for {}", name);
    }
    Result<weights::StagedLinear> linear_in_fp8(std::string_view name, const weights::Slice&, ops::Device&, ops::Stream&) override {
      return make_error(ErrorCode::kResourceExhausted, "no room for {}", name);
    }
    Result<weights::StagedTensor> vector(std::string_view name, const weights::Slice& slice, ops::Device& device, ops::Stream& stream) override {
      return sound_->vector(name, slice, device, stream);
    }
    void done_with(std::string_view) override {}

   private:
    const std::unique_ptr<weights::WeightSource> sound_;
  };
  const WorkerOptions options = tiny_options();
  const auto plan = make_plan(options);
  ASSERT_OK(plan);
  for (const int32_t unlucky : {0, 1, 2}) {
    LocalProcesses processes(3);
    Refusing refusing(weights::open_weights(options.model_dir, plan->config, options.load).value());
    const auto model =
        ModelInProcesses::start(processes, {.options = options, .source_of = [&](int32_t process) -> weights::WeightSource* { return process == unlucky ? &refusing : nullptr; }});
    ASSERT_FALSE(model);
    EXPECT_EQ(model.error().code, ErrorCode::kResourceExhausted);
    EXPECT_THAT(model.error().message, AllOf(HasSubstr("no room for "), HasSubstr(fmt::format("rank {} (cpu", unlucky)), HasSubstr(fmt::format("process {}", unlucky))));
  }
}

}  // namespace
}  // namespace quern::worker
