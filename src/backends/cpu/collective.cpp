#include "backends/cpu/collective.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu/device.h"
#include "backends/cpu/stream.h"
#include "ops/gather_pieces.h"
#include "ops/rendezvous.h"

namespace quern::cpu {

namespace {

constexpr int32_t kChannelSlots = 4;  // messages that a stage may be ahead of the next

Device& cpu_device(ops::Device& device) {
  CHECK(device.traits().platform == ops::Platform::kCpu);
  return static_cast<Device&>(device);
}

/// Rows of `row_bytes` from one place to another, by the threads of the rank.
struct RowCopy {
  const std::byte* source;
  size_t source_stride;
  std::byte* destination;
  size_t destination_stride;
  size_t row_bytes;
  int64_t num_rows;
};
void copy_rows(ThreadPool& pool, RowCopy copy) {
  if (copy.row_bytes == 0 || copy.num_rows == 0 || copy.source == copy.destination) return;
  if (copy.source_stride == copy.row_bytes && copy.destination_stride == copy.row_bytes) {
    copy.row_bytes *= static_cast<size_t>(copy.num_rows);
    copy.num_rows = 1;
  }
  constexpr size_t kPiece = 16384;
  const int64_t pieces = ceil_div(static_cast<int64_t>(copy.row_bytes), kPiece);  // of a row
  pool.parallel_for(copy.num_rows * pieces, static_cast<int64_t>(std::min(copy.row_bytes, kPiece)) / 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<size_t>(i / pieces), first = static_cast<size_t>(i % pieces) * kPiece;
      std::memcpy(copy.destination + row * copy.destination_stride + first, copy.source + row * copy.source_stride + first, std::min(kPiece, copy.row_bytes - first));
    }
  });
}

/// What is sent from one rank to another: slots in the sender's memory.
struct Channel {
  std::unique_ptr<ops::Buffer> memory;
  ops::Counter sent, taken;
};

/// What a rank of a group shows the others.
struct Member {
  ops::Counter posted;                             // messages that others may read
  ops::Counter read;                               // direct: messages of others that it has done with
  std::string_view op;                             // direct: what the posted message is for,
  ops::TensorView message;                         // and where it lies
  std::unique_ptr<ops::Buffer> slots;              // staged
  std::vector<std::unique_ptr<Channel>> channels;  // to each rank
};

struct Group {
  Group(std::string_view transport, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options)
      : rendezvous(transport, static_cast<int32_t>(devices.size()), options.deadline), layout{options.max_message_bytes, 2}, channel_layout{options.max_message_bytes, kChannelSlots} {}

  ops::Rendezvous rendezvous;
  ops::SlotLayout layout, channel_layout;
  std::vector<std::unique_ptr<Member>> members;
  SlotHook before_publishing;
};

/// What both transports do in the same way.
class End : public ops::Collective {
 public:
  End(std::shared_ptr<Group> group, Device& device, int32_t rank) : group_(std::move(group)), pool_(device.pool()), rank_(rank), sent_(static_cast<size_t>(size())), received_(sent_) {
    for (int32_t other = 0; other < size(); ++other)
      if (other != rank) others_.push_back(other);
  }

