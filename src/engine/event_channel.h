#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>

#include "engine/request.h"

namespace quern::engine {

/// The way of one request's events from the engine thread to its consumer; thread-safe, and shared by both ends, since either may go first.
/// It holds at most one event: news that arrives before the last was read is joined to it.
class EventChannel {
 public:
  // The engine's end.
  void push(TokenEvent event);

  // The consumer's end; see RequestStream.
  std::optional<TokenEvent> try_next();
  TokenEvent next();
  void on_event(std::function<void()> wake);
  /// Drops tokens that were not read and all that follow. False when the request has already finished.
  bool cancel();
  /// Cuts the output after `completion_tokens`, also when its end is already in the channel. False when the request has already finished,
  /// or was to end there or earlier anyway.
  bool stop_at(int32_t completion_tokens);
  /// The consumer leaves: `wake` is not running and will not be called again. False when the request has already finished.
  bool detach();

 private:
  std::optional<TokenEvent> take();
  void cut();

  std::mutex wake_mutex_;  // held while wake_ runs; taken before mutex_
  std::function<void()> wake_;

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::optional<TokenEvent> event_;
  std::optional<Finish> finish_;  // set when the last event was pushed
  int32_t num_read_ = 0;          // tokens that the consumer has
  int32_t most_tokens_ = std::numeric_limits<int32_t>::max();
  bool cancelled_ = false;
};

}  // namespace quern::engine
