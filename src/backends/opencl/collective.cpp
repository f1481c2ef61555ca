#include "backends/opencl/collective.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <thread>

#include "backends/opencl/stream.h"
#include "ops/gather_pieces.h"
#include "ops/host_slots.h"
#include "ops/rendezvous.h"

namespace quern::opencl {

namespace {

constexpr size_t kMaxRanks = 16;

/// Slots of a rank for exchanges of all. The next piece of a message goes down while the last one is exchanged, so a rank's queue and thread meet the pieces in the order down 1, down 2, up 1,
/// down 3, up 2, ...: down n stands behind up n - 2, which waits for every rank's down n - 2, and before that a rank has copied all messages n - 4.
constexpr int32_t kSlots = 4;
constexpr int32_t kChannelSlots = 4;  // messages that a stage may be ahead of the next
constexpr size_t kAreas = 2;          // for copies up: one is filled while the other is read

/// What is sent from one rank to another: slots in the sender's memory.
struct Channel {
  std::unique_ptr<ops::Buffer> memory;
  std::array<ops::SlotHeader, kChannelSlots> headers;
  ops::Counter sent, taken;
};

/// What a rank shows the others.
struct Member {
  std::unique_ptr<ops::Buffer> slots;
  std::array<ops::SlotHeader, kSlots> headers;
  ops::Counter posted;                             // messages that others may read
  std::vector<std::unique_ptr<Channel>> channels;  // to each rank; none to itself
};

struct Group {
  Group(std::string_view transport, size_t num_ranks, const ops::CollectiveOptions& options)
      : rendezvous(transport, static_cast<int32_t>(num_ranks), options.deadline), slot_bytes(static_cast<size_t>(round_up(static_cast<int64_t>(options.max_message_bytes), 4096))) {}

  ops::Rendezvous rendezvous;
  size_t slot_bytes;
  std::vector<Member> members;
};

/// Rows of another rank's message and where they go in an area.
struct RowCopy {
  int32_t rank = 0;
  size_t row_bytes = 0, stride = 0, offset = 0;
};

/// What the thread of a rank does when its queue has come so far.
struct Job {
  enum class Kind { kPost, kCollect, kSend, kReceive } kind;
  ops::MessageId id;
  int32_t peer = -1;
  Event arrived;  // the queue stands where the message begins; of kPost: the message is in its slot
  Event gate;     // opened when others have done their part
  Event copied;   // of kSend: the message is in its slot
  Event free;     // the last copy up from the area; of none at first
  std::byte* area = nullptr;
  int64_t num_rows = 0;
  std::array<RowCopy, kMaxRanks> copies{};
  size_t num_copies = 0;
  std::shared_ptr<FirstError> stream;
};

class Staged final : public ops::Collective {
 public:
  Staged(std::shared_ptr<Group> group, int32_t rank, std::unique_ptr<ops::Buffer> areas, std::unique_ptr<ops::Buffer> partials)
      : group_(std::move(group)), rank_(rank), sent_(static_cast<size_t>(size())), received_(sent_), row_bytes_(sent_), areas_(std::move(areas)), partials_(std::move(partials)) {
    for (int32_t other = 0; other < size(); ++other)
      if (other != rank) others_.push_back({&member(other).posted, other});
    thread_ = std::thread([this] { work(); });
  }
  ~Staged() override {
    abort(make_error(ErrorCode::kCancelled, "rank {} has left its group", rank_));
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    wake_.notify_one();
    thread_.join();
    for (const Event& uploaded : uploaded_)
      if (uploaded.exists()) static_cast<void>(uploaded.wait());  // the device reads areas_
  }

