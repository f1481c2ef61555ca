// The kernels through which ranks on GPUs exchange messages, run thread by thread on a CPU (emulated_cuda/), since few machines have two GPUs: what they write, in which order they may, and that they
// end. What a real memory system does, the tests of collectives show on one.

#include <bit>
#include <cstdlib>
#include <random>

#include "support/test_support.h"

#define cuda emulated_cuda  // the program has the real namespace as well
#define QUERN_EMULATED_EXCHANGE
#include "backends/cuda/collective.cu"

namespace quern::ops::testing {
namespace {

using namespace quern::emulated_cuda;

constexpr uint64_t kCapacity = 8192;
static_assert(kSmallBytes < kCapacity);

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
/// Zeroed memory of a page's alignment.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) { std::memset(bytes_.get(), 0, bytes); }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(bytes_.get());
  }

 private:
  std::unique_ptr<std::byte, Free> bytes_;
};

/// `count` bytes `offset` into memory, between bytes that nobody may touch.
class Guarded {
 public:
  Guarded(size_t count, size_t offset) : count_(count), offset_(offset), memory_(count + offset + kGuard) { std::memset(memory_.as<char>(), kMark, count + offset + kGuard); }
  Guarded(const std::string& bytes, size_t offset) : Guarded(bytes.size(), offset) { std::memcpy(data(), bytes.data(), bytes.size()); }
  [[nodiscard]] char* data() const { return memory_.as<char>() + offset_; }
  [[nodiscard]] std::string bytes() const { return {data(), count_}; }
  [[nodiscard]] bool intact() const {
    for (size_t i = 0; i < offset_ + count_ + kGuard; ++i)
      if ((i < offset_ || i >= offset_ + count_) && memory_.as<char>()[i] != kMark) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr char kMark = 0x5a;
  size_t count_, offset_;
  Memory memory_;
};

/// The memory of a group; who writes where depends on the transport.
class Boxes {
 public:
  Boxes(int num_ranks, bool direct) : num_ranks_(num_ranks), direct_(direct), words_(sizeof(GroupWords)) {
    for (int i = 0; i < num_ranks; ++i) counters_.emplace_back(sizeof(ExchangeCounters));
    for (int i = 0; i < num_ranks * num_ranks; ++i) {
      mailboxes_.emplace_back(box_bytes<Mailbox>(kCapacity));
      channels_.emplace_back(box_bytes<Channel>(kCapacity));
      taken_.emplace_back(sizeof(uint32_t) * kExchangeBlocks);
    }
  }
  [[nodiscard]] GroupWords& words() const { return *words_.as<GroupWords>(); }
  [[nodiscard]] ExchangeCounters& counters(int rank) const { return *counters_[static_cast<size_t>(rank)].as<ExchangeCounters>(); }
  [[nodiscard]] WaitArgs wait(int rank, ExchangeOp op, uint64_t deadline_ns) const { return {&counters(rank), &words(), deadline_ns, rank, op}; }

  [[nodiscard]] ExchangeArgs exchange(int rank, ExchangeOp op, uint64_t deadline_ns = kFarDeadline) const {
    ExchangeArgs args{};
    args.wait = wait(rank, op, deadline_ns);
    args.num_ranks = num_ranks_;
    args.capacity = kCapacity;
    args.two_phases = num_ranks_ > 2 ? 1 : 0;
    for (int other = 0; other < num_ranks_; ++other) {
      args.sources[other] = of(mailboxes_, direct_ ? rank : other, other).as<Mailbox>();
      if (!direct_ || other == rank) continue;
      args.target_ranks[args.num_targets] = other;
      args.targets[args.num_targets++] = of(mailboxes_, other, rank).as<Mailbox>();
    }
    if (direct_ || num_ranks_ == 1) return args;
    args.target_ranks[0] = -1;
    args.targets[args.num_targets++] = of(mailboxes_, rank, rank).as<Mailbox>();
    return args;
  }
  [[nodiscard]] MessageArgs message(int from, int to, ExchangeOp op) const {
    const bool sends = op == ExchangeOp::kSend;
    return {.wait = wait(sends ? from : to, op, kFarDeadline),
            .peer = sends ? to : from,
            .channel = of(channels_, direct_ ? to : from, direct_ ? from : to).as<Channel>(),
            .taken = of(taken_, direct_ ? from : to, direct_ ? to : from).as<uint32_t>(),
            .capacity = kCapacity,
            .message = nullptr,
            .bytes = 0};
  }

