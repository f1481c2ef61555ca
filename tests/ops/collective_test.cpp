#include <chrono>
#include <numeric>

#include "backends/cpu/collective.h"
#include "backends/cpu/stream.h"
#include "backends/transport_trial.h"
#include "ops/gather_pieces.h"
#include "ops/ranks.h"
#include "ops/rendezvous.h"

// Every transport of the platform under test passes the same checks. QUERN_TEST_DEVICES names the devices of the ranks.

namespace quern::ops::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// Bytes that tell rank, message and place.
std::string pattern(int32_t rank, uint64_t message, size_t bytes) {
  std::string result(bytes, '\0');
  SplitMix64 bits(hash_combine(static_cast<uint64_t>(rank) + 1, message));
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = bits.next();
    std::memcpy(result.data() + i, &word, std::min<size_t>(8, bytes - i));
  }
  return result;
}

/// Numbers between -1 and 1 of a dtype.
std::string numbers(uint64_t seed, DType dtype, int64_t n) {
  SplitMix64 bits(hash_combine(seed, 77));
  std::string result(static_cast<size_t>(n) * dtype_size(dtype), '\0');
  for (int64_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(static_cast<int64_t>(bits.next())) * 0x1p-63f;
    if (dtype == DType::kBF16) {
      const bf16 rounded = to_bf16(value);
      std::memcpy(result.data() + 2 * i, &rounded, 2);
    } else {
      std::memcpy(result.data() + 4 * i, &value, 4);
    }
  }
  return result;
}

std::string gathered(const std::vector<std::string>& parts, int64_t rows) {
  std::string all;
  for (int64_t row = 0; row < rows; ++row)
    for (const std::string& part : parts) all.append(part, static_cast<size_t>(row) * (part.size() / static_cast<size_t>(rows)), part.size() / static_cast<size_t>(rows));
  return all;
}

Platform platform() { return backends::open_device(device_under_test(), {.num_threads = 1}).value()->traits().platform; }

/// Why the devices of the tests cannot be joined by a transport; empty: they can, or there are not two.
std::string refusal(const Transport& transport) {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Device*> pointers;
  for (const std::string& name : rank_device_names(2)) {
    devices.push_back(backends::open_device(name, {.num_threads = 1}).value());
    pointers.push_back(devices.back().get());
  }
  return pointers.empty() ? std::string() : transport.probe(pointers).reason;
}

class Collectives : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!candidate_under_test().ends_with(".plain")) GTEST_SKIP() << "once for a platform";
    const auto list = backends::transports(platform()).transports();
    const auto found = std::find_if(list.begin(), list.end(), [](const Transport& transport) { return transport.name == GetParam(); });
    if (found == list.end()) GTEST_SKIP() << "no transport of this platform";
    if (const std::string reason = refusal(*found); !reason.empty()) GTEST_SKIP() << reason;
  }
  /// Group sizes for which there are devices.
  static std::vector<int32_t> sizes() {
    std::vector<int32_t> result;
    for (const int32_t n : {2, 3, 4})
      if (!rank_device_names(n).empty()) result.push_back(n);
    return result;
  }
  static CollectiveOptions options(std::chrono::milliseconds deadline = 60s) { return {.transport = GetParam(), .max_message_bytes = 1u << 20, .deadline = deadline}; }
};
#define REQUIRE_RANKS(n) \
  if (rank_device_names(n).empty()) GTEST_SKIP() << "fewer than " << (n) << " devices: name them in QUERN_TEST_DEVICES"

TEST_P(Collectives, GatherTensorsOfAnyWidthSideBySide) {
  REQUIRE_RANKS(2);
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options());
    uint64_t message = 0;
    for (const int64_t rows : {0, 1, 7, 64})
      for (const std::vector<int64_t>& all_widths : {std::vector<int64_t>{5120, 5120, 5120, 5120}, {1, 1, 1, 1}, {1000, 37, 0, 3}, {0, 5, 0, 0}, {0, 0, 0, 0}, {300'000, 1, 500'000, 10}}) {
        const std::vector<int64_t> widths(all_widths.begin(), all_widths.begin() + n);
        SCOPED_TRACE(::testing::Message() << n << " ranks, " << rows << " rows of " << fmt::format("{}", fmt::join(widths, ", ")));
        ++message;
        ranks.run([&](RankUnderTest& rank) {
          std::vector<std::string> parts;
          for (int32_t r = 0; r < n; ++r) parts.push_back(pattern(r, message, static_cast<size_t>(rows * widths[static_cast<size_t>(r)] * 2)));
          const TensorView mine = rank.tensor(DType::kBF16, {rows, widths[static_cast<size_t>(rank.rank())]}, parts[static_cast<size_t>(rank.rank())]);
          const TensorView all = rank.tensor(DType::kBF16, {rows, std::accumulate(widths.begin(), widths.end(), int64_t{0})});
          Launch launch = rank.launch();
          rank.end().all_gather(mine, all, widths, launch);
          EXPECT_EQ(rank.download(all) == (rows == 0 ? std::string() : gathered(parts, rows)), true) << "rank " << rank.rank();
          EXPECT_EQ(rank.download(mine) == parts[static_cast<size_t>(rank.rank())], true);
        });
      }
  }
}

