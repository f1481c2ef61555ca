#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ops/combine.h"
#include "ops/kernel.h"

namespace quern::ops {

class Collective;

/// What the ranks of a group agree on before they meet.
struct CollectiveOptions {
  std::string transport;                         // "direct", "staged", "nccl", "mpi"; empty: the first of the platform's that works between these devices
  size_t max_message_bytes = 4u << 20;           // of one rank in one exchange; longer messages go in pieces
  size_t longest_message_bytes = 40'000'000;     // that is ever sent, all ranks' parts together: transports are tried with no longer ones
  size_t row_bytes = 10'240;                     // of one row's hidden state, as decode exchanges it; what transports are timed with
  std::chrono::milliseconds deadline{10'000};    // no wait for another rank takes longer
  std::function<std::unique_ptr<Collective>(std::unique_ptr<Collective>)> wrap = {};  // for tests of faults: what each end of the finished group is replaced by
};

/// One rank's end of a group whose ranks compute the same step together. It moves bytes, in the order of the rank's stream; adding is Combine's, so that every transport gives the
/// same bits (architecture.md section 6). Used by the thread that enqueues on that stream. All ranks of a group make the same calls with the same sizes in the same order; calls
/// may be recorded into a Graph where the stream records.
///
/// A rank that waits longer than the deadline gives up: its stream fails (Stream::wait, Stream::finish) with an error that names the ranks it missed, the message, the transport
/// and how long it waited, and nothing that is enqueued later waits again.
class Collective {
 public:
  virtual ~Collective() = default;
  [[nodiscard]] virtual std::string_view transport() const = 0;
  [[nodiscard]] virtual int32_t rank() const = 0;
  [[nodiscard]] virtual int32_t size() const = 0;

  /// Every rank's tensor side by side: all [n, sum of widths] <- the ranks' mine [n, widths[rank]], in rank order along the last extent. `widths` is the same on every rank; a width may be 0.
  virtual void all_gather(const TensorView& mine, const TensorView& all, std::span<const int64_t> widths, Launch& launch) = 0;
  /// x <- round(x + round(sum of the ranks' partials in f32, in rank order)); partial, x [rows, hidden] in the activation dtype. `combine` is the kernel for size() ranks: a
  /// transport calls it on gathered partials, or does what it promises in a launch of its own.
  virtual void add_partials(const Combine::Kernel& combine, const TensorView& partial, const TensorView& x, Launch& launch) = 0;
  /// From one stage of a pipeline to another: what `to` receives is what `from` sends, both in the order of their calls.
  virtual void send(const TensorView& message, int32_t to, Launch& launch) = 0;
  virtual void receive(const TensorView& message, int32_t from, Launch& launch) = 0;

  /// From any thread: every wait of this rank ends with `error`, as if its deadline had come.
  virtual void abort(const Error& error) = 0;
};

}  // namespace quern::ops
