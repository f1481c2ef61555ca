#include "worker/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <type_traits>

#include "ops/host_slots.h"

namespace quern::worker {
namespace {

struct Header {
  uint32_t magic = 0x716e7277;  // another byte order reads another number
  uint16_t version = kWireVersion;
  uint16_t kind = 0;  // of Message's alternatives
  uint64_t num_bytes = 0, checksum = 0;  // of what follows
};
static_assert(sizeof(Header) == 24);

/// Appends values.
struct Writer {
  static constexpr bool kReads = false;
  Bytes bytes;

  void raw(const void* value, size_t size) {
    const auto* begin = static_cast<const std::byte*>(value);
    bytes.insert(bytes.end(), begin, begin + size);
  }
};

/// Takes values from the front. Once something is wrong, all that follows is left as it is.
struct Reader {
  static constexpr bool kReads = true;
  std::span<const std::byte> bytes;
  bool failed = false;

  void raw(void* value, size_t size) {
    if (size > bytes.size()) failed = true;
    if (failed || size == 0) return;
    std::memcpy(value, bytes.data(), size);
    bytes = bytes.subspan(size);
  }
};

// What enumerations may be.
constexpr ops::RowKind last_of(ops::RowKind) { return ops::RowKind::kDecode; }
constexpr Want last_of(Want) { return Want::kPromptLogprobs; }
constexpr DraftMethod last_of(DraftMethod) { return DraftMethod::kMtp; }
constexpr StateOp::Kind last_of(StateOp::Kind) { return StateOp::Kind::kSnapshotFromHost; }
constexpr ErrorCode last_of(ErrorCode) { return ErrorCode::kInternal; }
constexpr ops::Platform last_of(ops::Platform) { return ops::Platform::kCuda; }

// Every member of a message stands in a structured binding: one that is added does not compile until it is here, too.

template <class Io, class T>
void transfer(Io& io, T& value) {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>, "this type needs its members listed");
  if constexpr (std::is_same_v<T, bool>) {
    uint8_t byte = value ? 1 : 0;
    io.raw(&byte, 1);
    if constexpr (Io::kReads) io.failed = io.failed || byte > 1;
    value = byte == 1;
  } else if constexpr (std::is_enum_v<T>) {
    auto number = static_cast<uint8_t>(value);
    io.raw(&number, 1);
    if constexpr (Io::kReads) io.failed = io.failed || number > static_cast<uint8_t>(last_of(T{}));
    if constexpr (Io::kReads)
      if (!io.failed) value = static_cast<T>(number);
  } else {
    io.raw(&value, sizeof value);
  }
}
template <class Io>
void transfer(Io& io, std::string& text);
template <class Io, class T>
void transfer(Io& io, std::vector<T>& values);
template <class Io, class T, size_t N>
void transfer(Io& io, std::array<T, N>& values);
template <class Io, class T>
void transfer(Io& io, std::optional<T>& value);
template <class Io, class A, class B>
void transfer(Io& io, std::pair<A, B>& value);

template <class Io, class... Members>
void transfer_all(Io& io, Members&... members) {
  (transfer(io, members), ...);
}

/// A struct member by member. All are named, in order, which the compiler sees to: a new one cannot be forgotten.
#define TRANSFER_MEMBERS(Type, ...)       \
  template <class Io>                     \
  void transfer(Io& io, Type& value) {    \
    auto& [__VA_ARGS__] = value;          \
    transfer_all(io, __VA_ARGS__);        \
  }
TRANSFER_MEMBERS(TokenLogprobs, chosen, chosen_rank, top)
TRANSFER_MEMBERS(Error, code, message, field)
TRANSFER_MEMBERS(ops::DeviceTraits, platform, name, memory_bytes, overhead_bytes, read_bandwidth, num_cores, architecture, fp8_matrix, avx2, avx512, avx512_vbmi, avx512_bf16,
                 amx_bf16, device_code, why_no_device_code)
TRANSFER_MEMBERS(Statement, error, host, facts, devices, traits)
TRANSFER_MEMBERS(Verdict, error, all)
TRANSFER_MEMBERS(SamplingParams, temperature, top_k, top_p, min_p, presence, frequency, repetition, seed, logit_bias, num_logprobs, min_tokens, stop_ids)
TRANSFER_MEMBERS(StepRun, slot, kind, num_rows, tokens, position, want, num_prompt_logprobs, sample_after, logit_rows, following_token, drafts, synthetic_acceptance, propose,
                 propose_depth, fill_mtp, mask_pending)
TRANSFER_MEMBERS(SlotUpdate, slot, sampling, prompt_ids, output_ids, position_delta)
TRANSFER_MEMBERS(BlockTableUpdate, slot, first_block, blocks)
TRANSFER_MEMBERS(StateOp, kind, slot, snapshot, boundary, block, host)
TRANSFER_MEMBERS(StepPlan, step, state_ops, slot_updates, block_table_updates, runs)
TRANSFER_MEMBERS(SlotEntry, slot, cursor, boundary, last_token, drafts)
TRANSFER_MEMBERS(SentStep, plan, slots)
TRANSFER_MEMBERS(StepMasks, step, rows)
TRANSFER_MEMBERS(RunResult, slot, tokens, logprobs, prompt_logprobs, drafts, num_draft_rows, non_finite, logits, draft_logits)
TRANSFER_MEMBERS(StepResult, step, runs, computed_rows, gathered_rows, device_seconds, error)
TRANSFER_MEMBERS(Alive, loaded)
TRANSFER_MEMBERS(Abort, error)
#undef TRANSFER_MEMBERS
template <class Io>
void transfer(Io&, Started&) {}
template <class Io>
void transfer(Io&, EndOfSteps&) {}
template <class Io>
void transfer(Io&, Ended&) {}

/// How many values follow. Each has a byte at least, so that a wrong number asks for no more than there is.
template <class Io>
size_t transfer_count(Io& io, size_t count) {
  CHECK(count <= std::numeric_limits<uint32_t>::max());
  auto number = static_cast<uint32_t>(count);
  io.raw(&number, sizeof number);
  if constexpr (Io::kReads) {
    if (number > io.bytes.size()) io.failed = true;
    if (io.failed) return 0;
  }
  return number;
}
template <class Io>
void transfer(Io& io, std::string& text) {
  text.resize(transfer_count(io, text.size()));
  io.raw(text.data(), text.size());
}
template <class Io, class T>
void transfer(Io& io, std::vector<T>& values) {
  const size_t count = transfer_count(io, values.size());
  if constexpr (std::is_arithmetic_v<T>) {
    if constexpr (Io::kReads)
      if (count * sizeof(T) > io.bytes.size()) io.failed = true;
    if constexpr (Io::kReads)
      if (io.failed) return;
    values.resize(count);
    io.raw(values.data(), count * sizeof(T));
  } else if constexpr (Io::kReads) {
    values.clear();
    while (values.size() < count && !io.failed) transfer(io, values.emplace_back());
  } else {
    for (T& value : values) transfer(io, value);
  }
}
template <class Io, class T, size_t N>
void transfer(Io& io, std::array<T, N>& values) {
  for (T& value : values) transfer(io, value);
}
template <class Io, class T>
void transfer(Io& io, std::optional<T>& value) {
  bool there = value.has_value();
  transfer(io, there);
  if (!there) return value.reset();
  if (!value) value.emplace();
  transfer(io, *value);
}
template <class Io, class A, class B>
void transfer(Io& io, std::pair<A, B>& value) {
  transfer_all(io, value.first, value.second);
}

/// The alternative of that number, default-made.
template <size_t I = 0>
std::optional<Message> make_alternative(size_t kind) {
  if constexpr (I < std::variant_size_v<Message>) {
    if (kind == I) return Message(std::in_place_index<I>);
    return make_alternative<I + 1>(kind);
  }
  return std::nullopt;
}

Error refused(size_t num_bytes, std::string_view why) { return make_error(ErrorCode::kInternal, "{} bytes from another process are no message: {}", num_bytes, why); }

}  // namespace

