#include "backends/transport_trial.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "base/float_convert.h"
#include "base/hash.h"
#include "ops/select.h"

namespace quern::backends {

namespace {

constexpr size_t kShortest = 10'240, kLongest = 40'000'000;
constexpr size_t kPassedOn = 5'000'000;  // the longest message from one rank to another
constexpr double kMuchSlower = 1.5;  // with the fewest rows

/// Runs body(rank) on a thread of its own for every rank; the error that came first, where there is one.
Result<void> on_all_ranks(int32_t num_ranks, const std::function<Result<void>(int32_t)>& body, const std::function<void(int32_t, const Error&)>& gives_up) {
  std::mutex mutex;
  std::optional<Error> first;
  {
    std::vector<std::jthread> threads;
    for (int32_t rank = 0; rank < num_ranks; ++rank)
      threads.emplace_back([&, rank] {
        const Result<void> outcome = body(rank);
        if (outcome) return;
        {
          const std::lock_guard lock(mutex);
          if (!first) first = outcome.error();
        }
        gives_up(rank, outcome.error());
      });
  }
  if (first) return *first;
  return {};
}

/// What rank `rank` shows in a round: a number for each word, another for every rank, round and place.
class Pattern {
 public:
  Pattern(int32_t rank, uint64_t round) : seed_(hash_combine(static_cast<uint64_t>(rank) + 1, round)) {}
  [[nodiscard]] uint64_t word(size_t i) const { return seed_ + i * 0x9e3779b97f4a7c15ull; }
  void write(std::byte* bytes, size_t size) const {
    for (size_t i = 0; i < size / 8; ++i) {
      const uint64_t value = word(i);
      std::memcpy(bytes + 8 * i, &value, 8);
    }
    const uint64_t last = word(size / 8);
    std::memcpy(bytes + size / 8 * 8, &last, size % 8);
  }
  /// The first byte that differs, or `size`.
  [[nodiscard]] size_t first_difference(const std::byte* bytes, size_t size) const {
    uint64_t difference = 0;
    for (size_t i = 0; i < size / 8; ++i) {
      uint64_t value;
      std::memcpy(&value, bytes + 8 * i, 8);
      difference |= value ^ word(i);
    }
    const uint64_t last = word(size / 8);
    if (difference == 0 && std::memcmp(bytes + size / 8 * 8, &last, size % 8) == 0) return size;
    for (size_t i = 0;; ++i) {
      const uint64_t value = word(i / 8);
      if (bytes[i] != reinterpret_cast<const std::byte*>(&value)[i % 8]) return i;
    }
  }

