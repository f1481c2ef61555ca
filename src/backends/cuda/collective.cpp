#include "backends/cuda/collective.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "backends/cuda/collective_args.h"
#include "backends/cuda/nccl.h"
#include "backends/cuda/stream.h"
#include "ops/gather_pieces.h"
#include "ops/rendezvous.h"

namespace quern::cuda {

namespace {

/// Messages up to this size are sent as words that vouch for themselves, twice as many bytes in half the time; through host memory the bytes weigh more. To be measured again on every new kind of link.
constexpr int64_t kDirectSmallBytes = kSmallBytes, kStagedSmallBytes = 64 << 10;

struct Functions {
  Function<ExchangeArgs> gather_small, add_small, gather_bulk, add_bulk;
  Function<MessageArgs> send, receive;
};
Result<Functions> load_functions(Device& device) {
  Functions functions;
  ASSIGN_OR_RETURN(functions.gather_small, device.function<ExchangeArgs>("collective", "gather_small"));
  ASSIGN_OR_RETURN(functions.add_small, device.function<ExchangeArgs>("collective", "add_small"));
  ASSIGN_OR_RETURN(functions.gather_bulk, device.function<ExchangeArgs>("collective", "gather_bulk"));
  ASSIGN_OR_RETURN(functions.add_bulk, device.function<ExchangeArgs>("collective", "add_bulk"));
  ASSIGN_OR_RETURN(functions.send, device.function<MessageArgs>("collective", "send_message"));
  ASSIGN_OR_RETURN(functions.receive, device.function<MessageArgs>("collective", "receive_message"));
  const auto fits = [&](const auto& function, int threads) { return device.blocks_per_sm(function, threads, 0) * device.num_sms() >= kExchangeBlocks; };
  if (!fits(functions.gather_small, kSmallThreads) || !fits(functions.add_small, kSmallThreads) || !fits(functions.gather_bulk, kBulkThreads) || !fits(functions.add_bulk, kBulkThreads) ||
      !fits(functions.send, kBulkThreads) || !fits(functions.receive, kBulkThreads))
    return make_error(ErrorCode::kUnsupported, "{} has no room for {} blocks at a time, with which ranks exchange messages", device.traits().name, kExchangeBlocks);
  return functions;
}

std::string_view op_name(ExchangeOp op) {
  switch (op) {
    case ExchangeOp::kAllGather: return "all_gather";
    case ExchangeOp::kAddPartials: return "add_partials";
    case ExchangeOp::kSend: return "send";
    case ExchangeOp::kReceive: return "receive";
  }
  CHECK_UNREACHABLE();
}

/// Memory and addresses of one rank.
struct Member {
  std::unique_ptr<ops::Buffer> memory, counters;  // boxes that others or it write; ExchangeCounters
  std::vector<Mailbox*> targets;                  // where it writes for exchanges
  std::vector<int32_t> target_ranks;
  std::vector<const Mailbox*> sources;            // by rank
  std::vector<Channel*> send_channels, receive_channels;      // by rank
  std::vector<uint32_t*> send_taken, receive_taken;           // by rank
};

class Group {
 public:
  Group(std::string_view transport, const ops::CollectiveOptions& options, size_t num_ranks, PinnedMemory words)
      : rendezvous(transport, static_cast<int32_t>(num_ranks), options.deadline), capacity(static_cast<uint64_t>(round_up(static_cast<int64_t>(options.max_message_bytes), 4096))), words_(std::move(words)) {
    static_assert(std::is_trivially_copyable_v<GroupWords>);
    std::memset(words_.data(), 0, sizeof(GroupWords));
  }
  ops::Rendezvous rendezvous;
  uint64_t capacity;
  std::vector<Member> members;

  [[nodiscard]] GroupWords* words() const { return reinterpret_cast<GroupWords*>(words_.data()); }
  /// Host and devices hear of it.
  void stop(int32_t rank, Error error) {
    rendezvous.stop(rank, std::move(error));
    std::atomic_ref(words()->stopped).store(1, std::memory_order_release);
  }
  /// What the devices have told: first those that came to their deadline, since the others stopped for them.
  void read_faults() {
    for (int32_t rank = 0; rank < rendezvous.num_ranks(); ++rank)
      if (const Fault* fault = fault_of(rank); fault != nullptr && fault->kind == FaultKind::kDeadline) {
        std::vector<int32_t> missed;
        for (int32_t other = 0; other < rendezvous.num_ranks(); ++other)
          if ((fault->missed >> other & 1) != 0) missed.push_back(other);
        stop(rank, ops::missed_ranks(rank, missed, {op_name(fault->op), fault->number, fault->bytes}, rendezvous.transport(), std::chrono::nanoseconds(fault->waited_ns)));
      }
  }
  /// Null: none.
  [[nodiscard]] const Fault* fault_of(int32_t rank) const {
    Fault& fault = words()->faults[rank];
    return std::atomic_ref(fault.kind).load(std::memory_order_acquire) == FaultKind::kNone ? nullptr : &fault;
  }