TEST_P(Collectives, GatherFortyMegabytes) {
  REQUIRE_RANKS(2);
  Ranks ranks(2, options());
  const std::vector<int64_t> widths{30'000'000, 10'000'000};
  const std::vector<std::string> parts{pattern(0, 1, 30'000'000), pattern(1, 1, 10'000'000)};
  ranks.run([&](RankUnderTest& rank) {
    const auto me = static_cast<size_t>(rank.rank());
    const TensorView mine = rank.tensor(DType::kU8, {1, widths[me]}, parts[me]), all = rank.tensor(DType::kU8, {1, 40'000'000});
    Launch launch = rank.launch();
    rank.end().all_gather(mine, all, widths, launch);
    EXPECT_EQ(rank.download(all) == parts[0] + parts[1], true);
  });
}

TEST_P(Collectives, AddPartialsAsCombineDoesOnGatheredOnes) {
  REQUIRE_RANKS(2);
  for (const int32_t n : sizes())
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      Ranks ranks(n, options());
      for (const auto& [rows, hidden] : {std::pair<int64_t, int64_t>{0, 5120}, {1, 5120}, {64, 5120}, {3, 37}, {230, 5120}, {n == 2 && dtype == DType::kBF16 ? 4000 : 7, 5120}}) {
        SCOPED_TRACE(::testing::Message() << n << " ranks, " << dtype_name(dtype) << " [" << rows << ", " << hidden << "]");
        std::vector<std::string> partials, sums(static_cast<size_t>(n));
        for (int32_t r = 0; r < n; ++r) partials.push_back(numbers(static_cast<uint64_t>(r), dtype, rows * hidden));
        const std::string residual = numbers(99, dtype, rows * hidden);
        ranks.run([&, rows = rows, hidden = hidden](RankUnderTest& rank) {
          const auto combine = rank.combine(hidden, dtype, n);
          std::vector<TensorView> views;
          for (const std::string& partial : partials) views.push_back(rank.tensor(dtype, {rows, hidden}, partial));
          const TensorView expected = rank.tensor(dtype, {rows, hidden}, residual), x = rank.tensor(dtype, {rows, hidden}, residual);
          Launch launch = rank.launch();
          combine->enqueue(views, expected, launch);
          rank.end().add_partials(*combine, views[static_cast<size_t>(rank.rank())], x, launch);
          const std::string sum = rank.download(x);
          EXPECT_EQ(sum == rank.download(expected), true) << "rank " << rank.rank();
          EXPECT_EQ(rank.download(views[static_cast<size_t>(rank.rank())]) == partials[static_cast<size_t>(rank.rank())], true);
          sums[static_cast<size_t>(rank.rank())] = sum;
        });
        for (const std::string& sum : sums) EXPECT_EQ(sum == sums[0], true);
        EXPECT_EQ(sums[0] == residual, rows == 0);
      }
    }
}

TEST_P(Collectives, PassMessagesFromStageToStageInOrder) {
  REQUIRE_RANKS(2);
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options());
    // Every rank sends ahead two messages to the next and takes those of the one before, of sizes on both sides of a piece; then all the other way round.
    for (const int32_t direction : {1, n - 1})
      for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{10'240}, int64_t{1} << 20, (int64_t{1} << 20) + 1, int64_t{3'000'001}}) {
        SCOPED_TRACE(::testing::Message() << n << " ranks, " << bytes << " bytes, to the rank " << direction << " further");
        ranks.run([&](RankUnderTest& rank) {
          const int32_t to = (rank.rank() + direction) % n, from = (rank.rank() + n - direction) % n;
          std::vector<TensorView> out, in;
          for (uint64_t i : {0, 1}) {
            out.push_back(rank.tensor(DType::kU8, {bytes}, pattern(rank.rank(), i, static_cast<size_t>(bytes))));
            in.push_back(rank.tensor(DType::kU8, {bytes}));
          }
          Launch launch = rank.launch();
          // A ring of senders whose messages fill all slots would stand still: one rank takes before it sends.
          const auto send = [&] { for (const TensorView& view : out) rank.end().send(view, to, launch); };
          const auto receive = [&] { for (const TensorView& view : in) rank.end().receive(view, from, launch); };
          if (rank.rank() == 0) receive();
          send();
          if (rank.rank() != 0) receive();
          for (uint64_t i : {0, 1}) EXPECT_EQ(rank.download(in[i]) == pattern(from, i, static_cast<size_t>(bytes)), true) << "rank " << rank.rank();
        });
      }
  }
}

