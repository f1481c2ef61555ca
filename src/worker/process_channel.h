#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "base/bounded_queue.h"
#include "worker/processes.h"
#include "worker/wire.h"

namespace quern::worker {

/// What goes to and fro between two processes, each with a thread. An end that has nothing to say says that it is alive; so silence means that the other is lost, whatever it was to do.
class ProcessChannel {
 public:
  struct Settings {
    std::chrono::milliseconds silence{10'000};    // after which the other is lost
    std::chrono::milliseconds first_word{120'000};  // after which it is, if it never spoke: it may have other things to prepare
    [[nodiscard]] std::chrono::milliseconds interval() const { return std::min(std::chrono::milliseconds(250), silence / 8); }  // of signs of life
  };
  struct Callbacks {
    std::function<void(Message)> on_message;        // in order, from the receiving thread; signs of life, too
    std::function<void(const Error&)> on_failure;   // once, from either thread: nothing comes any more, since the other is lost or not understood
    std::function<double()> loaded = {};            // what signs of life say: the share of the weights
  };
  ProcessChannel(Processes& processes, int32_t other, const Settings& settings, Callbacks callbacks);
  /// What was sent before still goes out, unless the other is lost.
  ~ProcessChannel();

  /// The other may speak from now on, and has to.
  void open();
  /// From any thread; returns at once.
  void send(const Message& message);

 private:
  /// How long the other has said nothing.
  [[nodiscard]] std::chrono::milliseconds silent_for() const;
  void send_queued();
  void receive_all();
  void lose(const Error& error);  // nothing goes any more, either
  void fail(const Error& error);
  [[nodiscard]] bool is_silent_now() const;

  Processes& processes_;
  const int32_t other_;
  const Settings settings_;
  const Callbacks callbacks_;
  static constexpr size_t kQueueLength = 256;  // steps and masks in flight, and more
  BoundedQueue<Bytes> queue_{kQueueLength};
  std::atomic<bool> lost_ = false, failed_ = false, closing_ = false;
  std::atomic<std::chrono::steady_clock::time_point> last_heard_;
  std::atomic<bool> ends_ = false;  // no wait goes on
  std::jthread sender_, receiver_;
};

}  // namespace quern::worker
