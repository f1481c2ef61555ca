#include "backends/cuda/nccl.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "backends/cuda/collective_args.h"
#include "backends/cuda/stream.h"
#include "ops/gather_pieces.h"
#include "ops/rendezvous.h"

namespace quern::cuda {

namespace {

using NcclStatus = int;  // 0: success
struct NcclComm;
constexpr int kNcclBytes = 1;  // ncclUint8
constexpr int kOldestNccl = 21400;

#define QUERN_NCCL_FUNCTIONS(X)                                                                                                                                \
  X(version, "ncclGetVersion", NcclStatus, (int* version))                                                                                                     \
  X(error_string, "ncclGetErrorString", const char*, (NcclStatus status))                                                                                      \
  X(init_all, "ncclCommInitAll", NcclStatus, (NcclComm * *comms, int num_devices, const int* devices))                                                         \
  X(destroy, "ncclCommDestroy", NcclStatus, (NcclComm * comm))                                                                                                 \
  X(abort, "ncclCommAbort", NcclStatus, (NcclComm * comm))                                                                                                     \
  X(all_gather, "ncclAllGather", NcclStatus, (const void* from, void* to, size_t count, int dtype, NcclComm* comm, StreamObject* stream))                      \
  X(send, "ncclSend", NcclStatus, (const void* from, size_t count, int dtype, int peer, NcclComm* comm, StreamObject* stream))                                 \
  X(receive, "ncclRecv", NcclStatus, (void* to, size_t count, int dtype, int peer, NcclComm* comm, StreamObject* stream))

/// The functions of libnccl that we call.
struct Nccl {
#define QUERN_MEMBER(member, name, result, parameters) result(*member) parameters = nullptr;
  QUERN_NCCL_FUNCTIONS(QUERN_MEMBER)
#undef QUERN_MEMBER

  static Result<const Nccl*> load() {
    static const Result<Nccl> nccl = open();
    if (!nccl) return nccl.error();
    return &*nccl;
  }

 private:
  static Result<Nccl> open() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
    if (library == nullptr) return make_error(ErrorCode::kUnsupported, "NCCL is not installed (libnccl.so.2 cannot be opened)");
    Nccl nccl;
#define QUERN_LOOK_UP(member, name, result, parameters)                        \
  nccl.member = reinterpret_cast<decltype(nccl.member)>(dlsym(library, name)); \
  if (nccl.member == nullptr) return make_error(ErrorCode::kUnsupported, "libnccl.so.2 is too old: it has no {}", name);
    QUERN_NCCL_FUNCTIONS(QUERN_LOOK_UP)
#undef QUERN_LOOK_UP
    int version = 0;
    if (nccl.version(&version) != 0 || version < kOldestNccl)
      return make_error(ErrorCode::kUnsupported, "libnccl.so.2 is version {}.{}, {}.{} and newer are supported", version / 10000, version % 10000 / 100, kOldestNccl / 10000, kOldestNccl % 10000 / 100);
    return nccl;
  }
};

/// NCCL's kernels wait for ever. Each of its calls stands between two kernels that tell the host how far the device has come; a thread of the group watches, and ends what waits too long.
class Group {
 public:
  Group(const Nccl& library, const ops::CollectiveOptions& options, size_t num_ranks, PinnedMemory words)
      : nccl(library), rendezvous("nccl", static_cast<int32_t>(num_ranks), options.deadline), capacity(static_cast<size_t>(round_up(static_cast<int64_t>(options.max_message_bytes), 4096))),
        ranks(num_ranks), words_(std::move(words)) {
    std::memset(words_.data(), 0, words_.size_bytes());
  }
  ~Group() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    for (Rank& rank : ranks)
      if (rank.comm != nullptr) nccl.destroy(rank.comm);
  }

  struct Rank {
    NcclComm* comm = nullptr;
    std::atomic<bool> in_call = false, failed = false;
    std::unique_ptr<ops::Buffer> count, area;  // calls begun; gathered messages: capacity bytes for each rank
    // Of the watcher.
    uint32_t seen = 0;
    std::chrono::steady_clock::time_point since;
  };
  const Nccl& nccl;
  ops::Rendezvous rendezvous;
  size_t capacity;
  std::vector<Rank> ranks;

