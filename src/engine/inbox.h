#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "base/result.h"
#include "engine/sequence.h"

namespace quern::engine {

struct Submit {
  std::unique_ptr<Sequence> sequence;
};
struct Cancel {
  uint64_t id = 0;
};
struct StopAt {
  uint64_t id = 0;
  int32_t completion_tokens = 0;
};
struct CancelAll {};
using Command = std::variant<Submit, Cancel, StopAt, CancelAll>;

/// The engine thread's bounded door: what other threads tell it, and what they may know of it. Thread-safe; streams keep it beyond the
/// engine's end.
class Inbox {
 public:
  Inbox(int32_t max_num_seqs, int32_t max_queue_len) : max_num_seqs_(max_num_seqs), max_queue_len_(max_queue_len) {}

  /// kResourceExhausted when `max_queue_len` requests wait beyond those that can run at once, kUnavailable after refuse().
  Result<void> submit(std::unique_ptr<Sequence> sequence);
  /// Never refused: a stream sends only its first cancel, and a stop only if it comes earlier than the last. Without effect once the door
  /// is closed.
  void post(Command command);
  /// Further requests get `why`; the first reason stays.
  void refuse(Error why);
  /// The engine thread shall end.
  void close();
  /// Waits until no request is left, at most until `deadline`. False when it was reached.
  bool wait_until_idle(std::optional<std::chrono::steady_clock::time_point> deadline);

  // For the engine thread.

  /// Moves what has come to `commands` (empty on entry), waiting for something if `wait`. False when the door is closed.
  bool take(std::vector<Command>& commands, bool wait);
  /// From now until the next take(), `wake` is called (quickly, from other threads) when something comes. False, and it is not called, when
  /// something is there already.
  bool listen(std::function<void()> wake);
  /// What became of the commands that were taken: sequences that run and that wait.
  void publish(int32_t num_running, int32_t num_waiting);
  /// No sequence is left and every event was sent, or not.
  void set_idle(bool idle);

 private:
  void arrived();

  const int32_t max_num_seqs_, max_queue_len_;
  std::mutex mutex_;
  std::condition_variable command_arrived_, became_idle_;
  std::vector<Command> commands_;
  std::function<void()> wake_;  // while the engine thread listens
  std::optional<Error> refusal_;
  bool closed_ = false;
  int32_t num_new_ = 0;    // submitted, not in the published counts yet
  int32_t num_taken_ = 0;  // of those, taken by the engine thread
  int32_t num_running_ = 0, num_waiting_ = 0;
  bool idle_ = true;
};

}  // namespace quern::engine