 private:
  PinnedMemory words_;
};

/// What a stream asks about its rank.
class RankFaults final : public Stream::Watched {
 public:
  RankFaults(std::shared_ptr<Group> group, int32_t rank) : group_(std::move(group)), rank_(rank) {}
  Result<void> outcome() override {
    if (group_->fault_of(rank_) == nullptr) return {};
    group_->read_faults();
    return group_->rendezvous.goes_on(rank_);
  }

 private:
  std::shared_ptr<Group> group_;
  int32_t rank_;
};

class End final : public ops::Collective {
 public:
  End(std::shared_ptr<Group> group, int32_t rank, const Functions& functions, int64_t small_bytes)
      : group_(std::move(group)), faults_(std::make_shared<RankFaults>(group_, rank)), rank_(rank), functions_(functions), small_bytes_(small_bytes), row_bytes_(static_cast<size_t>(size())) {
    const Member& member = group_->members[static_cast<size_t>(rank)];
    exchange_.wait = wait_args(ExchangeOp::kAllGather);
    exchange_.num_ranks = size();
    exchange_.num_targets = static_cast<int32_t>(member.targets.size());
    std::copy(member.targets.begin(), member.targets.end(), exchange_.targets);
    std::copy(member.target_ranks.begin(), member.target_ranks.end(), exchange_.target_ranks);
    std::copy(member.sources.begin(), member.sources.end(), exchange_.sources);
    exchange_.capacity = group_->capacity;
    exchange_.two_phases = size() > 2 ? 1 : 0;  // with two ranks the same bytes travel either way, and one phase is shorter
  }

  [[nodiscard]] std::string_view transport() const override { return group_->rendezvous.transport(); }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  [[nodiscard]] int32_t size() const override { return group_->rendezvous.num_ranks(); }
  void abort(const Error& error) override { group_->stop(rank_, error); }

  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    ops::check_gather(*this, mine, all, widths);
    if (all.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    const size_t element = dtype_size(all.dtype);
    ops::fill_row_bytes(widths, all.dtype, row_bytes_);
    ExchangeArgs args = exchange_;
    args.wait.op = ExchangeOp::kAllGather;
    args.stride = all.shape[1] * static_cast<int64_t>(element);
    ops::for_each_gather_piece(all.shape[0], row_bytes_, group_->capacity, [&](const ops::GatherPiece& piece) {
      const size_t my_width = row_bytes_[static_cast<size_t>(rank_)];
      args.mine = mine.empty() ? nullptr : mine.data<std::byte>() + piece.offset(my_width);
      args.all = all.data<std::byte>() + static_cast<size_t>(piece.first_row) * static_cast<size_t>(args.stride);
      args.max_bytes = 0;
      int64_t column = 0;
      for (int32_t r = 0; r < size(); ++r) {
        const size_t width = row_bytes_[static_cast<size_t>(r)];
        args.bytes[r] = static_cast<uint32_t>(piece.bytes(width));
        args.row_bytes[r] = static_cast<uint32_t>(piece.row_share(width));
        args.offsets[r] = column + static_cast<int64_t>(piece.first_byte);
        args.max_bytes = std::max(args.max_bytes, args.bytes[r]);
        column += static_cast<int64_t>(width);
      }
      exchange(functions_.gather_small, functions_.gather_bulk, args, stream);
    });
  }

  void add_partials(const ops::Combine::Kernel& /*combine: the kernels here do what it does, bit for bit*/, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    CHECK(partial.shape == x.shape && partial.dtype == x.dtype && (x.dtype == DType::kBF16 || x.dtype == DType::kF32));
    if (x.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    ExchangeArgs args = exchange_;
    args.wait.op = ExchangeOp::kAddPartials;
    args.dtype = x.dtype;
    for (size_t done = 0; done < x.size_bytes(); done += group_->capacity) {
      args.max_bytes = static_cast<uint32_t>(std::min<size_t>(group_->capacity, x.size_bytes() - done));
      std::fill_n(args.bytes, size(), args.max_bytes);
      args.mine = partial.data<std::byte>() + done;
      args.x = x.data<std::byte>() + done;
      exchange(functions_.add_small, functions_.add_bulk, args, stream);
    }
  }

  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    const Member& member = group_->members[static_cast<size_t>(rank_)];
    pass(functions_.send, ExchangeOp::kSend, message, to, member.send_channels, member.send_taken, launch);
  }
  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    const Member& member = group_->members[static_cast<size_t>(rank_)];
    pass(functions_.receive, ExchangeOp::kReceive, message, from, member.receive_channels, member.receive_taken, launch);
  }