Bytes to_bytes(const Message& message) {
  Writer writer;
  writer.bytes.resize(sizeof(Header));
  // One list of members serves both ways; writing changes none.
  std::visit([&](const auto& value) { transfer(writer, const_cast<std::remove_cvref_t<decltype(value)>&>(value)); }, message);
  Header header;
  header.kind = static_cast<uint16_t>(message.index());
  header.num_bytes = writer.bytes.size() - sizeof header;
  header.checksum = ops::checksum(writer.bytes.data() + sizeof header, header.num_bytes);
  std::memcpy(writer.bytes.data(), &header, sizeof header);
  return std::move(writer.bytes);
}

Result<Message> message_from_bytes(std::span<const std::byte> bytes) {
  Header header;
  if (bytes.size() < sizeof header) return refused(bytes.size(), "they are shorter than a header");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != Header{}.magic) return refused(bytes.size(), "they do not begin as one does");
  if (header.version != kWireVersion)
    return make_error(ErrorCode::kUnsupported, "its messages are of version {}, and of version {} here; all processes have to run the same quern", header.version, kWireVersion);
  Reader reader{bytes.subspan(sizeof header)};
  if (header.num_bytes != reader.bytes.size()) return refused(bytes.size(), fmt::format("{} were to follow its header", header.num_bytes));
  if (header.checksum != ops::checksum(reader.bytes.data(), reader.bytes.size())) return refused(bytes.size(), "they have changed on the way (their checksum differs)");
  std::optional<Message> message = make_alternative(header.kind);
  if (!message) return refused(bytes.size(), fmt::format("nothing is of kind {}", header.kind));
  std::visit([&](auto& value) { transfer(reader, value); }, *message);
  if (reader.failed) return refused(bytes.size(), fmt::format("a value of kind {} ends too early or is none", header.kind));
  if (!reader.bytes.empty()) return refused(bytes.size(), fmt::format("{} are left over", reader.bytes.size()));
  return *std::move(message);
}