TEST_P(Collectives, KeepAThousandMessagesApart) {
  REQUIRE_RANKS(2);
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options());
    constexpr int64_t kHidden = 320, kSteps = 1000;
    std::vector<std::string> partials;
    for (int32_t r = 0; r < n; ++r) partials.push_back(numbers(static_cast<uint64_t>(r), DType::kBF16, kSteps * kHidden));
    const std::string residual = numbers(99, DType::kBF16, kHidden);
    ranks.run([&](RankUnderTest& rank) {
      const auto combine = rank.combine(kHidden, DType::kBF16, n);
      std::vector<TensorView> all_partials;
      for (const std::string& partial : partials) all_partials.push_back(rank.tensor(DType::kBF16, {kSteps, kHidden}, partial));
      const TensorView x = rank.tensor(DType::kBF16, {1, kHidden}, residual), expected_x = rank.tensor(DType::kBF16, {1, kHidden}, residual);
      const TensorView partial = rank.tensor(DType::kBF16, {1, kHidden});
      const TensorView results = rank.tensor(DType::kBF16, {kSteps, n * kHidden}), expected = rank.tensor(DType::kBF16, {kSteps, kHidden});
      const std::vector<int64_t> widths(static_cast<size_t>(n), kHidden);
      Launch launch = rank.launch();
      Random pause(static_cast<uint64_t>(rank.rank()));
      for (int64_t i = 0; i < kSteps; ++i) {
        // What was shown to the others is overwritten in the next step: who reads too early or too late, sees another sum.
        rank.stream().copy(all_partials[static_cast<size_t>(rank.rank())].part(i, 1), partial);
        rank.end().add_partials(*combine, partial, x, launch);
        rank.end().all_gather(x, results.part(i, 1), widths, launch);
        std::vector<TensorView> views;
        for (const TensorView& view : all_partials) views.push_back(view.part(i, 1));
        combine->enqueue(views, expected_x, launch);
        rank.stream().copy(expected_x, expected.part(i, 1));
        if (pause.below(100) == 0) std::this_thread::sleep_for(1ms);
      }
      const std::string found = rank.download(results), wanted = rank.download(expected);
      const auto row = static_cast<size_t>(kHidden * 2);
      for (size_t i = 0; i < static_cast<size_t>(kSteps * n); ++i) ASSERT_EQ(found.substr(i * row, row) == wanted.substr(i / static_cast<size_t>(n) * row, row), true) << "step " << i / static_cast<size_t>(n);
    });
  }
}

TEST_P(Collectives, GiveTheSameBitsAsEveryOtherTransport) {
  REQUIRE_RANKS(2);
  const int32_t n = sizes().back();
  std::vector<std::string> sums;
  for (const Transport& transport : backends::transports(platform()).transports()) {
    if (!refusal(transport).empty()) continue;
    CollectiveOptions other = options();
    other.transport = transport.name;
    Ranks ranks(n, other);
    ranks.run([&](RankUnderTest& rank) {
      const auto combine = rank.combine(5120, DType::kBF16, n);
      const TensorView x = rank.tensor(DType::kBF16, {200, 5120}, numbers(99, DType::kBF16, 200 * 5120));
      const TensorView partial = rank.tensor(DType::kBF16, {200, 5120}, numbers(static_cast<uint64_t>(rank.rank()), DType::kBF16, 200 * 5120));
      Launch launch = rank.launch();
      rank.end().add_partials(*combine, partial, x, launch);
      if (std::string sum = rank.download(x); rank.rank() == 0) sums.push_back(std::move(sum));
    });
    EXPECT_EQ(sums.back() == sums.front(), true) << transport.name;
  }
}

/// A collective call, to be tried in each of its forms.
void gather_once(RankUnderTest& rank) {
  const std::vector<int64_t> widths(static_cast<size_t>(rank.end().size()), 5120);
  const TensorView mine = rank.tensor(DType::kBF16, {1, 5120}), all = rank.tensor(DType::kBF16, {1, rank.end().size() * 5120});
  Launch launch = rank.launch();
  rank.end().all_gather(mine, all, widths, launch);
}