 private:
  [[nodiscard]] WaitArgs wait_args(ExchangeOp op) const {
    return {reinterpret_cast<ExchangeCounters*>(group_->members[static_cast<size_t>(rank_)].counters->address()), group_->words(),
            static_cast<uint64_t>(std::chrono::nanoseconds(group_->rendezvous.deadline()).count()), rank_, op};
  }
  /// False, and nothing is to be done: this rank has stopped, or another has, or its stream has failed.
  [[nodiscard]] bool goes_on(Stream& stream) {
    if (watching_ != &stream) {
      stream.watch(faults_);
      watching_ = &stream;
    }
    if (const auto outcome = stream.outcome(); !outcome) group_->stop(rank_, outcome.error());
    const Result<void> outcome = group_->rendezvous.goes_on(rank_);
    if (!outcome) stream.fail(outcome.error());
    return outcome.has_value();
  }
  void exchange(const Function<ExchangeArgs>& small, const Function<ExchangeArgs>& bulk, const ExchangeArgs& args, Stream& stream) {
    if (!goes_on(stream)) return;
    const bool is_small = args.max_bytes <= small_bytes_;
    stream.launch(is_small ? small : bulk, {.grid = {kExchangeBlocks}, .block = {static_cast<unsigned>(is_small ? kSmallThreads : kBulkThreads)}, .programmatic = true}, args);
  }
  void pass(const Function<MessageArgs>& function, ExchangeOp op, const ops::TensorView& message, int32_t peer, const std::vector<Channel*>& channels, const std::vector<uint32_t*>& taken,
            ops::Launch& launch) {
    CHECK(peer >= 0 && peer < size() && peer != rank_);
    Stream& stream = cuda_stream(launch.stream);
    for (size_t done = 0; done < message.size_bytes(); done += group_->capacity) {
      if (!goes_on(stream)) return;
      const MessageArgs args{.wait = wait_args(op),
                             .peer = peer,
                             .channel = channels[static_cast<size_t>(peer)],
                             .taken = taken[static_cast<size_t>(peer)],
                             .capacity = group_->capacity,
                             .message = message.data<std::byte>() + done,
                             .bytes = static_cast<uint32_t>(std::min<size_t>(group_->capacity, message.size_bytes() - done))};
      stream.launch(function, {.grid = {kExchangeBlocks}, .block = {kBulkThreads}, .programmatic = true}, args);
    }
  }

  std::shared_ptr<Group> group_;
  std::shared_ptr<RankFaults> faults_;
  int32_t rank_;
  Functions functions_;
  int64_t small_bytes_;
  ExchangeArgs exchange_{};         // what all exchanges have in common
  std::vector<size_t> row_bytes_;   // each rank's, of the call
  const Stream* watching_ = nullptr;
};

/// Places of boxes in one piece of memory.
class Boxes {
 public:
  uint64_t take(uint64_t bytes) { return std::exchange(used_, used_ + static_cast<uint64_t>(round_up(static_cast<int64_t>(bytes), 4096))); }
  [[nodiscard]] uint64_t used() const { return used_; }

