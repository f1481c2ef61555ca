#include "backends/cuda/stream.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/parallel.h"

namespace quern::cuda {

namespace {

DeviceAddress address_of(const ops::TensorView& view) { return reinterpret_cast<DeviceAddress>(view.data<std::byte>()); }

}  // namespace

Result<PinnedMemory> PinnedMemory::allocate(std::shared_ptr<Context> context, size_t size_bytes) {
  context->make_current();
  void* data = nullptr;
  if (const Status status = context->driver.host_allocate(&data, size_bytes, kHostPortable | kHostDeviceMapped); status != kSuccess)
    return make_error(ErrorCode::kResourceExhausted, "{} bytes of host memory cannot be page-locked: {}", size_bytes, context->driver.describe(status));
  return PinnedMemory(std::move(context), static_cast<std::byte*>(data), size_bytes);
}
PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  context_->make_current();
  context_->driver.host_free(data_);
}

Result<Event> Event::create(std::shared_ptr<Context> context, bool timing) {
  context->make_current();
  EventObject* handle = nullptr;
  if (const Status status = context->driver.event_create(&handle, timing ? kEventDefault : kEventDisableTiming); status != kSuccess)
    return make_error(ErrorCode::kInternal, "{} makes no event: {}", context->device_name, context->driver.describe(status));
  return Event(std::move(context), handle);
}
Event::~Event() {
  if (handle_ == nullptr) return;
  context_->make_current();
  context_->driver.event_destroy(handle_);
}

Graph::~Graph() {
  context_->make_current();
  context_->driver.graph_exec_destroy(handle_);
}

Stream::Stream(std::shared_ptr<Context> context, StreamObject* handle, std::vector<Event> marks, bool await_launches, const Function<CopyPiece>& copy_small)
    : context_(std::move(context)), handle_(handle), await_launches_(await_launches), copy_small_(copy_small), marks_(std::move(marks)) {}

Stream::~Stream() {
  context_->make_current();
  context_->driver.stream_synchronize(handle_);
  context_->driver.stream_destroy(handle_);
}

void Stream::fail(Error error) {
  const std::lock_guard lock(error_mutex_);
  if (!error_) error_ = std::move(error);
  failed_.store(true, std::memory_order_release);
}

void Stream::watch(std::shared_ptr<Watched> watched) {
  const std::lock_guard lock(error_mutex_);
  watched_.push_back(std::move(watched));
}

Result<void> Stream::outcome() {
  if (!failed()) {
    std::vector<std::shared_ptr<Watched>> watched;
    {
      const std::lock_guard lock(error_mutex_);
      if (!watched_.empty()) watched = watched_;
    }
    for (const auto& each : watched)
      if (const auto outcome = each->outcome(); !outcome) fail(outcome.error());
  }
  if (!failed()) return {};
  const std::lock_guard lock(error_mutex_);
  return *error_;
}

bool Stream::succeeded(Status status, const char* what) {
  if (status == kSuccess) return true;
  const char* last_launch = last_launch_.load(std::memory_order_relaxed);
  if (!failed())
    fail(make_error(status == kOutOfMemory ? ErrorCode::kResourceExhausted : ErrorCode::kInternal, "{} on {} failed: {}{}", what, context_->device_name,
                        context_->driver.describe(status),
                        last_launch == nullptr ? std::string() : fmt::format(" (the last kernel launched is '{}')", last_launch)));
  return false;
}

void Stream::enqueue_launch(FunctionObject* function, const char* name, const LaunchShape& shape, void* args) {
  if (failed() || shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  context_->make_current();
  LaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z != 1) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchCluster;
    attribute.value.cluster = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  if (shape.programmatic && (!recording_ || follows_kernel_)) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchProgrammatic;
    attribute.value.programmatic = 1;
  }
  const LaunchConfig config{{shape.grid.x, shape.grid.y, shape.grid.z}, {shape.block.x, shape.block.y, shape.block.z}, shape.shared_bytes, handle_,
                            attributes, num_attributes};
  void* parameters[] = {args};
  if (const Status status = context_->driver.launch(&config, function, parameters, nullptr); status != kSuccess) {
    fail(make_error(ErrorCode::kInternal, "kernel '{}' (grid {} x {} x {}, {} threads, {} bytes of shared memory) could not be launched on {}: {}", name,
                        shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x * shape.block.y * shape.block.z, shape.shared_bytes, context_->device_name,
                    context_->driver.describe(status)));
    return;
  }
  follows_kernel_ = true;
  last_launch_.store(name, std::memory_order_relaxed);
  if (await_launches_) succeeded(context_->driver.stream_synchronize(handle_), "a kernel");
}

bool Stream::make_stages() {
  while (stages_.size() < kNumStages) {
    auto memory = PinnedMemory::allocate(context_, kStageBytes);
    auto passed = Event::create(context_, false);
    if (!memory || !passed) {
      fail(!memory ? memory.error() : passed.error());
      stages_.clear();
      return false;
    }
    stages_.push_back({std::move(*memory), std::move(*passed)});
  }
  return true;
}