TEST_P(Collectives, WaitForASlowRank) {
  REQUIRE_RANKS(2);
  Ranks ranks(2, options());
  ranks.run([&](RankUnderTest& rank) {
    for (int i = 0; i < 3; ++i) {
      if (rank.rank() == 1) std::this_thread::sleep_for(300ms);
      gather_once(rank);
      EXPECT_OK(rank.stream().finish());
    }
  });
}

TEST_P(Collectives, NameTheRanksMessageAndTransportWhenTheDeadlineComes) {
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options(200ms));
    std::atomic<int> failed{0};
    ranks.run([&](RankUnderTest& rank) {
      gather_once(rank);
      EXPECT_OK(rank.stream().finish());
      if (rank.rank() == 1) return;  // stops here
      gather_once(rank);
      const auto outcome = rank.stream().finish();
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, AllOf(HasSubstr("rank 1"), HasSubstr("all_gather"), HasSubstr("message 2"), HasSubstr("10240 bytes"), HasSubstr(GetParam()), HasSubstr(" s for rank 1 in")));
      // Whatever comes later waits no more, and says the same.
      for (int i = 0; i < 100; ++i) gather_once(rank);
      rank.end().send(rank.tensor(DType::kU8, {10}), 1, *std::make_unique<Launch>(rank.launch()));
      rank.end().receive(rank.tensor(DType::kU8, {10}), 1, *std::make_unique<Launch>(rank.launch()));
      EXPECT_EQ(rank.stream().finish().error().message, outcome.error().message);
      EXPECT_EQ(rank.stream().wait(rank.stream().mark()).error().message, outcome.error().message);
      ++failed;
    });
    EXPECT_EQ(failed, n - 1);
  }
}

TEST_P(Collectives, EndTheWaitForAMessageThatDoesNotCome) {
  REQUIRE_RANKS(2);
  Ranks ranks(2, options(200ms));
  ranks.run([&](RankUnderTest& rank) {
    if (rank.rank() == 1) return;
    Launch launch = rank.launch();
    rank.end().receive(rank.tensor(DType::kU8, {77}), 1, launch);
    const auto outcome = rank.stream().finish();
    ASSERT_FALSE(outcome.has_value());
    EXPECT_THAT(outcome.error().message, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("receive"), HasSubstr("message 1"), HasSubstr("77 bytes"), HasSubstr(GetParam())));
  });
}

TEST_P(Collectives, RefuseARankThatComesAfterTheOthersGaveUp) {
  REQUIRE_RANKS(2);
  Ranks ranks(2, options(200ms));
  std::atomic<bool> gave_up{false};
  ranks.run([&](RankUnderTest& rank) {
    if (rank.rank() == 1)
      while (!gave_up) std::this_thread::sleep_for(1ms);
    gather_once(rank);
    EXPECT_FALSE(rank.stream().finish().has_value());
    gather_once(rank);
    const auto outcome = rank.stream().finish();
    gave_up = true;
    ASSERT_FALSE(outcome.has_value());
    EXPECT_THAT(outcome.error().message, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr(GetParam())));
  });
}

TEST_P(Collectives, EndWithTheErrorOfAnAbort) {
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options());  // the deadline is far
    std::jthread aborts([&] {
      std::this_thread::sleep_for(50ms);
      ranks[0].end().abort(make_error(ErrorCode::kInternal, "rank 1 has lost its device"));
      ranks[0].end().abort(make_error(ErrorCode::kInternal, "a second reason"));
    });
    ranks.run([&](RankUnderTest& rank) {
      if (rank.rank() == 1) return;
      gather_once(rank);
      const auto outcome = rank.stream().finish();
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, HasSubstr("rank 1 has lost its device"));
    });
  }
}