  [[nodiscard]] std::string_view transport() const override { return group_->rendezvous.transport(); }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  [[nodiscard]] int32_t size() const override { return group_->rendezvous.num_ranks(); }
  void abort(const Error& error) override { group_->rendezvous.stop(rank_, error); }

  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    CHECK(to >= 0 && to < size() && to != rank_);
    if (message.empty() || !goes_on(launch)) return;
    Channel& channel = *member(rank_).channels[static_cast<size_t>(to)];
    const ops::SlotLayout& layout = group_->channel_layout;
    for (size_t done = 0; done < message.size_bytes(); done += layout.message_bytes) {
      const size_t bytes = std::min(layout.message_bytes, message.size_bytes() - done);
      const uint64_t number = ++sent_[static_cast<size_t>(to)];
      const ops::Rendezvous::Awaited free{&channel.taken, to};
      if (number > kChannelSlots && !succeeded(group_->rendezvous.wait(rank_, {&free, 1}, number - kChannelSlots, {"send", number, bytes}), launch)) return;
      std::byte* data = channel.memory->address() + layout.data_offset(0, number);
      copy_rows(pool_, {message.data<std::byte>() + done, bytes, data, bytes, bytes, 1});
      publish(channel.sent, channel.memory->address() + layout.header_offset(0, number), {number, bytes, ops::checksum(data, bytes)}, data);
    }
  }

  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    CHECK(from >= 0 && from < size() && from != rank_);
    if (message.empty() || !goes_on(launch)) return;
    Channel& channel = *member(from).channels[static_cast<size_t>(rank_)];
    const ops::SlotLayout& layout = group_->channel_layout;
    for (size_t done = 0; done < message.size_bytes(); done += layout.message_bytes) {
      const size_t bytes = std::min(layout.message_bytes, message.size_bytes() - done);
      const uint64_t number = ++received_[static_cast<size_t>(from)];
      const ops::MessageId id{"receive", number, bytes};
      const ops::Rendezvous::Awaited sent{&channel.sent, from};
      if (!succeeded(group_->rendezvous.wait(rank_, {&sent, 1}, number, id), launch)) return;
      const std::byte* slot = channel.memory->address() + layout.header_offset(0, number);
      copy_rows(pool_, {slot + ops::SlotLayout::kHeaderBytes, bytes, message.data<std::byte>() + done, bytes, bytes, 1});
      if (!succeeded(verify(slot, from, id), launch)) return;
      group_->rendezvous.advance(channel.taken, number);
    }
  }

 protected:
  [[nodiscard]] Member& member(int32_t rank) const { return *group_->members[static_cast<size_t>(rank)]; }
  [[nodiscard]] Group& group() const { return *group_; }
  [[nodiscard]] ThreadPool& pool() const { return pool_; }
  [[nodiscard]] std::span<const int32_t> others() const { return others_; }

  /// False, and nothing is to be done: this rank has stopped, or its stream has failed.
  [[nodiscard]] bool goes_on(ops::Launch& launch) const {
    if (const auto outcome = cpu_stream(launch.stream).outcome(); !outcome) group_->rendezvous.stop(rank_, outcome.error());
    const Result<void> result = group_->rendezvous.goes_on(rank_);
    if (!result) cpu_stream(launch.stream).fail(result.error());
    return result.has_value();
  }
  [[nodiscard]] bool succeeded(const Result<void>& result, ops::Launch& launch) const {
    if (result) return true;
    group_->rendezvous.stop(rank_, result.error());
    cpu_stream(launch.stream).fail(result.error());
    return false;
  }

  /// Waits until every other rank's counter has come to `number`.
  [[nodiscard]] Result<void> wait_for_all(ops::Counter Member::*counter, uint64_t number, const ops::MessageId& id) {
    awaited_.clear();
    for (const int32_t other : others_) awaited_.push_back({&(member(other).*counter), other});
    return group_->rendezvous.wait(rank_, awaited_, number, id);
  }

  void publish(ops::Counter& counter, std::byte* slot, const ops::SlotHeader& header, std::byte* data) {
    if (group_->before_publishing) group_->before_publishing(rank_, header, data);
    std::memcpy(slot, &header, sizeof header);
    group_->rendezvous.advance(counter, header.number);
  }
  /// That the slot holds what is awaited of `from`, as it was written.
  [[nodiscard]] Result<void> verify(const std::byte* slot, int32_t from, const ops::MessageId& id) const {
    ops::SlotHeader header;
    std::memcpy(&header, slot, sizeof header);
    const auto failure = [&](std::string_view what) {
      return make_error(ErrorCode::kInternal, "rank {} {} rank {} in {} (message {}, {} bytes, transport {})", rank_, what, from, id.op, id.number, id.bytes, transport());
    };
    if (header.number != id.number || header.bytes != id.bytes)
      return failure(fmt::format("found message {} of {} bytes, which is another than it awaited, from", header.number, header.bytes));
    if (ops::checksum(slot + ops::SlotLayout::kHeaderBytes, header.bytes) != header.checksum) return failure("found changed bytes (their checksum differs) from");
    return {};
  }

 private:
  std::shared_ptr<Group> group_;
  ThreadPool& pool_;
  int32_t rank_;
  std::vector<int32_t> others_;
  std::vector<uint64_t> sent_, received_;  // messages to and from each rank
  std::vector<ops::Rendezvous::Awaited> awaited_;
};