/// Room for `size_bytes` (at most kStageBytes) in the current stage; null after a failure.
std::byte* Stream::stage(size_t size_bytes) {
  if (!make_stages()) return nullptr;
  if (stage_used_ + size_bytes > kStageBytes) next_stage();
  if (failed()) return nullptr;
  std::byte* place = stages_[stage_].memory.data() + stage_used_;
  stage_used_ += (size_bytes + 63) / 64 * 64;
  return place;
}

void Stream::next_stage() {
  if (!succeeded(context_->driver.event_record(stages_[stage_].passed.handle(), handle_), "a copy")) return;
  stages_[stage_].in_flight = true;
  stage_ = (stage_ + 1) % kNumStages;
  stage_used_ = 0;
  if (stages_[stage_].in_flight) succeeded(context_->driver.event_synchronize(stages_[stage_].passed.handle()), "a copy");
  stages_[stage_].in_flight = false;
}

/// Each thread has stages of its own and fills one while another is copied. Pieces of one copy may reach the device in any order.
void Stream::copy_in_parallel(const std::byte* source, DeviceAddress destination, size_t size_bytes) {
  if (!make_stages()) return;
  if (stage_used_ > 0) next_stage();  // what was staged before is marked
  const auto pieces = static_cast<int64_t>((size_bytes + kStageBytes - 1) / kStageBytes);
  std::atomic<Status> outcome = kSuccess;
  parallel_pieces(std::min<int64_t>(pieces, num_loading_threads()), 1, [&](int64_t first, int64_t, int64_t thread) {
    context_->make_current();
    CHECK(first == thread);
    const auto step = std::min<int64_t>(pieces, num_loading_threads());
    size_t turn = 0;
    const size_t own = kNumStages / static_cast<size_t>(num_loading_threads());
    for (int64_t piece = first; piece < pieces && outcome == kSuccess; piece += step, turn = (turn + 1) % own) {
      Stage& s = stages_[static_cast<size_t>(thread) * own + turn];
      const size_t at = static_cast<size_t>(piece) * kStageBytes, size = std::min(kStageBytes, size_bytes - at);
      Status status = s.in_flight ? context_->driver.event_synchronize(s.passed.handle()) : kSuccess;
      if (status == kSuccess) {
        std::memcpy(s.memory.data(), source + at, size);
        status = context_->driver.copy_to_device(destination + at, s.memory.data(), size, handle_);
      }
      if (status == kSuccess) status = context_->driver.event_record(s.passed.handle(), handle_);
      s.in_flight = status == kSuccess;
      if (status != kSuccess) outcome = status;
    }
  });
  if (!succeeded(outcome, "a copy to the device")) return;
  stage_ = 0;
  stage_used_ = 0;
  if (std::exchange(stages_[0].in_flight, false)) succeeded(context_->driver.event_synchronize(stages_[0].passed.handle()), "a copy to the device");
}

bool Stream::copy_by_kernel(const void* source, void* destination, size_t size_bytes) {
  constexpr size_t kThreads = 128, kBytesOfThread = 16;
  if (size_bytes > kSmallBytes) return false;
  const auto blocks = static_cast<unsigned>((size_bytes + kThreads * kBytesOfThread - 1) / (kThreads * kBytesOfThread));
  const char* before = last_launch_.load(std::memory_order_relaxed);
  launch(copy_small_, {.grid = {blocks}, .block = {kThreads}}, CopyPiece{source, destination, static_cast<int64_t>(size_bytes)});
  last_launch_.store(before, std::memory_order_relaxed);  // what fails is hardly the copy
  return true;
}

void Stream::copy_to_device(const void* source, const ops::TensorView& destination) {
  if (failed() || destination.empty()) return;
  context_->make_current();
  const auto* from = static_cast<const std::byte*>(source);
  const size_t size = destination.size_bytes();
  const bool page_locked = context_->is_page_locked(source, size);
  if (page_locked && copy_by_kernel(source, destination.data<void>(), size)) return;
  follows_kernel_ = false;
  if (page_locked) succeeded(context_->driver.copy_to_device(address_of(destination), source, size, handle_), "a copy to the device");
  const bool parallel = !page_locked && size >= kParallelBytes && num_loading_threads() > 1;
  if (parallel) copy_in_parallel(from, address_of(destination), size);
  for (size_t done = page_locked || parallel ? size : 0; done < size;) {
    const size_t piece = std::min(size - done, kStageBytes);
    std::byte* staged = stage(piece);
    if (staged == nullptr) return;
    std::memcpy(staged, from + done, piece);
    if (!succeeded(context_->driver.copy_to_device(address_of(destination) + done, staged, piece, handle_), "a copy to the device")) return;
    done += piece;
  }
  if (await_launches_) succeeded(context_->driver.stream_synchronize(handle_), "a copy to the device");
}