TEST_P(Collectives, TakePartInRecordedGraphs) {
  REQUIRE_RANKS(2);
  for (const int32_t n : sizes()) {
    Ranks ranks(n, options());
    if (!ranks[0].stream().can_record()) GTEST_SKIP() << "streams of this platform do not record";
    constexpr int64_t kHidden = 5120;
    ranks.run([&](RankUnderTest& rank) {
      const auto combine = rank.combine(kHidden, DType::kBF16, n);
      std::vector<TensorView> partials;
      for (int32_t r = 0; r < n; ++r) partials.push_back(rank.tensor(DType::kBF16, {2, kHidden}, numbers(static_cast<uint64_t>(r), DType::kBF16, 2 * kHidden)));
      const std::string residual = numbers(99, DType::kBF16, 2 * kHidden);
      const TensorView x = rank.tensor(DType::kBF16, {2, kHidden}, residual), expected = rank.tensor(DType::kBF16, {2, kHidden}, residual);
      const TensorView all = rank.tensor(DType::kBF16, {2, n * kHidden});
      const std::vector<int64_t> widths(static_cast<size_t>(n), kHidden);
      Launch launch = rank.launch();
      rank.end().all_gather(partials[static_cast<size_t>(rank.rank())], all, widths, launch);  // before, between and after replays
      rank.stream().begin_recording();
      for (int i = 0; i < 3; ++i) rank.end().add_partials(*combine, partials[static_cast<size_t>(rank.rank())], x, launch);
      rank.end().all_gather(x, all, widths, launch);
      const auto graph = rank.stream().end_recording();
      ASSERT_OK(graph);
      constexpr int kReplays = 200;
      if (*graph != nullptr)
        for (int i = 0; i < kReplays; ++i) rank.stream().replay(**graph);
      for (int i = 0; i < (*graph != nullptr ? 3 * kReplays : 3); ++i) combine->enqueue(partials, expected, launch);
      const std::string sum = rank.download(x), together = rank.download(all);
      EXPECT_EQ(sum == rank.download(expected), true);
      EXPECT_EQ(together == gathered(std::vector<std::string>(static_cast<size_t>(n), sum), 2), true);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Collectives, ::testing::Values("direct", "staged", "nccl"), [](const auto& test) { return test.param; });

// What holds for the CPU alone.

class CpuCollectives : public ::testing::Test {
 protected:
  void SetUp() override {
    if (candidate_under_test() != "cpu.plain") GTEST_SKIP() << "once";
  }
};

TEST_F(CpuCollectives, SeeAMessageThatChangedInItsSlot) {
  for (const bool passes_on : {false, true}) {
    std::atomic<int> messages{0};
    const cpu::SlotHook corrupt = [&](int32_t rank, const SlotHeader& header, std::byte* data) {
      if (rank == 1 && ++messages == 3) data[header.bytes / 2] ^= std::byte{1};
    };
    Ranks ranks(2, [&](std::span<Device* const> devices) { return cpu::connect_staged(devices, {}, corrupt); });
    ranks.run([&](RankUnderTest& rank) {
      Launch launch = rank.launch();
      for (int i = 0; i < 4; ++i) {
        if (!passes_on) {
          gather_once(rank);
        } else if (rank.rank() == 1) {
          rank.end().send(rank.tensor(DType::kU8, {1000}), 0, launch);
        } else {
          rank.end().receive(rank.tensor(DType::kU8, {1000}), 1, launch);
        }
        if (i == 1) {
          EXPECT_OK(rank.stream().finish());
        }
      }
      if (rank.rank() != 0) return;
      const auto outcome = rank.stream().finish();
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("message 3"), HasSubstr("checksum"), HasSubstr("staged")));
    });
  }
}

TEST_F(CpuCollectives, SeeRanksThatComputeDifferentSteps) {
  for (const char* transport : {"direct", "staged"}) {
    Ranks ranks(2, {.transport = transport});
    ranks.run([&](RankUnderTest& rank) {
      const auto combine = rank.combine(8, DType::kBF16, 2);
      const int64_t rows = rank.rank() + 1;
      Launch launch = rank.launch();
      rank.end().add_partials(*combine, rank.tensor(DType::kBF16, {rows, 8}), rank.tensor(DType::kBF16, {rows, 8}), launch);
      const auto outcome = rank.stream().finish();
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, AllOf(HasSubstr("add_partials"), HasSubstr("message 1"), HasSubstr(transport)));
    });
  }
}

TEST_F(CpuCollectives, StopWithTheStreamOfARank) {
  // A rank whose own stream has failed takes no part, and the others hear why at once.
  for (const char* transport : {"direct", "staged"}) {
    Ranks ranks(2, {.transport = transport, .deadline = 60s});
    ranks.run([&](RankUnderTest& rank) {
      if (rank.rank() == 1) cpu::cpu_stream(rank.stream()).fail(make_error(ErrorCode::kInternal, "the device is gone"));
      gather_once(rank);
      const auto outcome = rank.stream().finish();
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, HasSubstr("the device is gone"));
    });
  }
}

TEST(Connect, RefusesATransportThatThePlatformLacks) {
  const auto a = backends::open_device("cpu", {.num_threads = 1}).value(), b = backends::open_device("cpu", {.num_threads = 1}).value();
  Device* const devices[] = {a.get(), b.get()};
  const auto unknown = backends::connect(devices, {.transport = "pigeon"});
  ASSERT_FALSE(unknown.has_value());
  EXPECT_THAT(unknown.error().message, AllOf(HasSubstr("pigeon"), HasSubstr("direct"), HasSubstr("staged")));
  const auto small = backends::connect(devices, {.transport = "", .max_message_bytes = 100});
  ASSERT_FALSE(small.has_value());
  EXPECT_THAT(small.error().message, HasSubstr("100 bytes"));
}

