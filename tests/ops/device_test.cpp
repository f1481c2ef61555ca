#include <numeric>
#include <thread>

#include "backends/cpu/cpu_info.h"
#include "backends/cpu/thread_pool.h"
#include "ops/bed.h"
#include "ops/select.h"

// Devices, traits, tables and the choice of candidates.

namespace quern::ops::testing {
namespace {

TEST(CpuDevice, HandsOutZeroedAlignedMemoryAndCountsIt) {
  const auto device = backends::open_device("cpu", {.num_threads = 1}).value();
  EXPECT_EQ(device->allocated_bytes(), 0u);
  {
    const auto small = device->allocate(100, "a small thing").value(), large = device->allocate(size_t{64} << 20, "a large thing").value();
    EXPECT_EQ(device->allocated_bytes(), 100 + (size_t{64} << 20));
    for (const auto* buffer : {small.get(), large.get()}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->address()) % 64, 0u);
      EXPECT_TRUE(std::all_of(buffer->address(), buffer->address() + buffer->size_bytes(), [](std::byte b) { return b == std::byte{0}; }));
    }
    const auto nothing = device->allocate(0, "nothing").value();
    EXPECT_EQ(nothing->size_bytes(), 0u);
  }
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

TEST(CpuDevice, RefusesMoreMemoryThanTheMachineHasByName) {
  const auto device = backends::open_device("cpu", {.num_threads = 1}).value();
  const auto result = device->allocate(device->traits().memory_bytes + 1, "the KV cache");
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kResourceExhausted);
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("the KV cache"));
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

TEST(CpuDevice, ReadsHostMemoryInPlace) {
  const auto device = backends::open_device("cpu:0", {.num_threads = 1}).value();
  EXPECT_TRUE(device->reads_host_memory());
  const std::vector<std::byte> memory(10);
  const auto buffer = device->wrap_host_memory(memory);
  EXPECT_EQ(buffer->address(), memory.data());
  EXPECT_EQ(buffer->size_bytes(), 10u);
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

TEST(CpuInfo, ReadsTheKernelsNumberLists) {
  EXPECT_EQ(cpu::parse_number_list("0\n"), std::vector<int>{0});
  EXPECT_EQ(cpu::parse_number_list("0-2,5,7-8"), (std::vector<int>{0, 1, 2, 5, 7, 8}));
  for (const char* text : {"", "\n", "x", "1-", "3-2", "1,", ",1", "1 2"}) EXPECT_TRUE(cpu::parse_number_list(text).empty()) << text;
  EXPECT_FALSE(cpu::memory_nodes().empty());
}

TEST(ThreadPool, CoversEveryRangeExactlyOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    cpu::ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int64_t n = 0; n < 200; ++n) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
      std::atomic<bool> known_threads{true};
      pool.parallel_for(n, int64_t{1} << 30, [&](int64_t begin, int64_t end, int thread) {
        if (thread < 0 || thread >= threads) known_threads = false;
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      EXPECT_TRUE(known_threads);
      for (const auto& count : visits) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, FinishesManyShortJobsWhileAThreadSleepsOrIsBusy) {
  cpu::ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 2000; ++job) {
    pool.parallel_for(7, int64_t{1} << 30, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) sum += i;
    });
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // lets the workers fall asleep
  }
  EXPECT_EQ(sum, 2000 * 21);
}

TEST(ThreadPool, SharesWorkAmongThreads) {
  cpu::ThreadPool pool(2);
  std::atomic<int> inside{0};
  pool.parallel_for(2, int64_t{1} << 30, [&](int64_t, int64_t, int) {
    ++inside;
    while (inside < 2) std::this_thread::yield();  // each waits until the other has begun
  });
  EXPECT_EQ(inside, 2);
}

TEST(Platforms, OpenOnlyWhatThisBuildHasAndSayWhy) {
  for (const std::string_view name : {"cuda:0", "cuda", "cuda:99", "opencl:1"}) {
    const auto result = backends::open_device(name, {});
    if (result.has_value()) {
      EXPECT_EQ((*result)->traits().platform, name.starts_with("cuda") ? Platform::kCuda : Platform::kOpenCl);
      continue;
    }
    EXPECT_EQ(result.error().code, ErrorCode::kUnsupported);
    EXPECT_THAT(result.error().message, ::testing::HasSubstr("--device cpu"));
  }
  for (const std::string_view name : {"tpu", "cpu:1", "cpu:x", "cuda:", "cuda:-1", "opencl:x", ""}) {
    const auto result = backends::open_device(name, {});
    ASSERT_FALSE(result.has_value()) << name;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument) << name;
  }
}