 private:
  static constexpr uint64_t kFarDeadline = 60'000'000'000;
  [[nodiscard]] const Memory& of(const std::vector<Memory>& boxes, int holder, int other) const { return boxes[static_cast<size_t>(holder * num_ranks_ + other)]; }
  int num_ranks_;
  bool direct_;
  Memory words_;
  std::vector<Memory> counters_, mailboxes_, channels_, taken_;  // the last three by holder and other rank
};

void run(void (*kernel)(ExchangeArgs), int num_threads, const ExchangeArgs& args) { emulated::launch(kernel, kExchangeBlocks, num_threads, args); }
void run(void (*kernel)(MessageArgs), const MessageArgs& args) { emulated::launch(kernel, kExchangeBlocks, kBulkThreads, args); }

/// work(rank), on a thread of each.
template <class Work>
void on_all_ranks(int num_ranks, const Work& work) {
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back(work, rank);
}

std::string random_bytes(uint64_t seed, size_t bytes) {
  std::mt19937_64 random(seed);
  std::string result(bytes, '\0');
  for (char& byte : result) byte = static_cast<char>(random());
  return result;
}
/// Finite numbers of a dtype.
std::string random_numbers(uint64_t seed, DType dtype, size_t bytes) {
  std::mt19937_64 random(seed);
  std::string result(bytes, '\0');
  for (size_t i = 0; i < bytes; i += dtype_size(dtype)) {
    const float value = std::ldexp(static_cast<float>(static_cast<int64_t>(random() >> 40)) - 8388608.0f, -20);
    if (dtype == DType::kF32) {
      std::memcpy(result.data() + i, &value, 4);
    } else {
      const bf16 rounded = to_bf16(value);
      std::memcpy(result.data() + i, &rounded, 2);
    }
  }
  return result;
}
float number_at(const std::string& bytes, DType dtype, size_t i) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  }
  bf16 value;
  std::memcpy(&value, bytes.data() + 2 * i, 2);
  return to_f32(value);
}
float rounded(DType dtype, float value) { return dtype == DType::kF32 ? value : to_f32(to_bf16(value)); }

struct Case {
  int num_ranks;
  bool direct;
};
class CollectiveKernels : public ::testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] int num_ranks() const { return GetParam().num_ranks; }
  Boxes boxes{GetParam().num_ranks, GetParam().direct};
};