TEST(Connect, JoinsOneRankWithItself) {
  Ranks ranks(1, [](std::span<Device* const> devices) { return backends::connect(devices, {}); });
  ranks.run([&](RankUnderTest& rank) {
    if (rank.device().traits().platform != Platform::kCpu) return;
    const auto combine = rank.combine(4, DType::kF32, 1);
    const TensorView partial = rank.tensor(DType::kF32, {1, 4}, numbers(1, DType::kF32, 4)), x = rank.tensor(DType::kF32, {1, 4}), all = rank.tensor(DType::kF32, {1, 4});
    Launch launch = rank.launch();
    rank.end().add_partials(*combine, partial, x, launch);
    rank.end().all_gather(x, all, std::vector<int64_t>{4}, launch);
    EXPECT_EQ(rank.download(all), rank.download(partial));
  });
}

TEST(GatherPieces, CoverEveryByteOfEveryRankOnce) {
  for (const int64_t rows : {0, 1, 5})
    for (const std::vector<size_t>& row_bytes : {std::vector<size_t>{100, 100}, {7, 0, 250}, {0, 0}, {1000, 1, 999}})
      for (const size_t capacity : {64u, 100u, 300u, 4096u}) {
        std::vector<std::vector<int>> seen;
        for (const size_t width : row_bytes) seen.emplace_back(static_cast<size_t>(rows) * width, 0);
        for_each_gather_piece(rows, row_bytes, capacity, [&](const GatherPiece& piece) {
          for (size_t r = 0; r < row_bytes.size(); ++r) {
            ASSERT_LE(piece.bytes(row_bytes[r]), capacity);
            EXPECT_TRUE(piece.num_rows == 1 || piece.row_share(row_bytes[r]) == row_bytes[r]);
            for (size_t i = 0; i < piece.bytes(row_bytes[r]); ++i) ++seen[r].at(piece.offset(row_bytes[r]) + i);
          }
        });
        for (const std::vector<int>& rank : seen) EXPECT_EQ(std::count(rank.begin(), rank.end(), 1), std::ssize(rank));
      }
}

// Transports with a fault, as a start meets them.

/// Does with each call what a test wants, or passes it on.
class Faulty : public Collective {
 public:
  enum class Fault { kNone, kPeersAreZero, kFlipsAByteOfLargeMessages, kStopsAfterSomeMessages, kSlow };
  Faulty(std::unique_ptr<Collective> end, Fault fault) : end_(std::move(end)), fault_(fault) {}

  [[nodiscard]] std::string_view transport() const override { return "faulty"; }
  [[nodiscard]] int32_t rank() const override { return end_->rank(); }
  [[nodiscard]] int32_t size() const override { return end_->size(); }
  void all_gather(const TensorView& mine, const TensorView& all, std::span<const int64_t> widths, Launch& launch) override {
    if (gone()) return;
    end_->all_gather(mine, all, widths, launch);
    if (all.empty()) return;
    if (fault_ == Fault::kPeersAreZero) {
      launch.stream.fill_zero(all);
      int64_t before = 0;
      for (int32_t r = 0; r < rank(); ++r) before += widths[static_cast<size_t>(r)];
      TensorView part{all.buffer, all.offset_bytes + static_cast<size_t>(before) * dtype_size(all.dtype), mine.dtype, mine.shape};
      launch.stream.copy(mine, part);
    }
    if (fault_ == Fault::kFlipsAByteOfLargeMessages && rank() == 1 && all.size_bytes() > 1'000'000) all.data<std::byte>()[all.size_bytes() - 3] ^= std::byte{4};
  }
  void add_partials(const Combine::Kernel& combine, const TensorView& partial, const TensorView& x, Launch& launch) override {
    if (gone()) return;
    if (fault_ == Fault::kSlow) std::this_thread::sleep_for(8ms);
    end_->add_partials(combine, partial, x, launch);
  }
  void send(const TensorView& message, int32_t to, Launch& launch) override {
    if (!gone()) end_->send(message, to, launch);
  }
  void receive(const TensorView& message, int32_t from, Launch& launch) override {
    if (!gone()) end_->receive(message, from, launch);
  }
  void abort(const Error& error) override {
    if (fault_ != Fault::kStopsAfterSomeMessages) end_->abort(error);
  }