std::vector<SlotEntry> named_slots(const StepPlan& plan, const SlotValues& values) {
  std::set<int32_t> slots;
  for (const StateOp& op : plan.state_ops) slots.insert(op.slot);
  for (const StepRun& run : plan.runs) slots.insert(run.slot);
  std::vector<SlotEntry> entries;
  const size_t num_drafts = values.drafts.size() / values.cursor.size();
  for (const int32_t slot : slots) {
    const auto at = static_cast<size_t>(slot);
    const auto drafts = values.drafts.begin() + static_cast<std::ptrdiff_t>(at * num_drafts);
    entries.push_back({slot, values.cursor[at], values.boundary[at], values.last_token[at], {drafts, drafts + static_cast<std::ptrdiff_t>(num_drafts)}});
  }
  return entries;
}

void set_slots(SlotValues& values, std::span<const SlotEntry> entries) {
  const size_t num_drafts = values.drafts.size() / values.cursor.size();
  for (const SlotEntry& entry : entries) {
    const auto at = static_cast<size_t>(entry.slot);
    values.cursor[at] = entry.cursor;
    values.boundary[at] = entry.boundary;
    values.last_token[at] = entry.last_token;
    std::copy(entry.drafts.begin(), entry.drafts.end(), values.drafts.begin() + static_cast<std::ptrdiff_t>(at * num_drafts));
  }
}