TEST_P(CollectiveKernels, AddAndGatherWhateverTheSizeAndAlignmentWhileNumbersWrap) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    for (auto& block : boxes.counters(rank).words) std::fill(std::begin(block), std::end(block), uint32_t{0} - 5);
    std::fill(std::begin(boxes.counters(rank).bulks), std::end(boxes.counters(rank).bulks), uint32_t{0} - 5);
  }
  struct Call {
    bool adds, bulk;
    DType dtype;
    size_t bytes, offset;
    int64_t rows;
    std::vector<size_t> widths;
  };
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
  std::vector<Call> calls;
  for (int i = 0; i < 40; ++i) {
    Call call{.adds = below(3) != 0, .bulk = below(2) != 0, .dtype = below(2) != 0 ? DType::kBF16 : DType::kF32, .bytes = 0, .offset = below(3) == 0 ? 4u : 0u, .rows = 0, .widths = {}};
    const size_t limit = call.bulk ? kCapacity : static_cast<size_t>(kSmallBytes);
    call.bytes = 4 * (1 + below(limit / 4));
    call.rows = static_cast<int64_t>(1 + below(5));
    for (int rank = 0; rank < num_ranks(); ++rank) call.widths.push_back(rank > 0 && below(4) == 0 ? 0 : 1 + below(limit / static_cast<size_t>(call.rows)));
    calls.push_back(call);
  }
  on_all_ranks(num_ranks(), [&](int rank) {
    const auto me = static_cast<size_t>(rank);
    for (size_t i = 0; i < calls.size(); ++i) {
      const Call& call = calls[i];
      const auto seed = [&](size_t r) { return 100 * i + r; };
      std::vector<std::string> messages;
      if (call.adds) {
        for (size_t r = 0; r < call.widths.size(); ++r) messages.push_back(random_numbers(seed(r), call.dtype, call.bytes));
        const std::string before = random_numbers(seed(99), call.dtype, call.bytes);
        const Guarded mine(messages[me], call.offset), x(before, call.offset);
        ExchangeArgs args = boxes.exchange(rank, ExchangeOp::kAddPartials);
        args.dtype = call.dtype;
        args.max_bytes = static_cast<uint32_t>(call.bytes);
        std::fill_n(args.bytes, num_ranks(), args.max_bytes);
        args.mine = mine.data();
        args.x = x.data();
        if (call.bulk) run(add_bulk, kBulkThreads, args);
        else run(add_small, kSmallThreads, args);
        const std::string after = x.bytes();
        bool same = x.intact();
        for (size_t e = 0; e < call.bytes / dtype_size(call.dtype); ++e) {
          float sum = 0;
          for (const std::string& message : messages) sum += number_at(message, call.dtype, e);
          same = same && number_at(after, call.dtype, e) == rounded(call.dtype, number_at(before, call.dtype, e) + rounded(call.dtype, sum));
        }
        EXPECT_TRUE(same) << "call " << i << ", rank " << rank << ", " << call.bytes << " bytes";
      } else {
        ExchangeArgs args = boxes.exchange(rank, ExchangeOp::kAllGather);
        for (size_t r = 0; r < call.widths.size(); ++r) {
          messages.push_back(random_bytes(seed(r), static_cast<size_t>(call.rows) * call.widths[r]));
          args.row_bytes[r] = static_cast<uint32_t>(call.widths[r]);
          args.bytes[r] = static_cast<uint32_t>(messages[r].size());
          args.max_bytes = std::max(args.max_bytes, args.bytes[r]);
          args.offsets[r] = args.stride;
          args.stride += static_cast<int64_t>(call.widths[r]);
        }
        const Guarded mine(messages[me], call.offset), all(static_cast<size_t>(call.rows * args.stride), call.offset);
        args.mine = mine.data();
        args.all = all.data();
        if (call.bulk) run(gather_bulk, kBulkThreads, args);
        else run(gather_small, kSmallThreads, args);
        std::string expected;
        for (size_t row = 0; row < static_cast<size_t>(call.rows); ++row)
          for (size_t r = 0; r < call.widths.size(); ++r) expected += messages[r].substr(row * call.widths[r], call.widths[r]);
        EXPECT_TRUE(all.bytes() == expected && all.intact()) << "call " << i << ", rank " << rank;
      }
    }
  });
  for (int rank = 0; rank < num_ranks(); ++rank)
    for (const uint32_t count : boxes.counters(rank).calls) EXPECT_EQ(count, calls.size());
}

TEST_P(CollectiveKernels, LeaveAloneWhatASlowRankStillReads) {
  if (num_ranks() == 1) GTEST_SKIP() << "one rank";
  constexpr uint32_t kBytes = 700;
  for (const bool bulk : {false, true})
    on_all_ranks(num_ranks(), [&](int rank) {
      emulated::slow = rank == 1;
      const auto content = [&](int r, size_t i) { return random_bytes(static_cast<uint64_t>(r) * 1000 + i, kBytes); };
      std::vector<std::unique_ptr<Guarded>> mine, all;
      for (size_t i = 0; i < 5; ++i) {
        mine.push_back(std::make_unique<Guarded>(content(rank, i), 0));
        all.push_back(std::make_unique<Guarded>(kBytes * static_cast<size_t>(num_ranks()), 0));
        ExchangeArgs args = boxes.exchange(rank, ExchangeOp::kAllGather);
        for (int r = 0; r < num_ranks(); ++r) {
          args.bytes[r] = args.row_bytes[r] = args.max_bytes = kBytes;
          args.offsets[r] = r * int64_t{kBytes};
        }
        args.mine = mine.back()->data();
        args.all = all.back()->data();
        if (bulk) run(gather_bulk, kBulkThreads, args);
        else run(gather_small, kSmallThreads, args);
      }
      for (size_t i = 0; i < all.size(); ++i) {
        std::string expected;
        for (int r = 0; r < num_ranks(); ++r) expected += content(r, i);
        EXPECT_TRUE(all[i]->bytes() == expected) << (bulk ? "bulk" : "small") << " message " << i << ", rank " << rank;
      }
    });
}

