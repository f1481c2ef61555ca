#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "backends/opencl/device.h"

namespace quern::opencl {

/// In-order work on one device. The first failure is kept, nothing is enqueued after it, and finish() and wait() report it. Launches are not recorded: the drivers of
/// the cards that we care for replay nothing, and a list kept by the host would save no launch.
class Stream final : public ops::Stream {
 public:
  Stream(std::shared_ptr<Context> context, QueueObject* queue, bool inspectable) : context_(std::move(context)), queue_(queue), inspectable_(inspectable) {}
  ~Stream() override;

  void copy_to_device(const void* source, const ops::TensorView& destination) override;
  void copy_to_host(const ops::TensorView& source, void* destination) override;
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override;
  void fill_zero(const ops::TensorView& destination) override;
  Result<void> finish() override;
  ops::Mark mark() override;
  Result<void> wait(ops::Mark mark) override;

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

  /// Hands an inspectable buffer to the device, and all of them back to the host.
  void lend(const Buffer* buffer);
  void take_back();
  /// Keeps the first failure; `what` names it.
  bool succeeded(Status status, const char* what);
  void fail(Error error);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  [[nodiscard]] Result<void> outcome() const;

  std::shared_ptr<Context> context_;
  QueueObject* queue_;
  bool inspectable_;
  std::vector<const Buffer*> lent_;
  KernelObject* launching_ = nullptr;
  uint32_t num_arguments_ = 0;
  Status argument_status_ = kSuccess;
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;  // of error_ and marks_: wait() is called from another thread
  std::optional<Error> error_;
  std::array<EventObject*, kMaxMarks> marks_{};
  ops::Mark num_marks_ = 0;
  std::atomic<const char*> last_launch_ = nullptr;  // for messages, which wait() may make
};

/// The Stream behind a launch's stream.
inline Stream& opencl_stream(ops::Stream& stream) { return static_cast<Stream&>(stream); }

}  // namespace quern::opencl