  [[nodiscard]] std::string_view transport() const override { return group_->rendezvous.transport(); }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  [[nodiscard]] int32_t size() const override { return group_->rendezvous.num_ranks(); }
  void abort(const Error& error) override { group_->rendezvous.stop(rank_, error); }

  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    ops::check_gather(*this, mine, all, widths);
    if (all.empty()) return;
    Stream& stream = opencl_stream(launch.stream);
    const size_t stride = static_cast<size_t>(all.shape[1]) * dtype_size(all.dtype);
    ops::fill_row_bytes(widths, all.dtype, row_bytes_);
    const std::vector<size_t>& row_bytes = row_bytes_;
    exchange(mine, all.shape[0], "all_gather", stream, [&](const ops::GatherPiece& piece, Job& job) {
      const size_t row_length = piece.whole_rows() ? stride : 0;
      size_t place = 0, column = 0;
      struct Up {
        size_t from, to, bytes;
      };
      std::array<Up, kMaxRanks> ups;
      size_t num_ups = 0;
      if (piece.whole_rows()) ups[num_ups++] = {0, static_cast<size_t>(piece.first_row) * stride, static_cast<size_t>(piece.num_rows) * stride};
      for (int32_t r = 0; r < size(); ++r) {
        const size_t width = row_bytes[static_cast<size_t>(r)], share = piece.row_share(width);
        if (share != 0) job.copies[job.num_copies++] = {r, share, row_length, place};
        if (share != 0 && !piece.whole_rows()) ups[num_ups++] = {place, static_cast<size_t>(piece.first_row) * stride + column + piece.first_byte, share};
        place += share;
        column += width;
      }
      for (size_t i = 0; i < num_ups; ++i) copy_up(job, ups[i].from, bytes_of(all, ups[i].to, ups[i].bytes), i == 0, stream);
    });
  }

  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    CHECK(partial.shape == x.shape && partial.dtype == x.dtype && x.shape.rank() == 2);
    if (x.empty()) return;
    Stream& stream = opencl_stream(launch.stream);
    const size_t width = static_cast<size_t>(x.shape[1]) * dtype_size(x.dtype);
    CHECK(width <= group_->slot_bytes);
    std::fill(row_bytes_.begin(), row_bytes_.end(), width);
    std::vector<ops::TensorView> views(static_cast<size_t>(size()));
    exchange(partial, x.shape[0], "add_partials", stream, [&](const ops::GatherPiece& piece, Job& job) {
      const size_t bytes = piece.bytes(width);
      size_t place = 0;
      for (int32_t r = 0; r < size(); ++r) {
        if (r == rank_) {
          views[static_cast<size_t>(r)] = partial.part(piece.first_row, piece.num_rows);
          continue;
        }
        job.copies[job.num_copies++] = {r, width, width, place};
        views[static_cast<size_t>(r)] = {partials_.get(), place, x.dtype, Shape{piece.num_rows, x.shape[1]}};
        place += bytes;
      }
      copy_up(job, 0, {partials_.get(), 0, DType::kU8, Shape{static_cast<int64_t>(place)}}, true, stream);
      combine.enqueue(views, x.part(piece.first_row, piece.num_rows), launch);
    });
  }

  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    CHECK(to >= 0 && to < size() && to != rank_);
    Stream& stream = opencl_stream(launch.stream);
    Channel& channel = *member(rank_).channels[static_cast<size_t>(to)];
    for (size_t done = 0; done < message.size_bytes(); done += group_->slot_bytes) {
      if (!goes_on(stream)) return;
      const size_t bytes = std::min(group_->slot_bytes, message.size_bytes() - done);
      Job job = make_job(Job::Kind::kSend, {"send", ++sent_[static_cast<size_t>(to)], bytes}, stream);
      job.peer = to;
      const bool waits = job.id.number > kChannelSlots;
      if (waits && !gated(job, stream)) return;
      job.copied = stream.read(bytes_of(message, done, bytes), channel.memory->address() + slot_of(job.id.number, kChannelSlots), waits ? &job.gate : nullptr);
      if (!job.copied.exists()) return;
      push(std::move(job));
      stream.flush();
    }
  }

  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    CHECK(from >= 0 && from < size() && from != rank_);
    Stream& stream = opencl_stream(launch.stream);
    for (size_t done = 0; done < message.size_bytes(); done += group_->slot_bytes) {
      if (!goes_on(stream)) return;
      const size_t bytes = std::min(group_->slot_bytes, message.size_bytes() - done);
      Job job = make_job(Job::Kind::kReceive, {"receive", ++received_[static_cast<size_t>(from)], bytes}, stream);
      job.peer = from;
      take_area(job);
      if (!gated(job, stream)) return;
      copy_up(job, 0, bytes_of(message, done, bytes), true, stream);
      push(std::move(job));
      stream.flush();
    }
  }

 private:
  [[nodiscard]] Member& member(int32_t rank) const { return group_->members[static_cast<size_t>(rank)]; }
  [[nodiscard]] size_t slot_of(uint64_t number, int32_t num_slots) const { return number % static_cast<uint64_t>(num_slots) * group_->slot_bytes; }
  static ops::TensorView bytes_of(const ops::TensorView& view, size_t offset, size_t bytes) {
    return {view.buffer, view.offset_bytes + offset, DType::kU8, Shape{static_cast<int64_t>(bytes)}};
  }

  // On the thread that enqueues.

  /// False, and nothing is to be done: this rank has stopped, or its stream has failed.
  [[nodiscard]] bool goes_on(Stream& stream) const {
    if (const auto outcome = stream.outcome(); !outcome) group_->rendezvous.stop(rank_, outcome.error());
    const Result<void> outcome = group_->rendezvous.goes_on(rank_);
    if (!outcome) stream.fail(outcome.error());
    return outcome.has_value();
  }
  static Job make_job(Job::Kind kind, const ops::MessageId& id, Stream& stream) {
    Job job{};
    job.kind = kind;
    job.id = id;
    job.stream = stream.error();
    return job;
  }
  /// Gives the job a gate, and the place in the queue at which its wait for others begins.
  static bool gated(Job& job, Stream& stream) {
    auto gate = Event::make_gate(stream.context());
    if (!gate) {
      stream.fail(gate.error());
      return false;
    }
    job.gate = std::move(*gate);
    job.arrived = stream.passage();
    return job.arrived.exists();
  }
  void take_area(Job& job) {
    area_ = (area_ + 1) % kAreas;
    job.area = areas_->address() + area_ * area_bytes();
    job.free = std::exchange(uploaded_[area_], Event());
  }
  [[nodiscard]] size_t area_bytes() const { return static_cast<size_t>(size()) * group_->slot_bytes; }
  void copy_up(Job& job, size_t offset, const ops::TensorView& to, bool first, Stream& stream) { uploaded_[area_] = stream.write(job.area + offset, to, first ? &job.gate : nullptr); }

  /// Every rank's message to every rank, in pieces. bring_up(piece, job) says what is copied into the job's area and enqueues what reads it.
  template <class BringUp>
  void exchange(const ops::TensorView& mine, int64_t num_rows, std::string_view op, Stream& stream, const BringUp& bring_up) {
    struct Posted {
      ops::GatherPiece piece;
      ops::MessageId id;
    };
    std::optional<Posted> posted;
    const auto collect = [&] {
      if (!posted || !goes_on(stream)) return;
      Job job = make_job(Job::Kind::kCollect, posted->id, stream);
      job.num_rows = posted->piece.num_rows;
      take_area(job);
      auto gate = Event::make_gate(stream.context());  // the wait begins when the message was posted
      if (!gate) return stream.fail(gate.error());
      job.gate = std::move(*gate);
      bring_up(posted->piece, job);
      push(std::move(job));
      stream.flush();
    };
    ops::for_each_gather_piece(num_rows, row_bytes_, group_->slot_bytes, [&](const ops::GatherPiece& piece) {
      if (!goes_on(stream)) return;
      const size_t width = row_bytes_[static_cast<size_t>(rank_)], bytes = piece.bytes(width);
      Job job = make_job(Job::Kind::kPost, {op, ++num_posted_, bytes}, stream);
      job.arrived = bytes == 0 ? stream.passage() : stream.read(bytes_of(mine, piece.offset(width), bytes), member(rank_).slots->address() + slot_of(num_posted_, kSlots), nullptr);
      if (!job.arrived.exists()) return;
      const ops::MessageId id = job.id;
      push(std::move(job));
      stream.flush();
      collect();
      posted = Posted{piece, id};
    });
    collect();
  }

  void push(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

  // On the rank's own thread.

  void work() {
    pthread_setname_np(pthread_self(), "quern-staged");
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      const Result<void> failed = job.stream->outcome(), done = failed ? run(job) : failed;  // after a failure nothing waits
      if (done) continue;
      group_->rendezvous.stop(rank_, done.error());
      job.stream->set(done.error());  // before the gate closes: who sees the queue end finds the reason
      if (job.gate.exists()) job.gate.close();
    }
  }

  Result<void> run(const Job& job) {
    ops::Rendezvous& rendezvous = group_->rendezvous;
    if (job.arrived.exists()) RETURN_IF_ERROR(passed(job.arrived, job));
    switch (job.kind) {
      case Job::Kind::kPost:
        member(rank_).headers[job.id.number % kSlots] = {job.id.number, job.id.bytes, 0};
        rendezvous.advance(member(rank_).posted, job.id.number);
        return {};
      case Job::Kind::kCollect:
        RETURN_IF_ERROR(rendezvous.wait(rank_, others_, job.id.number, job.id));
        if (job.free.exists()) RETURN_IF_ERROR(passed(job.free, job));
        for (size_t i = 0; i < job.num_copies; ++i) {
          const RowCopy& copy = job.copies[i];
          const Member& from = member(copy.rank);
          RETURN_IF_ERROR(check(from.headers[job.id.number % kSlots], copy.rank, static_cast<size_t>(job.num_rows) * copy.row_bytes, job.id));
          const std::byte* message = from.slots->address() + slot_of(job.id.number, kSlots);
          for (int64_t row = 0; row < job.num_rows; ++row)
            std::memcpy(job.area + copy.offset + static_cast<size_t>(row) * copy.stride, message + static_cast<size_t>(row) * copy.row_bytes, copy.row_bytes);
        }
        job.gate.open();
        return {};
      case Job::Kind::kSend: {
        Channel& channel = *member(rank_).channels[static_cast<size_t>(job.peer)];
        if (job.gate.exists()) {
          const ops::Rendezvous::Awaited free{&channel.taken, job.peer};
          RETURN_IF_ERROR(rendezvous.wait(rank_, {&free, 1}, job.id.number - kChannelSlots, job.id));
          job.gate.open();
        }
        RETURN_IF_ERROR(passed(job.copied, job));
        channel.headers[job.id.number % kChannelSlots] = {job.id.number, job.id.bytes, 0};
        rendezvous.advance(channel.sent, job.id.number);
        return {};
      }
      case Job::Kind::kReceive: {
        Channel& channel = *member(job.peer).channels[static_cast<size_t>(rank_)];
        const ops::Rendezvous::Awaited sent{&channel.sent, job.peer};
        RETURN_IF_ERROR(rendezvous.wait(rank_, {&sent, 1}, job.id.number, job.id));
        if (job.free.exists()) RETURN_IF_ERROR(passed(job.free, job));
        RETURN_IF_ERROR(check(channel.headers[job.id.number % kChannelSlots], job.peer, job.id.bytes, job.id));
        std::memcpy(job.area, channel.memory->address() + slot_of(job.id.number, kChannelSlots), job.id.bytes);
        rendezvous.advance(channel.taken, job.id.number);
        job.gate.open();
        return {};
      }
    }
    CHECK_UNREACHABLE();
  }

  /// Waits for this rank's own queue.
  Result<void> passed(const Event& event, const Job& job) const {
    const Status status = event.wait();
    if (status == kSuccess) return {};
    RETURN_IF_ERROR(job.stream->outcome());
    return make_error(ErrorCode::kInternal, "the queue of rank {} failed before {} (message {}, {} bytes, transport {}): {}", rank_, job.id.op, job.id.number, job.id.bytes, transport(), describe(status));
  }
  Result<void> check(const ops::SlotHeader& header, int32_t from, size_t bytes, const ops::MessageId& id) const {
    if (header.number == id.number && header.bytes == bytes) return {};
    return make_error(ErrorCode::kInternal, "rank {} found message {} of {} bytes from rank {} where it awaited {} bytes in {} (message {}, transport {}): the ranks compute different steps", rank_,
                      header.number, header.bytes, from, bytes, id.op, id.number, transport());
  }

  std::shared_ptr<Group> group_;
  int32_t rank_;
  std::vector<ops::Rendezvous::Awaited> others_;
  // Of the thread that enqueues.
  uint64_t num_posted_ = 0;
  std::vector<size_t> sent_, received_;  // messages to and from each rank
  std::vector<size_t> row_bytes_;        // each rank's, of the call
  std::unique_ptr<ops::Buffer> areas_;     // host memory: kAreas of a slot for each rank
  std::unique_ptr<ops::Buffer> partials_;  // on the device: those of the other ranks
  std::array<Event, kAreas> uploaded_;
  size_t area_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;  // under mutex_
  bool closed_ = false;   // under mutex_
  std::thread thread_;
};