 private:
  uint64_t used_ = 0;
};
constexpr uint64_t kTakenBytes = kExchangeBlocks * sizeof(uint32_t);

template <class T>
T* at(const ops::Buffer& memory, uint64_t offset) {
  return reinterpret_cast<T*>(memory.address() + offset);
}

/// direct: a rank's memory holds what others write for it: a mailbox and a channel from each, and from each receiver what it has taken. staged: in host memory a rank's holds what it writes itself,
/// its one mailbox, a channel to each, and what it has taken from each.
Result<ops::Collectives> connect(std::string_view transport, bool direct, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  const size_t n = devices.size();
  ASSIGN_OR_RETURN(auto words, PinnedMemory::allocate(cuda_device(*devices.front()).shared_context(), sizeof(GroupWords)));
  auto group = std::make_shared<Group>(transport, options, n, std::move(words));
  group->members = std::vector<Member>(n);
  Boxes boxes;
  std::vector<uint64_t> mailboxes, channels, taken;  // offsets, the same in every rank's memory, by the other rank's place among the others
  for (size_t i = 0; i < std::max<size_t>(n - 1, 1); ++i) {
    mailboxes.push_back(direct || i == 0 ? boxes.take(box_bytes<Mailbox>(group->capacity)) : mailboxes[0]);
    channels.push_back(boxes.take(box_bytes<Channel>(group->capacity)));
    taken.push_back(boxes.take(kTakenBytes));
  }
  const auto in = [](size_t holder, size_t other) { return other > holder ? other - 1 : other; };
  std::vector<Functions> functions;
  for (size_t rank = 0; rank < n; ++rank) {
    Member& member = group->members[rank];
    Device& device = cuda_device(*devices[rank]);
    ASSIGN_OR_RETURN(member.counters, device.allocate(sizeof(ExchangeCounters), "counters of messages"));
    if (direct) {
      ASSIGN_OR_RETURN(member.memory, device.allocate(boxes.used(), "messages from other ranks"));
    } else {
      ASSIGN_OR_RETURN(member.memory, device.allocate_host(boxes.used(), "messages to other ranks"));
      std::memset(member.memory->address(), 0, boxes.used());
    }
    ASSIGN_OR_RETURN(Functions loaded, load_functions(device));
    functions.push_back(loaded);
  }
  for (size_t rank = 0; rank < n; ++rank) {
    Member& member = group->members[rank];
    const ops::Buffer& own = *member.memory;
    for (size_t other = 0; other < n; ++other) {
      const ops::Buffer& theirs = *group->members[other].memory;
      const size_t mine_there = other == rank ? 0 : in(other, rank), there = other == rank ? 0 : in(rank, other);
      if (direct && other != rank) {
        member.targets.push_back(at<Mailbox>(theirs, mailboxes[mine_there]));
        member.target_ranks.push_back(static_cast<int32_t>(other));
      }
      member.sources.push_back(direct ? at<Mailbox>(own, mailboxes[there]) : at<Mailbox>(theirs, mailboxes[0]));  // its own is not read
      member.send_channels.push_back(direct ? at<Channel>(theirs, channels[mine_there]) : at<Channel>(own, channels[there]));
      member.receive_channels.push_back(direct ? at<Channel>(own, channels[there]) : at<Channel>(theirs, channels[mine_there]));
      member.send_taken.push_back(direct ? at<uint32_t>(own, taken[there]) : at<uint32_t>(theirs, taken[mine_there]));
      member.receive_taken.push_back(direct ? at<uint32_t>(theirs, taken[mine_there]) : at<uint32_t>(own, taken[there]));
    }
    if (!direct && n > 1) {
      member.targets.push_back(at<Mailbox>(own, mailboxes[0]));
      member.target_ranks.push_back(-1);
    }
  }
  ops::Collectives ends;
  for (size_t rank = 0; rank < n; ++rank) ends.push_back(std::make_unique<End>(group, static_cast<int32_t>(rank), functions[rank], direct ? kDirectSmallBytes : kStagedSmallBytes));
  return ends;
}

ops::Verdict accepts_number(std::span<ops::Device* const> devices) {
  return devices.size() <= static_cast<size_t>(kMaxRanks) ? ops::accept() : ops::refuse("{} ranks; up to {} are supported", devices.size(), kMaxRanks);
}

ops::Verdict probe_direct(std::span<ops::Device* const> devices) {
  if (const ops::Verdict verdict = accepts_number(devices); !verdict.accepted) return verdict;
  for (size_t a = 0; a < devices.size(); ++a)
    for (size_t b = 0; b < devices.size(); ++b) {
      const Context &from = cuda_device(*devices[a]).context(), &to = cuda_device(*devices[b]).context();
      if (from.device == to.device) continue;
      int can = 0;
      if (const Status status = from.driver.can_access_peer(&can, from.device, to.device); status != kSuccess)
        return ops::refuse("the driver does not say whether rank {} reaches the memory of rank {}: {}", a, b, from.driver.describe(status));
      if (can == 0) return ops::refuse("the driver gives rank {} ({}) no access to the memory of rank {} ({})", a, from.device_name, b, to.device_name);
    }
  return ops::accept();
}

constexpr ops::Transport kInOrder[] = {{"direct", probe_direct, connect_direct}, {"staged", accepts_number, connect_staged}, {"nccl", probe_nccl, connect_nccl}};

}  // namespace

const ops::TransportList kTransports(kInOrder);

Result<ops::Collectives> connect_direct(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  for (ops::Device* const a : devices)
    for (ops::Device* const b : devices) {
      const Context &from = cuda_device(*a).context(), &to = cuda_device(*b).context();
      if (from.device == to.device) continue;
      from.make_current();
      if (const Status status = from.driver.enable_peer_access(to.handle, 0); status != kSuccess && status != kPeerAccessAlreadyEnabled)
        return make_error(ErrorCode::kUnsupported, "the driver gives {} no access to the memory of another: {}", from.device_name, from.driver.describe(status));
    }
  return connect("direct", true, devices, options);
}

Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) { return connect("staged", false, devices, options); }

}  // namespace quern::cuda