class Direct final : public End {
 public:
  using End::End;

  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    const int64_t rows = ops::check_gather(*this, mine, all, widths);
    if (all.empty() || !meet("all_gather", mine, launch)) return;
    const size_t element = dtype_size(all.dtype), stride = static_cast<size_t>(all.shape[1]) * element;
    std::byte* destination = all.data<std::byte>();
    for (int32_t rank = 0; rank < size(); ++rank) {
      const size_t row_bytes = static_cast<size_t>(widths[static_cast<size_t>(rank)]) * element;
      if (!agrees(rank, "all_gather", row_bytes * static_cast<size_t>(rows), launch)) return;
      if (row_bytes != 0) copy_rows(pool(), {member(rank).message.data<std::byte>(), row_bytes, destination, stride, row_bytes, rows});
      destination += row_bytes;
    }
    part("all_gather", launch);
  }

  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    CHECK(partial.shape == x.shape && partial.dtype == x.dtype);
    if (x.empty() || !meet("add_partials", partial, launch)) return;
    partials_.clear();
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (!agrees(rank, "add_partials", x.size_bytes(), launch)) return;
      partials_.push_back(member(rank).message);
    }
    combine.enqueue(partials_, x, launch);
    part("add_partials", launch);
  }

 private:
  static size_t bytes_of(const ops::TensorView& view) { return view.empty() ? 0 : view.size_bytes(); }

  /// Shows the others a tensor and waits for theirs.
  [[nodiscard]] bool meet(std::string_view op, const ops::TensorView& mine, ops::Launch& launch) {
    if (!goes_on(launch)) return false;
    Member& me = member(rank());
    me.op = op;
    me.message = mine;
    group().rendezvous.advance(me.posted, ++number_);
    return succeeded(wait_for_all(&Member::posted, number_, {op, number_, bytes_of(mine)}), launch);
  }
  [[nodiscard]] bool agrees(int32_t other, std::string_view op, size_t bytes, ops::Launch& launch) const {
    const Member& them = member(other);
    if (them.op == op && bytes_of(them.message) == bytes) return true;
    return succeeded(make_error(ErrorCode::kInternal, "rank {} awaited {} bytes of rank {} in {} and found {} bytes in {} (message {}, transport {})", rank(), bytes, other, op,
                                bytes_of(them.message), them.op, number_, transport()),
                     launch);
  }
  /// The others may overwrite what they showed; returns when this rank may.
  void part(std::string_view op, ops::Launch& launch) {
    Member& me = member(rank());
    group().rendezvous.advance(me.read, number_);
    static_cast<void>(succeeded(wait_for_all(&Member::read, number_, {op, number_, bytes_of(me.message)}), launch));
  }

  uint64_t number_ = 0;
  std::vector<ops::TensorView> partials_;
};

