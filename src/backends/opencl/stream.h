#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "backends/opencl/device.h"

namespace quern::opencl {

/// A place in a queue, or a gate that the host opens.
class Event {
 public:
  Event() = default;
  Event(std::shared_ptr<Context> context, EventObject* handle) : context_(std::move(context)), handle_(handle) {}
  Event(Event&& other) noexcept : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Event() {
    if (handle_ != nullptr) context_->driver.event_release(handle_);
  }
  /// Work that waits for it waits until open() or close().
  static Result<Event> make_gate(std::shared_ptr<Context> context);
  void open() const { context_->driver.user_event_set(handle_, kComplete); }
  /// What waits for it ends with an error, and so does what stands behind that in its queue.
  void close() const { context_->driver.user_event_set(handle_, -1); }

  [[nodiscard]] bool exists() const { return handle_ != nullptr; }
  [[nodiscard]] EventObject* handle() const { return handle_; }
  /// Until the work has ended; its error.
  [[nodiscard]] Status wait() const { return context_->driver.wait_for_events(1, &handle_); }

 private:
  std::shared_ptr<Context> context_;
  EventObject* handle_ = nullptr;
};

/// The first error of a stream, which others may have found. Thread-safe.
class FirstError {
 public:
  void set(Error error);
  [[nodiscard]] bool is_set() const { return set_.load(std::memory_order_acquire); }
  [[nodiscard]] Result<void> outcome() const;

 private:
  std::atomic<bool> set_ = false;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

/// In-order work on one device. The first failure is kept, nothing is enqueued after it, and finish() and wait() report it. Launches are not recorded: the drivers of
/// the cards that we care for replay nothing, and a list kept by the host would save no launch.
class Stream final : public ops::Stream {
 public:
  Stream(std::shared_ptr<Context> context, QueueObject* queue) : context_(std::move(context)), queue_(queue) {}
  ~Stream() override;

  void copy_to_device(const void* source, const ops::TensorView& destination) override;
  void copy_to_host(const ops::TensorView& source, void* destination) override;
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override;
  void fill_zero(const ops::TensorView& destination) override;
  Result<void> finish() override;
  ops::Mark mark() override;
  Result<void> wait(ops::Mark mark) override;

  // For collectives: a thread of theirs sees the queue arrive at an event, and opens gates.
  /// As copy_to_host and copy_to_device; the copy begins when `gate` is open, where one is given. No event: the stream has failed.
  Event read(const ops::TensorView& source, void* destination, const Event* gate);
  Event write(const void* source, const ops::TensorView& destination, const Event* gate);
  /// Passed when all before it is done.
  Event passage();
  /// Hands to the device what was enqueued.
  void flush();
  void fail(Error error) { error_->set(std::move(error)); }
  [[nodiscard]] Result<void> outcome() const { return error_->outcome(); }
  [[nodiscard]] const std::shared_ptr<FirstError>& error() const { return error_; }
  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }

  /// Writes a value of 1, 2, 4 ... 128 bytes, which may be gone when this returns.
  template <class T>
  void set(const Place& place, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 128 && (sizeof(T) & (sizeof(T) - 1)) == 0);
    fill(place, &value, sizeof value, sizeof value);
  }

  /// Enqueues a kernel. Arguments are Places and TensorViews (a pointer and an offset for the kernel), numbers, and int32_t for int, int64_t for long.
  template <class... Args>
  void launch(const Function& kernel, const LaunchShape& shape, const Args&... args) {
    if (!begin_launch(kernel, shape)) return;
    (set_argument(args), ...);
    enqueue_launch(kernel, shape);
  }

 private:
  void fill(const Place& place, const void* pattern, size_t pattern_bytes, size_t size_bytes);
  bool begin_launch(const Function& kernel, const LaunchShape& shape);
  void set_argument(const Place& place);
  void set_argument(const ops::TensorView& view) { set_argument(place_of(view)); }
  template <class T>
    requires std::is_arithmetic_v<T>
  void set_argument(T value) {
    static_assert(!std::is_same_v<T, bool>);
    set_bytes(&value, sizeof value);
  }
  void set_bytes(const void* value, size_t size);
  void enqueue_launch(const Function& kernel, const LaunchShape& shape);

  /// Before work that uses a buffer.
  void lend(const Buffer* buffer) {
    if (buffer != nullptr) buffer->lend(queue_, error_);
  }
  /// Keeps the first failure; `what` names it.
  bool succeeded(Status status, const char* what);
  [[nodiscard]] bool failed() const { return error_->is_set(); }

  std::shared_ptr<Context> context_;
  QueueObject* queue_;
  KernelObject* launching_ = nullptr;
  uint32_t num_arguments_ = 0;
  Status argument_status_ = kSuccess;
  std::shared_ptr<FirstError> error_ = std::make_shared<FirstError>();
  std::mutex mutex_;  // of marks_: wait() is called from another thread
  std::array<EventObject*, kMaxMarks> marks_{};
  ops::Mark num_marks_ = 0;
  std::atomic<const char*> last_launch_ = nullptr;  // for messages, which wait() may make
};

/// The Stream behind a launch's stream.
inline Stream& opencl_stream(ops::Stream& stream) { return static_cast<Stream&>(stream); }

}  // namespace quern::opencl
