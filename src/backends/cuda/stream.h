#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cuda/copy_args.h"
#include "backends/cuda/device.h"

namespace quern::cuda {

/// A piece of page-locked host memory.
class PinnedMemory {
 public:
  static Result<PinnedMemory> allocate(std::shared_ptr<Context> context, size_t size_bytes);
  PinnedMemory(PinnedMemory&& other) noexcept : context_(std::move(other.context_)), data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}
  PinnedMemory& operator=(PinnedMemory&&) = delete;
  ~PinnedMemory();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }

 private:
  PinnedMemory(std::shared_ptr<Context> context, std::byte* data, size_t size_bytes) : context_(std::move(context)), data_(data), size_bytes_(size_bytes) {}
  std::shared_ptr<Context> context_;
  std::byte* data_;
  size_t size_bytes_;
};

/// A point in a stream.
class Event {
 public:
  static Result<Event> create(std::shared_ptr<Context> context, bool timing);
  Event(Event&& other) noexcept : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();
  [[nodiscard]] EventObject* handle() const { return handle_; }

 private:
  Event(std::shared_ptr<Context> context, EventObject* handle) : context_(std::move(context)), handle_(handle) {}
  std::shared_ptr<Context> context_;
  EventObject* handle_;
};

/// Launches of a stream, to be replayed as one.
class Graph final : public ops::Graph {
 public:
  Graph(std::shared_ptr<Context> context, GraphExecObject* handle) : context_(std::move(context)), handle_(handle) {}
  ~Graph() override;
  [[nodiscard]] GraphExecObject* handle() const { return handle_; }

 private:
  std::shared_ptr<Context> context_;
  GraphExecObject* handle_;
};

/// In-order work on one GPU. Host memory of copies is staged through pinned memory where it is not page-locked itself, so that enqueuing does not wait for the device.
/// The first failure is kept, nothing is enqueued after it, and finish() and wait() report it.
class Stream final : public ops::Stream {
 public:
  /// `copy_small`: see copy_by_kernel().
  Stream(std::shared_ptr<Context> context, StreamObject* handle, std::vector<Event> marks, bool await_launches, const Function<CopyPiece>& copy_small);
  ~Stream() override;

  void copy_to_device(const void* source, const ops::TensorView& destination) override;
  void copy_to_host(const ops::TensorView& source, void* destination) override;
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override;
  void fill_zero(const ops::TensorView& destination) override;
  Result<void> finish() override;
  ops::Mark mark() override;
  Result<void> wait(ops::Mark mark) override;
  [[nodiscard]] bool can_record() const override { return !await_launches_; }
  void begin_recording() override;
  Result<std::unique_ptr<ops::Graph>> end_recording() override;
  void replay(const ops::Graph& graph) override;

  template <class Args>
  void launch(const Function<Args>& function, const LaunchShape& shape, const Args& args) {
    enqueue_launch(function.handle, function.name, shape, const_cast<Args*>(&args));
  }

  /// Whatever can go wrong on the device without the driver's knowledge.
  class Watched {
   public:
    virtual ~Watched() = default;
    /// From the threads that call finish() and wait().
    virtual Result<void> outcome() = 0;
  };
  /// finish() and wait() ask `watched`, too.
  void watch(std::shared_ptr<Watched> watched);
  void fail(Error error);
  [[nodiscard]] Result<void> outcome();

  void record(const Event& event);
  /// Seconds between two recorded events, once both have passed.
  Result<double> seconds_between(const Event& begin, const Event& end);
  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }
  [[nodiscard]] StreamObject* handle() const { return handle_; }

 private:
  /// A piece of the upload staging; free for reuse once `passed` lies behind the device.
  struct Stage {
    PinnedMemory memory;
    Event passed;
    bool in_flight = false;
  };
  struct Download {
    std::byte* staged;
    void* destination;
    size_t size_bytes;
  };
  static constexpr size_t kStageBytes = size_t{4} << 20;
  static constexpr size_t kNumStages = 16;
  static constexpr size_t kParallelBytes = 4 * kStageBytes;  // larger copies are staged by several threads
  static constexpr size_t kDownloadBytes = size_t{4} << 20;
  static constexpr size_t kSmallBytes = size_t{256} << 10;

  void enqueue_launch(FunctionObject* function, const char* name, const LaunchShape& shape, void* args);
  /// Keeps the first failure; `what` names it.
  bool succeeded(Status status, const char* what);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool make_stages();
  std::byte* stage(size_t size_bytes);
  void next_stage();
  /// Between device memory and page-locked host memory. Where small copies stand between kernels, a copy engine takes longer to begin and to hand over than to copy (H200, 2026-11-30: 7 and 8 us for
  /// 0.5 and 17 KB between two steps), so a kernel makes them. False: the copy is too large.
  bool copy_by_kernel(const void* source, void* destination, size_t size_bytes);
  void copy_in_parallel(const std::byte* source, DeviceAddress destination, size_t size_bytes);

  std::shared_ptr<Context> context_;
  StreamObject* handle_;
  bool await_launches_;
  Function<CopyPiece> copy_small_;
  bool recording_ = false, follows_kernel_ = true;  // in a graph, only a kernel may start before the end of what it follows, and only of a kernel
  std::atomic<bool> failed_ = false;
  mutable std::mutex error_mutex_;  // of error_ and watched_: wait() is called from another thread
  std::optional<Error> error_;
  std::vector<std::shared_ptr<Watched>> watched_;
  std::vector<Event> marks_;
  ops::Mark num_marks_ = 0;
  std::atomic<const char*> last_launch_ = nullptr;  // for messages, which wait() may make
  std::vector<Stage> stages_;
  size_t stage_ = 0, stage_used_ = 0;
  std::optional<PinnedMemory> download_memory_;
  size_t download_used_ = 0;
  std::vector<Download> downloads_;
};

/// The Stream behind a launch's stream.
inline Stream& cuda_stream(ops::Stream& stream) { return static_cast<Stream&>(stream); }

}  // namespace quern::cuda