Result<void> check_step(const SentStep& step, const WorkerLimits& limits) {
  const auto refuse = [&](std::string_view what, int64_t value) { return make_error(ErrorCode::kInternal, "step {} names {} {}, which there is not", step.plan.step, what, value); };
  const auto below = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
  const auto all_below = [&](const std::vector<int32_t>& values, int64_t end) { return std::all_of(values.begin(), values.end(), [&](int32_t value) { return below(value, end); }); };
  const int64_t max_blocks = ceil_div(limits.max_model_len, ops::kGrid), num_drafts = std::max(limits.k_max, 1);
  for (const StateOp& op : step.plan.state_ops) {
    using Kind = StateOp::Kind;
    const bool host_block = op.kind == Kind::kBlockToHost || op.kind == Kind::kBlockFromHost, host_snapshot = op.kind == Kind::kSnapshotToHost || op.kind == Kind::kSnapshotFromHost;
    if (!below(op.slot, limits.num_slots)) return refuse("slot", op.slot);
    if ((op.kind == Kind::kSnapshot || op.kind == Kind::kRestore || host_snapshot) && !below(op.snapshot, limits.num_snapshots)) return refuse("snapshot", op.snapshot);
    if (op.boundary < 0 || op.boundary > limits.max_model_len) return refuse("boundary", op.boundary);
    if (host_block && !below(op.block, limits.num_blocks)) return refuse("block", op.block);
    if ((host_block && !below(op.host, limits.num_host_blocks)) || (host_snapshot && !below(op.host, limits.num_host_snapshots))) return refuse("place in host memory", op.host);
  }
  for (const SlotUpdate& update : step.plan.slot_updates) {
    if (!below(update.slot, limits.num_slots)) return refuse("slot", update.slot);
    const SamplingParams& sampling = update.sampling;
    const bool biased = std::all_of(sampling.logit_bias.begin(), sampling.logit_bias.end(), [&](const auto& bias) { return below(bias.first, limits.vocab_size); });
    if (!all_below(update.prompt_ids, limits.vocab_size) || !all_below(update.output_ids, limits.vocab_size) || !biased) return refuse("a token of slot", update.slot);
    if (std::ssize(sampling.logit_bias) > kMaxLogitBias || std::ssize(sampling.stop_ids) > kMaxStopIds || sampling.num_logprobs > kMaxLogprobs) return refuse("parameters of slot", update.slot);
  }
  for (const BlockTableUpdate& update : step.plan.block_table_updates) {
    if (!below(update.slot, limits.num_slots)) return refuse("slot", update.slot);
    if (update.first_block < 0 || update.first_block + std::ssize(update.blocks) > max_blocks || !all_below(update.blocks, limits.num_blocks)) return refuse("blocks of slot", update.slot);
  }
  int64_t num_rows = 0;
  for (const StepRun& run : step.plan.runs) {
    if (!below(run.slot, limits.num_slots)) return refuse("slot", run.slot);
    const bool rows_are_there = run.num_rows > 0 && (run.tokens.empty() ? run.num_rows <= limits.k_max + 1 : std::ssize(run.tokens) == run.num_rows);
    if (!rows_are_there || !all_below(run.logit_rows, run.num_rows)) return refuse("rows of slot", run.slot);
    if (!run.drafts.empty() && (!run.verify() || std::ssize(run.drafts) != run.num_rows - 1)) return refuse("drafts of slot", run.slot);
    if (!below(run.propose_depth, limits.k_max + 1) || run.num_prompt_logprobs > kMaxLogprobs) return refuse("parameters of slot", run.slot);
    if (!all_below(run.tokens, limits.vocab_size) || !all_below(run.drafts, limits.vocab_size) || run.following_token >= limits.vocab_size) return refuse("a token of slot", run.slot);
    num_rows += run.num_rows;
  }
  if (num_rows > limits.max_rows) return refuse("rows", num_rows);
  for (const SlotEntry& entry : step.slots)
    if (!below(entry.slot, limits.num_slots) || std::ssize(entry.drafts) != num_drafts || !below(entry.cursor, limits.max_model_len + 1) || !below(entry.boundary, entry.cursor + 1) ||
        !below(entry.last_token, limits.vocab_size) || !all_below(entry.drafts, limits.vocab_size))
      return refuse("slot", entry.slot);
  return {};
}

Result<void> check_masks(const StepMasks& masks, const WorkerLimits& limits) {
  const int64_t row_words = ceil_div(limits.vocab_size, 32);
  for (const auto& [slot, words] : masks.rows)
    if (slot < 0 || slot >= limits.num_slots || words.empty() || std::ssize(words) % row_words != 0 || std::ssize(words) > (limits.k_max + 1) * row_words)
      return make_error(ErrorCode::kInternal, "masks of step {} have {} words for slot {}", masks.step, words.size(), slot);
  return {};
}

Result<void> check_result(const StepResult& result, const StepPlan& plan, const WorkerLimits& limits) {
  const auto refuse = [&](std::string_view what) { return make_error(ErrorCode::kInternal, "the result of step {} is none of step {}: {} differ", result.step, plan.step, what); };
  if (result.step != plan.step || result.runs.size() != plan.runs.size()) return refuse("number or runs");
  const auto in_vocab = [&](const std::vector<int32_t>& ids) { return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id < limits.vocab_size; }); };
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const RunResult& run = result.runs[i];
    if (run.slot != plan.runs[i].slot) return refuse("slots");
    if (std::ssize(run.tokens) > limits.k_max + 1 || std::ssize(run.drafts) > limits.k_max || !in_vocab(run.tokens) || !in_vocab(run.drafts)) return refuse("tokens");
    const auto sound = [&](const TokenLogprobs& logprobs) {
      return std::all_of(logprobs.top.begin(), logprobs.top.end(), [&](const auto& candidate) { return candidate.first >= 0 && candidate.first < limits.vocab_size; });
    };
    if ((!run.logprobs.empty() && run.logprobs.size() != run.tokens.size()) || std::ssize(run.prompt_logprobs) > plan.runs[i].num_rows || !std::all_of(run.logprobs.begin(), run.logprobs.end(), sound) ||
        !std::all_of(run.prompt_logprobs.begin(), run.prompt_logprobs.end(), sound))
      return refuse("log-probabilities");
  }
  return {};
}

}  // namespace quern::worker