  [[nodiscard]] Passage& passage(int32_t rank) const { return reinterpret_cast<Passage*>(words_.data())[rank]; }
  void watch() {
    watcher_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "quern-nccl");
      std::unique_lock lock(mutex_);
      while (!wake_.wait_for(lock, kInterval, [&] { return closed_; })) look();
    });
  }
  void stop(int32_t rank, Error error) {
    rendezvous.stop(rank, std::move(error));
    stopped_ = true;
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{20};
  static uint32_t value(uint32_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

  void look() {
    const auto now = std::chrono::steady_clock::now();
    for (int32_t r = 0; r < rendezvous.num_ranks(); ++r) {
      Rank& rank = ranks[static_cast<size_t>(r)];
      const uint32_t ended = value(passage(r).ended), begun = value(passage(r).begun);
      if (rank.failed || ended == begun) {
        rank.seen = begun;
        rank.since = now;
        continue;
      }
      if (rank.seen != begun) {
        rank.seen = begun;
        rank.since = now;
      }
      const auto waited = now - rank.since;
      if (stopped_ && waited >= 2 * kInterval) end(r);
      if (waited < rendezvous.deadline()) continue;
      std::vector<int32_t> missed;
      for (int32_t other = 0; other < rendezvous.num_ranks(); ++other)
        if (other != r && static_cast<int32_t>(value(passage(other).begun) - begun) < 0) missed.push_back(other);
      for (int32_t other = 0; missed.empty() && other < rendezvous.num_ranks(); ++other)
        if (other != r) missed.push_back(other);  // they have begun as many, others than this one
      std::string_view op;
      switch (passage(r).op) {
        case ExchangeOp::kAllGather: op = "all_gather"; break;
        case ExchangeOp::kAddPartials: op = "add_partials"; break;
        case ExchangeOp::kSend: op = "send"; break;
        case ExchangeOp::kReceive: op = "receive"; break;
      }
      stop(r, ops::missed_ranks(r, missed, {op, begun, passage(r).bytes}, "nccl", waited));
      end(r);
    }
  }
  /// Ends what the device of a rank waits for. A call that is being made gets a moment; one that does not come back waits itself, and ends with it.
  void end(int32_t r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    static_cast<void>(rendezvous.goes_on(r));
    if (rank.failed.exchange(true)) return;
    for (int i = 0; i < 20 && rank.in_call; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    nccl.abort(std::exchange(rank.comm, nullptr));
  }

  PinnedMemory words_;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closed_ = false;  // under mutex_
  std::thread watcher_;
};

class RankFaults final : public Stream::Watched {
 public:
  RankFaults(std::shared_ptr<Group> group, int32_t rank) : group_(std::move(group)), rank_(rank) {}
  Result<void> outcome() override { return group_->ranks[static_cast<size_t>(rank_)].failed ? group_->rendezvous.goes_on(rank_) : Result<void>(); }

 private:
  std::shared_ptr<Group> group_;
  int32_t rank_;
};

struct Functions {
  Function<PassageArgs> tell;
  Function<PlaceArgs> place;
};

class End final : public ops::Collective {
 public:
  End(std::shared_ptr<Group> group, int32_t rank, const Functions& functions)
      : group_(std::move(group)), faults_(std::make_shared<RankFaults>(group_, rank)), rank_(rank), functions_(functions), row_bytes_(static_cast<size_t>(size())) {}

  [[nodiscard]] std::string_view transport() const override { return "nccl"; }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  [[nodiscard]] int32_t size() const override { return group_->rendezvous.num_ranks(); }
  void abort(const Error& error) override { group_->stop(rank_, error); }

  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    ops::check_gather(*this, mine, all, widths);
    if (all.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    const size_t element = dtype_size(all.dtype);
    ops::fill_row_bytes(widths, all.dtype, row_bytes_);
    PlaceArgs args{};
    ExchangeArgs& exchange = args.exchange;
    exchange.num_ranks = size();
    exchange.stride = all.shape[1] * static_cast<int64_t>(element);
    exchange.mine = area().address();
    ops::for_each_gather_piece(all.shape[0], row_bytes_, group_->capacity, [&](const ops::GatherPiece& piece) {
      exchange.all = all.data<std::byte>() + static_cast<size_t>(piece.first_row) * static_cast<size_t>(exchange.stride);
      size_t longest = 0;
      int64_t column = 0;
      for (int32_t r = 0; r < size(); ++r) {
        const size_t width = row_bytes_[static_cast<size_t>(r)];
        exchange.bytes[r] = static_cast<uint32_t>(piece.bytes(width));
        exchange.row_bytes[r] = static_cast<uint32_t>(piece.row_share(width));
        exchange.offsets[r] = column + static_cast<int64_t>(piece.first_byte);
        longest = std::max<size_t>(longest, exchange.bytes[r]);
        column += static_cast<int64_t>(width);
      }
      exchange.capacity = static_cast<uint64_t>(round_up(static_cast<int64_t>(longest), 16));
      if (gather(ExchangeOp::kAllGather, mine, piece.offset(row_bytes_[static_cast<size_t>(rank_)]), exchange.bytes[rank_], exchange.capacity, stream))
        stream.launch(functions_.place, {.grid = {kExchangeBlocks}, .block = {kBulkThreads}, .programmatic = false}, args);
    });
  }

  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    CHECK(partial.shape == x.shape && partial.dtype == x.dtype && x.shape.rank() == 2);
    if (x.empty()) return;
    const size_t width = static_cast<size_t>(x.shape[1]) * dtype_size(x.dtype);
    CHECK(width <= group_->capacity);
    std::fill(row_bytes_.begin(), row_bytes_.end(), width);
    std::vector<ops::TensorView> views(static_cast<size_t>(size()));
    ops::for_each_gather_piece(x.shape[0], row_bytes_, group_->capacity, [&](const ops::GatherPiece& piece) {
      const auto bytes = piece.bytes(width), apart = static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 16));
      for (size_t r = 0; r < views.size(); ++r) views[r] = {&area(), r * apart, x.dtype, Shape{piece.num_rows, x.shape[1]}};
      if (gather(ExchangeOp::kAddPartials, partial, piece.offset(width), bytes, apart, cuda_stream(launch.stream))) combine.enqueue(views, x.part(piece.first_row, piece.num_rows), launch);
    });
  }

  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    pass(ExchangeOp::kSend, message, to, launch, [&](NcclComm* comm, StreamObject* stream) { return group_->nccl.send(message.data<std::byte>(), message.size_bytes(), kNcclBytes, to, comm, stream); });
  }
  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    pass(ExchangeOp::kReceive, message, from, launch,
         [&](NcclComm* comm, StreamObject* stream) { return group_->nccl.receive(message.data<std::byte>(), message.size_bytes(), kNcclBytes, from, comm, stream); });
  }

 private:
  [[nodiscard]] Group::Rank& own() const { return group_->ranks[static_cast<size_t>(rank_)]; }
  [[nodiscard]] ops::Buffer& area() const { return *own().area; }

  /// Every rank's `bytes` of `mine` into the area, `apart` bytes apart. False: the rank has stopped.
  bool gather(ExchangeOp op, const ops::TensorView& mine, size_t offset, size_t bytes, size_t apart, Stream& stream) {
    const size_t place = static_cast<size_t>(rank_) * apart;
    const auto length = static_cast<int64_t>(bytes);
    if (bytes != 0) stream.copy({mine.buffer, mine.offset_bytes + offset, DType::kU8, Shape{length}}, {&area(), place, DType::kU8, Shape{length}});
    return call(op, bytes, stream, [&](NcclComm* comm, StreamObject* handle) { return group_->nccl.all_gather(area().address() + place, area().address(), apart, kNcclBytes, comm, handle); });
  }
  template <class Call>
  void pass(ExchangeOp op, const ops::TensorView& message, int32_t peer, ops::Launch& launch, const Call& make) {
    CHECK(peer >= 0 && peer < size() && peer != rank_);
    if (!message.empty()) call(op, message.size_bytes(), cuda_stream(launch.stream), make);
  }

  template <class Call>
  bool call(ExchangeOp op, size_t bytes, Stream& stream, const Call& make) {
    Group::Rank& rank = own();
    rank.in_call = true;
    const bool made = make_call(op, bytes, stream, make);
    rank.in_call = false;
    return made;
  }
  template <class Call>
  bool make_call(ExchangeOp op, size_t bytes, Stream& stream, const Call& make) {
    if (watching_ != &stream) {
      stream.watch(faults_);
      watching_ = &stream;
    }
    if (const auto outcome = stream.outcome(); !outcome) group_->stop(rank_, outcome.error());
    if (const Result<void> outcome = group_->rendezvous.goes_on(rank_); !outcome) {
      stream.fail(outcome.error());
      return false;
    }
    PassageArgs args{.passage = &group_->passage(rank_), .count = reinterpret_cast<uint32_t*>(own().count->address()), .op = op, .ends = 0, .bytes = bytes};
    stream.launch(functions_.tell, kOneThread, args);
    stream.context()->make_current();
    if (const NcclStatus status = make(own().comm, stream.handle()); status != 0) {
      const Result<void> outcome = group_->rendezvous.goes_on(rank_);  // a call that was ended says no more than that
      stream.fail(!outcome ? outcome.error() : make_error(ErrorCode::kInternal, "NCCL refuses a message of {} bytes of rank {}: {}", bytes, rank_, group_->nccl.error_string(status)));
      return false;
    }
    args.ends = 1;
    stream.launch(functions_.tell, kOneThread, args);
    return true;
  }
  static constexpr LaunchShape kOneThread{};

  std::shared_ptr<Group> group_;
  std::shared_ptr<RankFaults> faults_;
  int32_t rank_;
  Functions functions_;
  std::vector<size_t> row_bytes_;  // each rank's, of the call
  const Stream* watching_ = nullptr;
};

}  // namespace