 private:
  uint64_t seed_;
};

/// Numbers of bytes that a self-test moves: up to the longest message that will ever be sent.
std::vector<size_t> tried_sizes(size_t longest) {
  std::vector<size_t> sizes;
  for (const size_t bytes : {kShortest, size_t{655'360}, size_t{5'000'000}, kLongest})
    if (bytes < longest || sizes.empty()) sizes.push_back(bytes);
  if (sizes.back() < longest) sizes.push_back(std::min(longest, kLongest));
  return sizes;
}

/// A rank while a transport is tried.
class Rank {
 public:
  explicit Rank(ops::Device& device) : device_(device) {}

  Result<void> prepare(int64_t hidden, int64_t max_rows, size_t longest, int32_t num_ranks, const ops::KernelTable& kernels) {
    const ops::Combine::Problem problem{hidden, num_ranks, DType::kBF16};
    const auto choice = ops::select(kernels.combine, problem, device_.traits());
    if (choice.chosen == nullptr) return make_error(ErrorCode::kUnsupported, "combine has no kernel for {} ranks", num_ranks);
    ASSIGN_OR_RETURN(combine_, choice.chosen->make(problem, device_));
    hidden_ = hidden;
    const auto message_bytes = static_cast<size_t>(max_rows * hidden) * dtype_size(DType::kBF16);
    const size_t first_share = longest / static_cast<size_t>(num_ranks) + 16 * static_cast<size_t>(num_ranks);
    first_bytes_ = static_cast<size_t>(round_up(static_cast<int64_t>(std::max(longest, message_bytes)), 64));
    second_bytes_ = static_cast<size_t>(round_up(static_cast<int64_t>(std::max({first_share, std::min(longest, kPassedOn), message_bytes})), 64));
    workspace_bytes_ = combine_->workspace_bytes(max_rows);
    ASSIGN_OR_RETURN(buffer_, device_.allocate(first_bytes_ + second_bytes_ + workspace_bytes_, "trying the transports between ranks"));
    host_.resize(first_bytes_);
    widths_.assign(static_cast<size_t>(num_ranks), 0);
    return {};
  }
  /// From here on messages go through `end`, in a new stream.
  Result<void> use(ops::Collective& end) {
    graph_.reset();
    end_ = &end;
    ASSIGN_OR_RETURN(stream_, device_.make_stream());
    return {};
  }
  void leave() {
    graph_.reset();
    stream_.reset();
  }

  [[nodiscard]] bool records() const { return stream_->can_record(); }

  /// Everybody's pattern side by side, `bytes` in all, the first rank's part a little larger than the others'.
  Result<void> gather(size_t bytes, uint64_t round, bool recorded) {
    const auto n = static_cast<size_t>(end_->size()), me = static_cast<size_t>(end_->rank()), share = bytes / n / 16 * 16;
    for (size_t rank = 0; rank < n; ++rank) widths_[rank] = static_cast<int64_t>(rank == 0 ? bytes - (n - 1) * share : share);
    const auto my_bytes = static_cast<size_t>(widths_[me]);
    const ops::TensorView all = view(0, {1, static_cast<int64_t>(bytes)}), mine = view(first_bytes_, {1, widths_[me]});
    Pattern(end_->rank(), round).write(host_.data(), my_bytes);
    stream_->copy_to_device(host_.data(), mine);
    stream_->fill_zero(all);
    ops::Launch launch{*stream_, {}};
    RETURN_IF_ERROR(enqueue([&] { end_->all_gather(mine, all, widths_, launch); }, recorded));
    stream_->copy_to_host(all, host_.data());
    RETURN_IF_ERROR(stream_->finish());
    const std::byte* part = host_.data();
    for (size_t rank = 0; rank < n; part += widths_[rank], ++rank)
      RETURN_IF_ERROR(check(part, static_cast<size_t>(widths_[rank]), static_cast<int32_t>(rank), round, "all_gather"));
    return {};
  }

  /// A pattern to the rank `distance` further, another from the rank as far before.
  Result<void> pass_on(size_t bytes, int32_t distance, uint64_t round) {
    const int32_t n = end_->size(), to = (end_->rank() + distance) % n, from = (end_->rank() + n - distance) % n;
    const auto extent = static_cast<int64_t>(bytes);
    const ops::TensorView out = view(first_bytes_, {extent}), in = view(0, {extent});
    Pattern(end_->rank(), round).write(host_.data(), bytes);
    stream_->copy_to_device(host_.data(), out);
    stream_->fill_zero(in);
    ops::Launch launch{*stream_, {}};
    // Not all send first: a ring of full slots would stand still.
    if (end_->rank() == 0) end_->receive(in, from, launch);
    end_->send(out, to, launch);
    if (end_->rank() != 0) end_->receive(in, from, launch);
    stream_->copy_to_host(in, host_.data());
    RETURN_IF_ERROR(stream_->finish());
    return check(host_.data(), bytes, from, round, "receive");
  }

  /// Small whole numbers, whose sums are exact.
  Result<void> add(int64_t rows, uint64_t round, bool recorded) {
    const auto count = static_cast<size_t>(rows * hidden_);
    std::vector<Pattern> patterns;
    for (int32_t rank = 0; rank < end_->size(); ++rank) patterns.emplace_back(rank, round);
    const auto value = [&](int32_t rank, size_t i) { return static_cast<float>(static_cast<int64_t>(patterns[static_cast<size_t>(rank)].word(i)) >> 60); };  // -8 .. 7
    const ops::TensorView x{buffer_.get(), 0, DType::kBF16, {rows, hidden_}}, partial{buffer_.get(), first_bytes_, DType::kBF16, {rows, hidden_}};
    auto* numbers = reinterpret_cast<bf16*>(host_.data());
    for (size_t i = 0; i < count; ++i) numbers[i] = to_bf16(value(end_->rank(), i));
    stream_->copy_to_device(numbers, partial);
    stream_->fill_zero(x);
    RETURN_IF_ERROR(stream_->finish());
    ops::Launch launch{*stream_, workspace()};
    int repeats = 0;
    RETURN_IF_ERROR(enqueue([&] { end_->add_partials(*combine_, partial, x, launch); }, recorded, &repeats));
    stream_->copy_to_host(x, numbers);
    RETURN_IF_ERROR(stream_->finish());
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int32_t rank = 0; rank < end_->size(); ++rank) sum += value(rank, i);
      if (to_f32(numbers[i]) != sum * static_cast<float>(repeats))
        return make_error(ErrorCode::kInternal, "rank {} found {} instead of {} at element {} of {} rows in add_partials (transport {}, round {}{})", end_->rank(), to_f32(numbers[i]),
                          sum * static_cast<float>(repeats), i, rows, end_->transport(), round, recorded ? ", replayed" : "");
    }
    return {};
  }

  /// Seconds of one add_partials of `rows` rows: the median of some batches.
  Result<double> time(int64_t rows) {
    const ops::TensorView x{buffer_.get(), 0, DType::kBF16, {rows, hidden_}}, partial{buffer_.get(), first_bytes_, DType::kBF16, {rows, hidden_}};
    stream_->fill_zero(partial);
    stream_->fill_zero(x);
    ops::Launch launch{*stream_, workspace()};
    const int calls = rows <= 8 ? 40 : rows <= 128 ? 10 : 2;
    std::unique_ptr<ops::Graph> graph;
    if (stream_->can_record()) {
      RETURN_IF_ERROR(stream_->finish());
      stream_->begin_recording();
      for (int i = 0; i < calls; ++i) end_->add_partials(*combine_, partial, x, launch);
      ASSIGN_OR_RETURN(graph, stream_->end_recording());
    }
    constexpr int kBatches = 5;
    std::array<double, kBatches + 1> seconds{};
    for (double& batch : seconds) {  // the first warms up
      RETURN_IF_ERROR(stream_->finish());
      const auto begin = std::chrono::steady_clock::now();
      if (graph != nullptr) {
        stream_->replay(*graph);
      } else {
        for (int i = 0; i < calls; ++i) end_->add_partials(*combine_, partial, x, launch);
      }
      RETURN_IF_ERROR(stream_->finish());
      batch = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
    }
    std::nth_element(seconds.begin() + 1, seconds.begin() + 1 + kBatches / 2, seconds.end());
    return seconds[1 + kBatches / 2];
  }

 private:
  [[nodiscard]] ops::TensorView view(size_t offset, const Shape& shape) const { return {buffer_.get(), offset, DType::kU8, shape}; }
  [[nodiscard]] ops::TensorView workspace() const { return view(first_bytes_ + second_bytes_, {static_cast<int64_t>(workspace_bytes_)}); }

  /// Once, or replayed some times from a graph where there is one.
  Result<void> enqueue(const std::function<void()>& call, bool recorded, int* repeats = nullptr) {
    constexpr int kReplays = 3;
    if (repeats != nullptr) *repeats = 1;
    if (!recorded) {
      call();
      return {};
    }
    RETURN_IF_ERROR(stream_->finish());
    stream_->begin_recording();
    call();
    ASSIGN_OR_RETURN(graph_, stream_->end_recording());
    if (graph_ == nullptr) return {};
    for (int i = 0; i < kReplays; ++i) stream_->replay(*graph_);
    if (repeats != nullptr) *repeats = kReplays;
    return {};
  }

  [[nodiscard]] Result<void> check(const std::byte* bytes, size_t size, int32_t from, uint64_t round, std::string_view op) const {
    const size_t place = Pattern(from, round).first_difference(bytes, size);
    if (place == size) return {};
    return make_error(ErrorCode::kInternal, "rank {} found other bytes than rank {} had in {} at byte {} of {} (transport {}, round {})", end_->rank(), from, op, place, size, end_->transport(), round);
  }

  ops::Device& device_;
  ops::Collective* end_ = nullptr;
  int64_t hidden_ = 0;
  size_t first_bytes_ = 0, second_bytes_ = 0, workspace_bytes_ = 0;  // the parts of buffer_: what is received, what is shown, Combine's
  std::unique_ptr<ops::Buffer> buffer_;
  std::unique_ptr<ops::Stream> stream_;
  std::unique_ptr<ops::Graph> graph_;
  std::unique_ptr<ops::Combine::Kernel> combine_;
  std::vector<std::byte> host_;
  std::vector<int64_t> widths_;
};

/// All rounds of the self-test of one rank.
Result<void> self_test(Rank& rank, int32_t num_ranks, std::span<const size_t> sizes, std::span<const int64_t> row_counts) {
  const bool records = rank.records();
  uint64_t round = 0;
  for (const size_t bytes : sizes) {
    const int repeats = bytes < 1'000'000 ? 3 : 1;
    for (int i = 0; i < repeats; ++i) {
      RETURN_IF_ERROR(rank.gather(bytes, ++round, false));
      if (bytes > kPassedOn) continue;
      RETURN_IF_ERROR(rank.pass_on(bytes, 1, ++round));
      if (num_ranks > 2) RETURN_IF_ERROR(rank.pass_on(bytes, num_ranks - 1, ++round));
      if (records && i == 0) RETURN_IF_ERROR(rank.gather(bytes, ++round, true));
    }
  }
  for (const int64_t rows : row_counts)
    for (const bool recorded : {false, true})
      if (!recorded || records) RETURN_IF_ERROR(rank.add(rows, ++round, recorded));
  return {};
}

/// Fills in `trial`; empty where it does not work.
ops::Collectives try_one(const ops::Transport& transport, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, std::span<const std::unique_ptr<Rank>> ranks,
                         std::span<const size_t> sizes, std::span<const int64_t> row_counts, ops::TransportTrial& trial) {
  const ops::Verdict verdict = transport.probe(devices);
  if (!verdict.accepted) {
    trial.refusal = verdict.reason;
    return {};
  }
  Result<ops::Collectives> ends = transport.connect(devices, options);
  if (!ends) {
    trial.refusal = ends.error().message;
    return {};
  }
  if (ranks.empty()) return std::move(*ends);
  std::vector<double> seconds(row_counts.size());
  const auto try_rank = [&](int32_t r) -> Result<void> {
    Rank& rank = *ranks[static_cast<size_t>(r)];
    RETURN_IF_ERROR(rank.use(*(*ends)[static_cast<size_t>(r)]));
    RETURN_IF_ERROR(self_test(rank, static_cast<int32_t>(ranks.size()), sizes, row_counts));
    for (size_t i = 0; i < row_counts.size(); ++i) {
      ASSIGN_OR_RETURN(const double time, rank.time(row_counts[i]));
      if (r == 0) seconds[i] = time;
    }
    return {};
  };
  const auto give_up = [&](int32_t r, const Error& error) { (*ends)[static_cast<size_t>(r)]->abort(error); };  // nobody waits for this rank
  const Result<void> outcome = on_all_ranks(static_cast<int32_t>(ranks.size()), try_rank, give_up);
  for (const auto& rank : ranks) rank->leave();
  if (!outcome) {
    trial.refusal = outcome.error().message;
    return {};
  }
  for (size_t i = 0; i < row_counts.size(); ++i) trial.times.push_back({options.row_bytes * static_cast<size_t>(row_counts[i]), seconds[i]});
  return std::move(*ends);
}

std::string format_size(size_t bytes) {
  return bytes < 1'000'000 ? fmt::format("{:.0f} KB", static_cast<double>(bytes) / 1e3) : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace

ops::Connection try_list(const ops::TransportList& list, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, const ops::KernelTable& kernels,
                         std::span<const int64_t> wanted_rows) {
  ops::Connection connection;
  const std::vector<size_t> sizes = tried_sizes(options.longest_message_bytes);
  std::vector<int64_t> row_counts;
  for (const int64_t rows : wanted_rows)
    if (row_counts.empty() || static_cast<size_t>(rows) * options.row_bytes <= options.longest_message_bytes) row_counts.push_back(rows);
  std::vector<ops::Collectives> ends;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::string why_not_tried;
  if (devices.size() > 1) {
    const auto hidden = std::max<int64_t>(1, static_cast<int64_t>(options.row_bytes / dtype_size(DType::kBF16)));
    for (ops::Device* device : devices) {
      ranks.push_back(std::make_unique<Rank>(*device));
      const auto prepared = ranks.back()->prepare(hidden, std::ranges::max(row_counts), sizes.back(), static_cast<int32_t>(devices.size()), kernels);
      if (!prepared) why_not_tried = prepared.error().message;
    }
  }
  for (const ops::Transport& transport : list.transports()) {
    if (!options.transport.empty() && transport.name != options.transport) continue;
    ops::TransportTrial trial{std::string(transport.name), {}, {}};
    trial.refusal = why_not_tried;
    ends.push_back(why_not_tried.empty() ? try_one(transport, devices, options, ranks, sizes, row_counts, trial) : ops::Collectives());
    connection.trials.push_back(std::move(trial));
  }
  double fastest = std::numeric_limits<double>::infinity();
  for (const ops::TransportTrial& trial : connection.trials)
    if (!trial.times.empty()) fastest = std::min(fastest, trial.times.front().seconds);
  for (size_t i = 0; i < connection.trials.size() && connection.ends.empty(); ++i) {
    const ops::TransportTrial& trial = connection.trials[i];
    if (ends[i].empty() || (!trial.times.empty() && trial.times.front().seconds > kMuchSlower * fastest)) continue;
    connection.chosen = trial.transport;
    connection.ends = std::move(ends[i]);
  }
  return connection;
}

std::string describe(const ops::TransportTrial& trial) {
  if (!trial.refusal.empty()) return trial.refusal;
  std::string text = "works";
  for (size_t i = 0; i < trial.times.size(); ++i) text += fmt::format("{}{:.1f} us for {}", i == 0 ? ": " : ", ", trial.times[i].seconds * 1e6, format_size(trial.times[i].bytes));
  return text;
}

}  // namespace quern::backends