 private:
  [[nodiscard]] bool gone() { return fault_ == Fault::kStopsAfterSomeMessages && rank() == 1 && ++num_calls_ > 5; }
  std::unique_ptr<Collective> end_;
  Fault fault_;
  int num_calls_ = 0;
};

template <Faulty::Fault kFault>
Result<ops::Collectives> connect_faulty(std::span<Device* const> devices, const CollectiveOptions& options) {
  auto ends = cpu::connect_direct(devices, options);
  if (!ends) return ends;
  for (auto& end : *ends) end = std::make_unique<Faulty>(std::move(end), kFault);
  return ends;
}
Result<ops::Collectives> connect_sound(std::span<Device* const> devices, const CollectiveOptions& options) { return cpu::connect_staged(devices, options, {}); }
Verdict claims(std::span<Device* const>) { return accept(); }
Verdict refuses(std::span<Device* const>) { return refuse("device 0 reaches no memory of device 1"); }

class TransportTrials : public CpuCollectives {
 protected:
  ops::Connection try_with(const TransportList& list, const CollectiveOptions& options, int32_t n = 2) {
    std::vector<std::unique_ptr<Device>> owned;
    std::vector<Device*> devices;
    for (int32_t rank = 0; rank < n; ++rank) {
      owned.push_back(backends::open_device("cpu", {.num_threads = 1}).value());
      devices.push_back(owned.back().get());
    }
    ops::Connection connection = backends::try_list(list, devices, options, backends::kernel_table(Platform::kCpu));
    connection.ends.clear();
    for (const auto& device : owned) EXPECT_EQ(device->allocated_bytes(), 0u);
    return connection;
  }
};