TEST_P(CollectiveKernels, PassMessagesRoundARingInOrder) {
  const int n = num_ranks();
  if (n == 1) GTEST_SKIP() << "one rank";
  on_all_ranks(n, [&](int rank) {
    const int to = (rank + 1) % n, from = (rank + n - 1) % n;
    for (size_t i = 0; i < 10; ++i) {
      const size_t bytes = 1 + i * 811;
      const auto content = [&](int r) { return random_bytes(static_cast<uint64_t>(r) * 100 + i, bytes); };
      const Guarded out(content(rank), 0), in(bytes, i % 2);
      MessageArgs sent = boxes.message(rank, to, ExchangeOp::kSend), received = boxes.message(from, rank, ExchangeOp::kReceive);
      sent.bytes = received.bytes = static_cast<uint32_t>(bytes);
      sent.message = out.data();
      received.message = in.data();
      run(send_message, sent);
      run(receive_message, received);
      EXPECT_TRUE(in.bytes() == content(from) && in.intact()) << "message " << i << ", rank " << rank;
    }
  });
}

TEST_P(CollectiveKernels, KeepASenderFromRunningAheadOfTheReceiver) {
  if (num_ranks() == 1) GTEST_SKIP() << "one rank";
  constexpr size_t kSizes[] = {3000, 3000, 400, 1700, 2900, 40, 3000, 900};  // a block's share of one message is another's of the next
  on_all_ranks(2, [&](int rank) {
    emulated::slow = rank == 1;
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      const Guarded message(rank == 0 ? random_bytes(i, kSizes[i]) : std::string(kSizes[i], '\0'), 0);
      MessageArgs args = boxes.message(0, 1, rank == 0 ? ExchangeOp::kSend : ExchangeOp::kReceive);
      args.bytes = static_cast<uint32_t>(kSizes[i]);
      args.message = message.data();
      run(rank == 0 ? send_message : receive_message, args);
      EXPECT_TRUE(message.bytes() == random_bytes(i, kSizes[i])) << "message " << i << ", rank " << rank;
    }
  });
}

TEST_P(CollectiveKernels, GiveUpOnceAndWaitNoMoreWhenARankIsMissing) {
  const int n = num_ranks();
  if (n == 1) GTEST_SKIP() << "one rank";
  on_all_ranks(n, [&](int rank) {
    if (rank == 1) return;
    for (const uint64_t deadline_ns : {50'000'000ull, 60'000'000'000ull, 60'000'000'000ull}) {  // the later ones are not waited for
      const std::string before = random_numbers(1, DType::kBF16, 400);
      const Guarded mine(before, 0), x(before, 0);
      ExchangeArgs args = boxes.exchange(rank, ExchangeOp::kAddPartials, deadline_ns);
      args.dtype = DType::kBF16;
      args.max_bytes = 400;
      std::fill_n(args.bytes, n, args.max_bytes);
      args.mine = mine.data();
      args.x = x.data();
      if (n % 2 == 0) run(add_bulk, kBulkThreads, args);
      else run(add_small, kSmallThreads, args);
      EXPECT_EQ(x.bytes(), before);
    }
  });
  bool deadline = false;
  for (int rank = 0; rank < n; ++rank) {
    const Fault& fault = boxes.words().faults[rank];
    EXPECT_EQ(fault.kind == FaultKind::kNone, rank == 1) << rank;
    if (rank == 1) continue;
    deadline = deadline || fault.kind == FaultKind::kDeadline;
    EXPECT_EQ(fault.op, ExchangeOp::kAddPartials);
    EXPECT_EQ(fault.number, 1u);
    EXPECT_EQ(fault.bytes, 400u);
    EXPECT_NE(fault.missed & 2u, 0u);
    EXPECT_EQ(fault.missed & 1u << rank, 0u);
    EXPECT_TRUE(fault.kind != FaultKind::kDeadline || fault.waited_ns >= 50'000'000u) << fault.waited_ns;
  }
  EXPECT_TRUE(deadline);
  EXPECT_NE(boxes.words().stopped, 0u);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveKernels, ::testing::Values(Case{1, true}, Case{2, true}, Case{3, true}, Case{4, true}, Case{2, false}, Case{3, false}, Case{4, false}),
                         [](const auto& test) { return fmt::format("{}_{}", test.param.num_ranks, test.param.direct ? "direct" : "staged"); });

}  // namespace
}  // namespace quern::ops::testing