ops::Verdict probe_direct(std::span<ops::Device* const>) { return ops::refuse("OpenCL knows no way for one device to write into another's memory"); }
Result<ops::Collectives> connect_direct(std::span<ops::Device* const> devices, const ops::CollectiveOptions&) { return make_error(ErrorCode::kUnsupported, "{}", probe_direct(devices).reason); }

ops::Verdict probe_staged(std::span<ops::Device* const> devices) {
  return devices.size() <= kMaxRanks ? ops::accept() : ops::refuse("{} ranks; up to {} are supported", devices.size(), kMaxRanks);
}

constexpr ops::Transport kInOrder[] = {{"direct", probe_direct, connect_direct}, {"staged", probe_staged, connect_staged}};

}  // namespace

const ops::TransportList kTransports(kInOrder);

Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  auto group = std::make_shared<Group>("staged", devices.size(), options);
  group->members = std::vector<Member>(devices.size());
  const size_t slot_bytes = group->slot_bytes, num_others = devices.size() - 1;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    Member& member = group->members[rank];
    ASSIGN_OR_RETURN(member.slots, devices[rank]->allocate_host(kSlots * slot_bytes, "messages to other ranks"));
    for (size_t to = 0; to < devices.size(); ++to) {
      member.channels.push_back(to == rank ? nullptr : std::make_unique<Channel>());
      if (to == rank) continue;
      ASSIGN_OR_RETURN(member.channels.back()->memory, devices[rank]->allocate_host(kChannelSlots * slot_bytes, "messages to another rank"));
    }
  }
  ops::Collectives ends;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    ASSIGN_OR_RETURN(auto areas, devices[rank]->allocate_host(kAreas * devices.size() * slot_bytes, "messages from other ranks"));
    ASSIGN_OR_RETURN(auto partials, devices[rank]->allocate(num_others * slot_bytes, "partial sums of other ranks"));
    ends.push_back(std::make_unique<Staged>(group, static_cast<int32_t>(rank), std::move(areas), std::move(partials)));
  }
  return ends;
}

}  // namespace quern::opencl