TEST_F(TransportTrials, ChooseTheFirstThatWorksAndTimeAll) {
  for (const int32_t n : {2, 3}) {
    const auto connection = try_with(cpu::kTransports, {}, n);
    ASSERT_EQ(connection.trials.size(), 2u);
    for (const auto& trial : connection.trials) {
      EXPECT_EQ(trial.refusal, "");
      ASSERT_EQ(trial.times.size(), 3u);
      EXPECT_EQ(trial.times[0].bytes, 10240u);
      EXPECT_EQ(trial.times[1].bytes, 655'360u);
      for (const auto& time : trial.times) EXPECT_GT(time.seconds, 0);
      EXPECT_THAT(backends::describe(trial), AllOf(HasSubstr("works: "), HasSubstr("us for 10 KB")));
    }
    EXPECT_THAT(connection.chosen, ::testing::AnyOf("direct", "staged"));
  }
}

TEST_F(TransportTrials, CatchATransportThatLiesAboutPeerAccess) {
  static constexpr Transport kList[] = {{"direct", claims, connect_faulty<Faulty::Fault::kPeersAreZero>}, {"staged", claims, connect_sound}};
  const auto connection = try_with(TransportList(kList), {});
  EXPECT_EQ(connection.chosen, "staged");
  EXPECT_THAT(connection.trials[0].refusal, AllOf(HasSubstr("found other bytes"), HasSubstr("all_gather")));
  EXPECT_EQ(connection.trials[1].refusal, "");
  // Who asks for it by name does not get another.
  const auto forced = try_with(TransportList(kList), {.transport = "direct"});
  EXPECT_EQ(forced.chosen, "");
  ASSERT_EQ(forced.trials.size(), 1u);
  EXPECT_NE(forced.trials[0].refusal, "");
}

TEST_F(TransportTrials, CatchATransportThatCorruptsLargeMessagesOnly) {
  static constexpr Transport kList[] = {{"direct", claims, connect_faulty<Faulty::Fault::kFlipsAByteOfLargeMessages>}, {"staged", claims, connect_sound}};
  const auto connection = try_with(TransportList(kList), {});
  EXPECT_EQ(connection.chosen, "staged");
  EXPECT_THAT(connection.trials[0].refusal, AllOf(HasSubstr("rank 1 found other bytes"), HasSubstr("of 2500000")));
}

TEST_F(TransportTrials, UseNoLongerMessagesThanWillBeSent) {
  static constexpr Transport kList[] = {{"direct", claims, connect_faulty<Faulty::Fault::kFlipsAByteOfLargeMessages>}};
  for (const auto& [longest, works] : {std::pair{size_t{900'000}, true}, {size_t{1'100'001}, false}})
    for (const int32_t n : {2, 3}) {
      const auto connection = try_with(TransportList(kList), {.longest_message_bytes = longest}, n);
      ASSERT_EQ(connection.trials.size(), 1u);
      EXPECT_EQ(connection.chosen, works ? "direct" : "") << longest;
      if (works) EXPECT_EQ(connection.trials[0].times.size(), 2u) << "512 rows are longer";
      if (!works) EXPECT_THAT(connection.trials[0].refusal, HasSubstr("found other bytes"));
    }
  const auto tiny = try_with(cpu::kTransports, {.longest_message_bytes = 100, .row_bytes = 64}, 3);
  EXPECT_EQ(tiny.trials[0].times.size(), 1u);
  EXPECT_EQ(tiny.trials[0].refusal, "");
}

TEST_F(TransportTrials, PassOverATransportThatStandsStill) {
  static constexpr Transport kList[] = {{"direct", claims, connect_faulty<Faulty::Fault::kStopsAfterSomeMessages>}, {"staged", claims, connect_sound}};
  const auto connection = try_with(TransportList(kList), {.transport = "", .deadline = 1s});
  EXPECT_EQ(connection.chosen, "staged");
  EXPECT_NE(connection.trials[0].refusal, "");
}

TEST_F(TransportTrials, KeepTheReasonOfOneThatRefuses) {
  static constexpr Transport kList[] = {{"direct", refuses, connect_sound}, {"staged", claims, connect_sound}};
  const auto connection = try_with(TransportList(kList), {});
  EXPECT_EQ(connection.chosen, "staged");
  EXPECT_EQ(connection.trials[0].refusal, "device 0 reaches no memory of device 1");
}

TEST_F(TransportTrials, PassOverOneThatIsMuchSlowerThanTheFastest) {
  static constexpr Transport kList[] = {{"direct", claims, connect_faulty<Faulty::Fault::kSlow>}, {"staged", claims, connect_sound}};
  const auto connection = try_with(TransportList(kList), {});
  EXPECT_EQ(connection.trials[0].refusal, "");
  EXPECT_EQ(connection.chosen, "staged");
}

TEST(Rendezvous, NamesEveryRankThatIsMissing) {
  Rendezvous rendezvous("staged", 4, 50ms);
  Counter counters[4];
  rendezvous.advance(counters[2], 7);
  const Rendezvous::Awaited awaited[] = {{&counters[1], 1}, {&counters[2], 2}, {&counters[3], 3}};
  const auto result = rendezvous.wait(0, awaited, 7, {"all_gather", 7, 10240});
  ASSERT_FALSE(result.has_value());
  EXPECT_THAT(result.error().message, ::testing::MatchesRegex("rank 0 waited 0\\.[01] s for ranks 1 and 3 in all_gather \\(message 7, 10240 bytes, transport staged\\)"));
  EXPECT_EQ(rendezvous.goes_on(0).error().message, result.error().message);
  const auto other = rendezvous.goes_on(1);
  ASSERT_FALSE(other.has_value());
  EXPECT_THAT(other.error().message, AllOf(HasSubstr("rank 1 has stopped since rank 0 did"), HasSubstr(result.error().message)));
}

TEST(Rendezvous, CountsOnWhereThirtyTwoBitsEnd) {
  Rendezvous rendezvous("staged", 2, 50ms);
  Counter counter;
  const Rendezvous::Awaited awaited{&counter, 1};
  for (const uint64_t number : {(uint64_t{1} << 31) - 1, (uint64_t{1} << 32) - 2, (uint64_t{1} << 32) - 1, uint64_t{1} << 32, (uint64_t{1} << 32) + 1}) {
    EXPECT_FALSE(counter.reached(number)) << number;
    rendezvous.advance(counter, number);
    EXPECT_TRUE(counter.reached(number)) << number;
    EXPECT_OK(rendezvous.wait(0, {&awaited, 1}, number, {"send", number, 1}));
  }
}

TEST(Checksum, SeesEveryChangedSwappedOrMissingPiece) {
  std::string bytes = pattern(1, 1, 1000);
  const auto sum = [](const std::string& text) { return checksum(reinterpret_cast<const std::byte*>(text.data()), text.size()); };
  const uint64_t whole = sum(bytes);
  EXPECT_EQ(sum(bytes), whole);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    ASSERT_NE(sum(changed), whole) << i;
  }
  for (const size_t piece : {8, 64}) {
    std::string swapped = bytes;
    std::swap_ranges(swapped.begin(), swapped.begin() + static_cast<ptrdiff_t>(piece), swapped.begin() + static_cast<ptrdiff_t>(2 * piece));
    EXPECT_NE(sum(swapped), whole);
  }
  EXPECT_NE(sum(bytes.substr(0, 999)), whole);
  EXPECT_NE(sum(std::string(64, '\0')), sum(std::string(65, '\0')));
  EXPECT_NE(sum(std::string(64, '\0')), sum(std::string()));
}

}  // namespace
}  // namespace quern::ops::testing