void Stream::copy_to_host(const ops::TensorView& source, void* destination) {
  if (failed() || source.empty()) return;
  context_->make_current();
  const size_t size = source.size_bytes();
  if (context_->is_page_locked(destination, size)) {
    if (copy_by_kernel(source.data<void>(), destination, size)) return;
    follows_kernel_ = false;
    succeeded(context_->driver.copy_to_host(destination, address_of(source), size, handle_), "a copy to the host");
    return;
  }
  follows_kernel_ = false;
  if (!download_memory_) {
    auto memory = PinnedMemory::allocate(context_, kDownloadBytes);
    if (!memory) {
      fail(memory.error());
      return;
    }
    download_memory_.emplace(std::move(*memory));
  }
  if (download_used_ + size > kDownloadBytes) {  // a large one goes straight to its place, which waits for the device
    succeeded(context_->driver.copy_to_host(destination, address_of(source), size, handle_), "a copy to the host");
    return;
  }
  std::byte* staged = download_memory_->data() + download_used_;
  download_used_ += (size + 63) / 64 * 64;
  if (succeeded(context_->driver.copy_to_host(staged, address_of(source), size, handle_), "a copy to the host")) downloads_.push_back({staged, destination, size});
}

void Stream::copy(const ops::TensorView& source, const ops::TensorView& destination) {
  CHECK(source.size_bytes() == destination.size_bytes());
  if (failed() || source.empty()) return;
  context_->make_current();
  follows_kernel_ = false;
  succeeded(context_->driver.copy(address_of(destination), address_of(source), source.size_bytes(), handle_), "a copy");
  if (await_launches_) succeeded(context_->driver.stream_synchronize(handle_), "a copy");
}

void Stream::fill_zero(const ops::TensorView& destination) {
  if (failed() || destination.empty()) return;
  context_->make_current();
  follows_kernel_ = false;
  succeeded(context_->driver.fill(address_of(destination), 0, destination.size_bytes(), handle_), "clearing memory");
  if (await_launches_) succeeded(context_->driver.stream_synchronize(handle_), "clearing memory");
}

Result<void> Stream::finish() {
  context_->make_current();
  if (!failed()) succeeded(context_->driver.stream_synchronize(handle_), "waiting for work");
  const auto result = outcome();
  if (result)
    for (const Download& download : downloads_) std::memcpy(download.destination, download.staged, download.size_bytes);
  downloads_.clear();
  download_used_ = 0;
  return result;
}

ops::Mark Stream::mark() {
  if (!downloads_.empty()) static_cast<void>(finish());  // they end in memory that is not page-locked
  const ops::Mark mark = num_marks_++;
  if (failed()) return mark;
  context_->make_current();
  succeeded(context_->driver.event_record(marks_[mark % kMaxMarks].handle(), handle_), "a mark");
  return mark;
}

Result<void> Stream::wait(ops::Mark mark) {
  context_->make_current();
  if (!failed()) succeeded(context_->driver.event_synchronize(marks_[mark % kMaxMarks].handle()), "waiting for a step");
  return outcome();
}

void Stream::begin_recording() {
  if (failed()) return;
  context_->make_current();
  recording_ = follows_kernel_ = true;
  succeeded(context_->driver.stream_begin_capture(handle_, kCaptureThreadLocal), "recording");
}

Result<std::unique_ptr<ops::Graph>> Stream::end_recording() {
  recording_ = false;
  RETURN_IF_ERROR(outcome());
  context_->make_current();
  GraphObject* graph = nullptr;
  GraphExecObject* exec = nullptr;
  if (succeeded(context_->driver.stream_end_capture(handle_, &graph), "recording")) {
    succeeded(context_->driver.graph_instantiate(&exec, graph, 0), "making a graph");
    context_->driver.graph_destroy(graph);
  }
  RETURN_IF_ERROR(outcome());
  return std::unique_ptr<ops::Graph>(std::make_unique<Graph>(context_, exec));
}

void Stream::replay(const ops::Graph& graph) {
  if (failed()) return;
  context_->make_current();
  succeeded(context_->driver.graph_launch(static_cast<const Graph&>(graph).handle(), handle_), "a graph");
}

void Stream::record(const Event& event) {
  if (failed()) return;
  context_->make_current();
  succeeded(context_->driver.event_record(event.handle(), handle_), "an event");
}

Result<double> Stream::seconds_between(const Event& begin, const Event& end) {
  RETURN_IF_ERROR(finish());
  float milliseconds = 0;
  if (const Status status = context_->driver.event_elapsed(&milliseconds, begin.handle(), end.handle()); status != kSuccess)
    return make_error(ErrorCode::kInternal, "no time between events: {}", context_->driver.describe(status));
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace quern::cuda
