#include "worker/stage_link.h"

#include <cstring>

#include "ops/host_slots.h"
#include "ops/rendezvous.h"

namespace quern::worker {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int32_t kFirstTag = 16;  // and one for each tp_rank

}  // namespace

Result<void> StageLink::send(uint64_t step, const StageRows& rows, size_t num_bytes) {
  const uint64_t number = ++num_sent_;
  const ops::SlotHeader header{.number = step, .bytes = num_bytes, .checksum = ops::checksum(rows.rows(), num_bytes)};
  static_assert(sizeof header <= StageRows::kHeaderBytes);
  std::byte* const begin = rows.memory_->address();
  std::memcpy(begin, &header, sizeof header);
  const auto begun = Clock::now();
  const Result<void> sent =
      processes_.send(place_.stage + 1, kFirstTag + place_.tp_rank, {begin, StageRows::room_for(num_bytes)}, rows.memory_, {.deadline = deadline_, .stop = [this] { return stopped_.load(); }});
  if (!sent) return explain(sent.error(), "send", place_.stage + 1, number, num_bytes, Clock::now() - begun);
  return {};
}

Result<void> StageLink::receive(uint64_t step, const StageRows& rows, size_t num_bytes) {
  const uint64_t number = ++num_received_;
  std::byte* const begin = rows.memory_->address();
  const auto begun = Clock::now();
  const Result<size_t> received = processes_.receive(place_.stage - 1, kFirstTag + place_.tp_rank, std::span(begin, rows.memory_->size_bytes()), rows.memory_,
                                                     {.deadline = deadline_, .stop = [this] { return stopped_.load(); }});
  const auto refuse = [&](std::string_view what) {
    return make_error(ErrorCode::kInternal, "rank {} found {} rank {} in receive (message {}, {} bytes, transport {})", place_.rank, what, place_.rank - place_.tp_size, number, num_bytes,
                      processes_.transport());
  };
  if (!received) {
    if (received.error().code == ErrorCode::kInternal) return refuse(fmt::format("another message than that of step {} ({}) from", step, received.error().message));
    return explain(received.error(), "receive", place_.stage - 1, number, num_bytes, Clock::now() - begun);
  }
  ops::SlotHeader header;
  if (*received < sizeof header) return refuse(fmt::format("a message of {} bytes from", *received));
  std::memcpy(&header, begin, sizeof header);
  if (header.number != step || header.bytes != num_bytes || *received != StageRows::room_for(num_bytes))
    return refuse(fmt::format("the rows of step {} ({} bytes), where those of step {} were awaited, from", header.number, header.bytes, step));
  if (header.checksum != ops::checksum(rows.rows(), num_bytes)) return refuse("changed bytes (their checksum differs) from");
  return {};
}

void StageLink::abort(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!why_stopped_) why_stopped_ = error;
  }
  stopped_ = true;
}

Error StageLink::explain(const Error& error, std::string_view op, int32_t stage, uint64_t number, size_t num_bytes, Clock::duration age) {
  const int32_t other = stage * place_.tp_size + place_.tp_rank;
  if (error.code == ErrorCode::kUnavailable && age >= deadline_) return ops::missed_ranks(place_.rank, {&other, 1}, {op, number, num_bytes}, processes_.transport(), age);
  const std::lock_guard lock(mutex_);
  return make_error(ErrorCode::kInternal, "rank {} has stopped in {} for rank {} (message {}, {} bytes, transport {}): {}", place_.rank, op, other, number, num_bytes, processes_.transport(),
                    why_stopped_ ? why_stopped_->message : error.message);
}

}  // namespace quern::worker