class Staged final : public End {
 public:
  using End::End;

  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    const int64_t rows = ops::check_gather(*this, mine, all, widths);
    if (all.empty() || !goes_on(launch)) return;
    const size_t element = dtype_size(all.dtype), stride = static_cast<size_t>(all.shape[1]) * element;
    ops::fill_row_bytes(widths, all.dtype, row_bytes_);
    const size_t my_row = row_bytes_[static_cast<size_t>(rank())];
    bool goes = true;
    ops::for_each_gather_piece(rows, row_bytes_, group().layout.message_bytes, [&](const ops::GatherPiece& piece) {
      if (!goes) return;
      const std::byte* source = piece.row_share(my_row) == 0 ? nullptr : mine.data<std::byte>() + piece.offset(my_row);
      goes = exchange("all_gather", source, my_row, piece.row_share(my_row), piece.num_rows, launch);
      std::byte* row = all.data<std::byte>() + static_cast<size_t>(piece.first_row) * stride;
      for (int32_t other = 0; goes && other < size(); ++other) {
        const size_t row_bytes = row_bytes_[static_cast<size_t>(other)], share = piece.row_share(row_bytes);
        std::byte* destination = row + std::min(piece.first_byte, row_bytes);
        copy_rows(pool(), other == rank() ? RowCopy{source, my_row, destination, stride, share, piece.num_rows} : RowCopy{slot_data(other), share, destination, stride, share, piece.num_rows});
        goes = other == rank() || holds(other, "all_gather", piece.bytes(row_bytes), launch);
        row += row_bytes;
      }
    });
  }

  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    CHECK(partial.shape == x.shape && partial.dtype == x.dtype && x.shape.rank() == 2);
    if (x.empty() || !goes_on(launch)) return;
    const size_t row_bytes = static_cast<size_t>(x.shape[1]) * dtype_size(x.dtype);
    const auto piece_rows = static_cast<int64_t>(group().layout.message_bytes / row_bytes);
    CHECK(piece_rows >= 1);
    for (int64_t row = 0; row < x.shape[0]; row += piece_rows) {
      const int64_t n = std::min(piece_rows, x.shape[0] - row);
      const ops::TensorView mine = partial.part(row, n);
      if (!exchange("add_partials", mine.data<std::byte>(), row_bytes, row_bytes, n, launch)) return;
      partials_.clear();
      for (int32_t other = 0; other < size(); ++other) {
        if (other != rank() && !holds(other, "add_partials", mine.size_bytes(), launch)) return;
        partials_.push_back(other == rank() ? mine : ops::TensorView{member(other).slots.get(), group().layout.data_offset(0, number_), mine.dtype, mine.shape});
      }
      combine.enqueue(partials_, x.part(row, n), launch);
    }
  }

 private:
  [[nodiscard]] std::byte* slot(int32_t rank) const { return member(rank).slots->address() + group().layout.header_offset(0, number_); }
  [[nodiscard]] std::byte* slot_data(int32_t rank) const { return slot(rank) + ops::SlotLayout::kHeaderBytes; }

  /// Writes a message of `rows` rows to its slot and waits for the others'. What they wrote stays until this rank has published two more.
  [[nodiscard]] bool exchange(std::string_view op, const std::byte* source, size_t stride, size_t row_bytes, int64_t rows, ops::Launch& launch) {
    ++number_;
    std::byte* data = slot_data(rank());
    copy_rows(pool(), {source, stride, data, row_bytes, row_bytes, rows});
    const size_t bytes = row_bytes * static_cast<size_t>(rows);
    publish(member(rank()).posted, slot(rank()), {number_, bytes, ops::checksum(data, bytes)}, data);
    return succeeded(wait_for_all(&Member::posted, number_, {op, number_, bytes}), launch);
  }
  [[nodiscard]] bool holds(int32_t other, std::string_view op, size_t bytes, ops::Launch& launch) const { return succeeded(verify(slot(other), other, {op, number_, bytes}), launch); }

  uint64_t number_ = 0;
  std::vector<size_t> row_bytes_;  // of each rank
  std::vector<ops::TensorView> partials_;
};

/// Memory of slots; its pages take none before they are used.
Result<std::shared_ptr<Group>> make_group(std::string_view transport, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, bool slots) {
  auto group = std::make_shared<Group>(transport, devices, options);
  for (ops::Device* const device : devices) {
    auto member = std::make_unique<Member>();
    if (slots) {
      ASSIGN_OR_RETURN(member->slots, device->allocate_host(group->layout.rank_bytes(), "messages to other ranks"));
    }
    for (size_t to = 0; to < devices.size(); ++to) {
      member->channels.push_back(std::make_unique<Channel>());
      ASSIGN_OR_RETURN(member->channels.back()->memory, device->allocate_host(devices[to] == device ? 0 : group->channel_layout.rank_bytes(), "messages to another rank"));
    }
    group->members.push_back(std::move(member));
  }
  return group;
}

template <class Transport>
ops::Collectives make_ends(const std::shared_ptr<Group>& group, std::span<ops::Device* const> devices) {
  ops::Collectives ends;
  for (size_t rank = 0; rank < devices.size(); ++rank) ends.push_back(std::make_unique<Transport>(group, cpu_device(*devices[rank]), static_cast<int32_t>(rank)));
  return ends;
}

ops::Verdict always(std::span<ops::Device* const>) { return ops::accept(); }

constexpr ops::Transport kInOrder[] = {
    {"direct", always, connect_direct},
    {"staged", always, [](std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) { return connect_staged(devices, options, {}); }},
};

}  // namespace

const ops::TransportList kTransports(kInOrder);

Result<ops::Collectives> connect_direct(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  ASSIGN_OR_RETURN(const auto group, make_group("direct", devices, options, false));
  return make_ends<Direct>(group, devices);
}

Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, SlotHook before_publishing) {
  ASSIGN_OR_RETURN(const auto group, make_group("staged", devices, options, true));
  group->before_publishing = std::move(before_publishing);
  return make_ends<Staged>(group, devices);
}

}  // namespace quern::cpu
