#include "ops/rendezvous.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "base/check.h"

namespace quern::ops {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpinTime{20};
constexpr std::chrono::milliseconds kSleep{20};  // of one sleep: stops are looked for in between

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Sleeps while `word` is `value`, at most `time`.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds time) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec timeout{static_cast<time_t>(seconds.count()), static_cast<long>((time - seconds).count())};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &timeout, nullptr, 0);  // whatever ends it, the caller looks again
}
void wake_all(const std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

std::string list_of(std::span<const int32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) text += fmt::format("{}{}", i == 0 ? " " : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

}  // namespace

Error missed_ranks(int32_t rank, std::span<const int32_t> missed, const MessageId& message, std::string_view transport, std::chrono::nanoseconds age) {
  return make_error(ErrorCode::kInternal, "rank {} waited {:.1f} s for {} in {} (message {}, {} bytes, transport {})", rank, std::chrono::duration<double>(age).count(), list_of(missed),
                    message.op, message.number, message.bytes, transport);
}

Rendezvous::Rendezvous(std::string_view transport, int32_t num_ranks, std::chrono::milliseconds deadline) : transport_(transport), deadline_(deadline) {
  CHECK(num_ranks >= 1);
  for (int32_t rank = 0; rank < num_ranks; ++rank) stops_.push_back(std::make_unique<Stop>());
}

void Rendezvous::advance(Counter& counter, uint64_t number) {
  // Whoever goes to sleep says so before he looks at the value for the last time: either he sees the new one, or we see him.
  counter.value_.store(static_cast<uint32_t>(number), std::memory_order_seq_cst);
  if (counter.num_sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(counter.value_);
}

Result<void> Rendezvous::wait(int32_t rank, std::span<const Awaited> awaited, uint64_t number, const MessageId& message) {
  const auto begin = Clock::now();
  const auto fail = [&](Error error) -> Result<void> {
    stop(rank, error);
    return why_stopped(rank);
  };
  bool spins = true;
  for (const Awaited& one : awaited) {
    while (!one.counter->reached(number)) {
      for (int i = 0; spins && i < 64; ++i) {
        relax();
        if (one.counter->reached(number)) break;
      }
      if (stopped(rank)) return why_stopped(rank);
      if (first_stopped_.load(std::memory_order_acquire) >= 0 && !one.counter->reached(number))
        return fail(stopped_by_another(rank, fmt::format(" while it waited for rank {} in {} (message {}, {} bytes, transport {})", one.rank, message.op, message.number, message.bytes, transport_)));
      const auto waited = Clock::now() - begin;
      if (waited >= deadline_) {
        std::vector<int32_t> missed;
        for (const Awaited& other : awaited)
          if (!other.counter->reached(number)) missed.push_back(other.rank);
        if (missed.empty()) break;
        return fail(missed_ranks(rank, missed, message, transport_, waited));
      }
      spins = waited < kSpinTime;
      if (spins) continue;
      const Counter& counter = *one.counter;
      counter.num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t value = counter.value_.load(std::memory_order_seq_cst);
      if (!counter.reached(number)) sleep_on(counter.value_, value, std::min<std::chrono::nanoseconds>(kSleep, deadline_ - waited));
      counter.num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  return {};
}

void Rendezvous::stop(int32_t rank, Error error) {
  Stop& stop = *stops_[static_cast<size_t>(rank)];
  const std::lock_guard lock(mutex_);
  if (stop.error) return;
  stop.error = std::move(error);
  stop.set.store(true, std::memory_order_release);
  int32_t nobody = -1;
  first_stopped_.compare_exchange_strong(nobody, rank, std::memory_order_release);
}

Result<void> Rendezvous::goes_on(int32_t rank) {
  if (first_stopped_.load(std::memory_order_acquire) < 0) return {};
  if (!stopped(rank)) stop(rank, stopped_by_another(rank, fmt::format(" before the next message of transport {}", transport_)));
  return why_stopped(rank);
}

Error Rendezvous::why_stopped(int32_t rank) const {
  const std::lock_guard lock(mutex_);
  const Stop& stop = *stops_[static_cast<size_t>(rank)];
  CHECK(stop.error.has_value());
  return *stop.error;
}

Error Rendezvous::stopped_by_another(int32_t rank, std::string_view during) const {
  const int32_t first = first_stopped_.load(std::memory_order_acquire);
  return make_error(ErrorCode::kInternal, "rank {} has stopped since rank {} did{}: {}", rank, first, during, why_stopped(first).message);
}

}  // namespace quern::ops