ops::Verdict probe_nccl(std::span<ops::Device* const> devices) {
  if (devices.size() > static_cast<size_t>(kMaxRanks)) return ops::refuse("{} ranks; up to {} are supported", devices.size(), kMaxRanks);
  if (const auto nccl = Nccl::load(); !nccl) return ops::refuse("{}", nccl.error().message);
  for (size_t a = 0; a < devices.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      if (cuda_device(*devices[a]).context().device == cuda_device(*devices[b]).context().device) return ops::refuse("ranks {} and {} share a GPU, for which NCCL has no way", b, a);
  return ops::accept();
}

Result<ops::Collectives> connect_nccl(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  ASSIGN_OR_RETURN(const Nccl* nccl, Nccl::load());
  const size_t n = devices.size();
  ASSIGN_OR_RETURN(auto words, PinnedMemory::allocate(cuda_device(*devices.front()).shared_context(), n * sizeof(Passage)));
  auto group = std::make_shared<Group>(*nccl, options, n, std::move(words));
  std::vector<Functions> functions;
  std::vector<int> ordinals;
  for (size_t rank = 0; rank < n; ++rank) {
    Device& device = cuda_device(*devices[rank]);
    ordinals.push_back(device.context().device);
    ASSIGN_OR_RETURN(group->ranks[rank].count, device.allocate(sizeof(uint32_t), "counter of messages"));
    ASSIGN_OR_RETURN(group->ranks[rank].area, device.allocate(n * group->capacity, "messages from other ranks"));
    ASSIGN_OR_RETURN(const auto tell, device.function<PassageArgs>("collective", "tell_passage"));
    ASSIGN_OR_RETURN(const auto place, device.function<PlaceArgs>("collective", "place_gathered"));
    functions.push_back({tell, place});
  }
  std::vector<NcclComm*> comms(n);
  if (const NcclStatus status = nccl->init_all(comms.data(), static_cast<int>(n), ordinals.data()); status != 0)
    return make_error(ErrorCode::kUnsupported, "NCCL does not join {} GPUs: {}", n, nccl->error_string(status));
  for (size_t rank = 0; rank < n; ++rank) group->ranks[rank].comm = comms[rank];
  group->watch();
  ops::Collectives ends;
  for (size_t rank = 0; rank < n; ++rank) ends.push_back(std::make_unique<End>(group, static_cast<int32_t>(rank), functions[rank]));
  return ends;
}

}  // namespace quern::cuda