TEST(Platforms, KnowCardsThatTheMachineLacks) {
  for (const std::string_view name : backends::known_cards()) {
    const auto traits = backends::traits_by_name(name);
    ASSERT_OK(traits);
    EXPECT_GT(traits->memory_bytes, uint64_t{20} << 30);
    EXPECT_GT(traits->read_bandwidth, 4e11);
    EXPECT_NE(traits->platform, Platform::kCpu);
  }
  EXPECT_TRUE(backends::traits_by_name("H200").value().fp8_matrix);
  EXPECT_FALSE(backends::traits_by_name("b70").value().fp8_matrix);
  const auto unknown = backends::traits_by_name("b99");
  ASSERT_FALSE(unknown.has_value());
  EXPECT_THAT(unknown.error().message, ::testing::HasSubstr("b70"));
}

TEST(Platforms, DescribeThisMachine) {
  const DeviceTraits traits = backends::traits_by_name("cpu").value();
  EXPECT_EQ(traits.platform, Platform::kCpu);
  EXPECT_GT(traits.memory_bytes, uint64_t{1} << 28);
  EXPECT_GT(traits.read_bandwidth, 1e8);
  EXPECT_GE(traits.num_cores, 1);
  EXPECT_NE(traits.name, "");
}

template <class Op>
void expect_plain_last(const KernelTable& table) {
  const auto candidates = table.list<Op>().candidates();
  ASSERT_FALSE(candidates.empty()) << Op::kName;
  EXPECT_EQ(candidates.back().name, "cpu.plain") << Op::kName;
}

TEST(KernelTables, EndWithPlain) {
  const KernelTable& cpu = backends::kernel_table(Platform::kCpu);
  expect_plain_last<Embed>(cpu);
  expect_plain_last<AttnIn>(cpu);
  expect_plain_last<Attention>(cpu);
  expect_plain_last<GdnIn>(cpu);
  expect_plain_last<GdnMix>(cpu);
  expect_plain_last<OutResidual>(cpu);
  expect_plain_last<MlpIn>(cpu);
  expect_plain_last<DownResidual>(cpu);
  expect_plain_last<MtpIn>(cpu);
  expect_plain_last<Head>(cpu);
  expect_plain_last<Sample>(cpu);
  expect_plain_last<StateCopy>(cpu);
  expect_plain_last<Combine>(cpu);
  EXPECT_EQ(backends::kernel_table(Platform::kCuda).list<Combine>().candidates().back().name, "cuda.plain");
  EXPECT_EQ(backends::kernel_table(Platform::kOpenCl).list<Combine>().candidates().back().name, "opencl.plain");
}

// Two candidates for a made-up order of preference.
Verdict refuse_always(const Combine::Problem&, const DeviceTraits&) { return refuse("needs a {} that is not here", "thing"); }
Verdict accept_always(const Combine::Problem&, const DeviceTraits&) { return accept(); }
Result<std::unique_ptr<Combine::Kernel>> make_nothing(const Combine::Problem&, Device&) {
  return make_error(ErrorCode::kInternal, "not made");
}
constexpr Candidate<Combine> kThree[] = {
    {"t.best", refuse_always, make_nothing}, {"t.good", accept_always, make_nothing}, {"t.plain", accept_always, make_nothing}};

TEST(Select, TakesTheFirstThatAcceptsAndKeepsEveryReason) {
  const auto choice = select(CandidateList<Combine>(kThree), {}, DeviceTraits{});
  ASSERT_NE(choice.chosen, nullptr);
  EXPECT_EQ(choice.chosen->name, "t.good");
  ASSERT_EQ(choice.answers.size(), 3u);
  EXPECT_EQ(choice.answers[0].verdict.reason, "needs a thing that is not here");
}

TEST(Select, RunsTheForcedCandidateOrNone) {
  SelectionRules rules;
  rules.forced["combine"] = "t.plain";
  EXPECT_EQ(select(CandidateList<Combine>(kThree), {}, DeviceTraits{}, rules).chosen->name, "t.plain");
  rules.forced["combine"] = "t.best";
  const auto choice = select(CandidateList<Combine>(kThree), {}, DeviceTraits{}, rules);
  EXPECT_EQ(choice.chosen, nullptr);
  EXPECT_EQ(choice.answers[0].verdict.reason, "needs a thing that is not here");
}

TEST(Select, PassesOverADisabledCandidate) {
  SelectionRules rules;
  rules.disabled["combine t.good"] = "failed its self-test";
  const auto choice = select(CandidateList<Combine>(kThree), {}, DeviceTraits{}, rules);
  EXPECT_EQ(choice.chosen->name, "t.plain");
  EXPECT_EQ(choice.answers[1].verdict.reason, "failed its self-test");
}

}  // namespace
}  // namespace quern::ops::testing
