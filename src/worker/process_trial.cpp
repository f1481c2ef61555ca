#include "worker/process_trial.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>

#include "base/hash.h"
#include "base/log.h"

namespace quern::worker {
namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

constexpr int32_t kTag = 3;
constexpr size_t kRounds = 7;
constexpr std::chrono::seconds kDeadline{60};  // also until the neighbour has been tried by those before it

Bytes pattern(size_t size, uint64_t seed) {
  Bytes bytes(size);
  SplitMix64 random(seed);
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(bytes.data() + i, &word, std::min(sizeof word, size - i));
  }
  return bytes;
}

Result<void> send(Processes& processes, int32_t to, Bytes bytes) {
  const auto owned = std::make_shared<const Bytes>(std::move(bytes));
  return processes.send(to, kTag, *owned, owned, {.deadline = kDeadline});
}
/// What comes is compared; the first difference goes into `difference`, and the exchange goes on, since the other counts on it.
Result<void> expect(Processes& processes, int32_t from, const Bytes& expected, std::optional<Error>& difference) {
  ASSIGN_OR_RETURN(const Bytes found, processes.receive(from, kTag, {.deadline = kDeadline}));
  if (found == expected || difference) return {};
  const auto [at, other] = std::mismatch(found.begin(), found.end(), expected.begin(), expected.end());
  difference = make_error(ErrorCode::kInternal, "{} bytes from process {} over {} came as {}, changed from byte {} on", expected.size(), from, processes.transport(), found.size(), at - found.begin());
  return {};
}

std::string describe(size_t bytes, double seconds) {
  const auto [size, unit] = bytes < 1'000'000 ? std::pair{static_cast<double>(bytes) / 1e3, "KB"} : std::pair{static_cast<double>(bytes) / 1e6, "MB"};
  return fmt::format("{:.1f} us for {:.3g} {}", seconds * 1e6, size, unit);
}

}  // namespace

Result<void> try_neighbours(Processes& processes, size_t row_bytes, size_t max_bytes) {
  const int32_t rank = processes.rank();
  const std::array<size_t, 3> sizes = {row_bytes, 64 * row_bytes, std::max(max_bytes, row_bytes)};
  std::optional<Error> difference;
  for (const size_t size : sizes)
    for (size_t round = 0; round < kRounds && rank > 0; ++round) {
      const Bytes there = pattern(size, 2 * round);
      Bytes back = pattern(size, 2 * round + 1);
      RETURN_IF_ERROR(expect(processes, rank - 1, there, difference));
      RETURN_IF_ERROR(send(processes, rank - 1, std::move(back)));
    }
  std::string times;
  for (const size_t size : sizes) {
    if (rank + 1 == processes.size()) break;
    std::array<double, kRounds> seconds{};
    for (size_t round = 0; round < kRounds; ++round) {
      Bytes there = pattern(size, 2 * round);
      const Bytes back = pattern(size, 2 * round + 1);
      const auto begin = Clock::now();
      RETURN_IF_ERROR(send(processes, rank + 1, std::move(there)));
      RETURN_IF_ERROR(expect(processes, rank + 1, back, difference));
      seconds[round] = std::chrono::duration<double>(Clock::now() - begin).count() / 2;
    }
    std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
    times += (times.empty() ? "" : ", ") + describe(size, seconds[kRounds / 2]);
  }
  if (difference) return *difference;
  if (!times.empty()) log_info("process {} to {} by {} works: {}", rank, rank + 1, processes.transport(), times);
  return {};
}

}  // namespace quern::worker
