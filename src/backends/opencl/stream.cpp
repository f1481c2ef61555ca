#include "backends/opencl/stream.h"

namespace quern::opencl {

namespace {

const Buffer* buffer_of(const ops::TensorView& view) { return static_cast<const Buffer*>(view.buffer); }

}  // namespace

Result<Event> Event::make_gate(std::shared_ptr<Context> context) {
  Status status = kSuccess;
  EventObject* handle = context->driver.user_event_create(context->handle, &status);
  if (handle == nullptr) return make_error(ErrorCode::kInternal, "{} makes no event: {}", context->device_name, describe(status));
  return Event(std::move(context), handle);
}

void FirstError::set(Error error) {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = std::move(error);
  set_.store(true, std::memory_order_release);
}

Result<void> FirstError::outcome() const {
  if (!is_set()) return {};
  const std::lock_guard lock(mutex_);
  return *error_;
}

Stream::~Stream() {
  context_->driver.finish(queue_);
  for (EventObject* mark : marks_)
    if (mark != nullptr) context_->driver.event_release(mark);
  context_->driver.queue_release(queue_);
}


bool Stream::succeeded(Status status, const char* what) {
  if (status == kSuccess) return true;
  const char* last_launch = last_launch_.load(std::memory_order_relaxed);
  if (!failed())
    fail(make_error(status == kMemoryAllocationFailure ? ErrorCode::kResourceExhausted : ErrorCode::kInternal, "{} on {} failed: {}{}", what, context_->device_name,
                    describe(status), last_launch == nullptr ? std::string() : fmt::format(" (the last kernel launched is '{}')", last_launch)));
  return false;
}

bool Stream::begin_launch(const Function& kernel, const LaunchShape& shape) {
  if (failed() || shape.groups[0] == 0 || shape.groups[1] == 0 || shape.groups[2] == 0) return false;
  launching_ = kernel.handle;
  num_arguments_ = 0;
  argument_status_ = kSuccess;
  return true;
}

void Stream::set_argument(const Place& place) {
  lend(place.buffer);
  MemoryObject* memory = place.buffer == nullptr ? nullptr : place.buffer->handle();
  set_bytes(&memory, sizeof memory);
  set_bytes(&place.offset_bytes, sizeof place.offset_bytes);
}

void Stream::set_bytes(const void* value, size_t size) {
  const Status status = context_->driver.kernel_set_argument(launching_, num_arguments_++, size, value);
  if (argument_status_ == kSuccess) argument_status_ = status;
}

void Stream::enqueue_launch(const Function& kernel, const LaunchShape& shape) {
  size_t global[3];
  for (int axis = 0; axis < 3; ++axis) global[axis] = shape.groups[axis] * shape.items[axis];
  Status status = argument_status_;
  if (status == kSuccess) status = context_->driver.launch(queue_, kernel.handle, 3, nullptr, global, shape.items, 0, nullptr, nullptr);
  if (status != kSuccess)
    fail(make_error(ErrorCode::kInternal, "kernel '{}' ({} x {} x {} groups of {} x {} x {} with {} arguments) could not be launched on {}: {}", kernel.name, shape.groups[0],
                    shape.groups[1], shape.groups[2], shape.items[0], shape.items[1], shape.items[2], num_arguments_, context_->device_name, describe(status)));
  else
    last_launch_.store(kernel.name, std::memory_order_relaxed);
  context_->num_launches.fetch_add(1, std::memory_order_relaxed);
}

void Stream::copy_to_device(const void* source, const ops::TensorView& destination) {
  if (failed() || destination.empty()) return;
  lend(buffer_of(destination));
  succeeded(context_->driver.write(queue_, buffer_of(destination)->handle(), kFalse, destination.offset_bytes, destination.size_bytes(), source, 0, nullptr, nullptr),
            "a copy to the device");
}

void Stream::copy_to_host(const ops::TensorView& source, void* destination) {
  if (failed() || source.empty()) return;
  lend(buffer_of(source));
  succeeded(context_->driver.read(queue_, buffer_of(source)->handle(), kFalse, source.offset_bytes, source.size_bytes(), destination, 0, nullptr, nullptr),
            "a copy to the host");
}

Event Stream::read(const ops::TensorView& source, void* destination, const Event* gate) {
  if (failed() || source.empty()) return {};
  lend(buffer_of(source));
  EventObject* const waited = gate == nullptr ? nullptr : gate->handle();
  EventObject* event = nullptr;
  succeeded(context_->driver.read(queue_, buffer_of(source)->handle(), kFalse, source.offset_bytes, source.size_bytes(), destination, gate == nullptr ? 0 : 1,
                                  gate == nullptr ? nullptr : &waited, &event),
            "a copy to the host");
  return {context_, event};
}

Event Stream::write(const void* source, const ops::TensorView& destination, const Event* gate) {
  if (failed() || destination.empty()) return {};
  lend(buffer_of(destination));
  EventObject* const waited = gate == nullptr ? nullptr : gate->handle();
  EventObject* event = nullptr;
  succeeded(context_->driver.write(queue_, buffer_of(destination)->handle(), kFalse, destination.offset_bytes, destination.size_bytes(), source, gate == nullptr ? 0 : 1,
                                   gate == nullptr ? nullptr : &waited, &event),
            "a copy to the device");
  return {context_, event};
}

Event Stream::passage() {
  if (failed()) return {};
  EventObject* event = nullptr;
  succeeded(context_->driver.mark(queue_, 0, nullptr, &event), "a place in the queue");
  return {context_, event};
}

void Stream::flush() {
  if (!failed()) succeeded(context_->driver.flush(queue_), "submitting work");
}

void Stream::copy(const ops::TensorView& source, const ops::TensorView& destination) {
  CHECK(source.size_bytes() == destination.size_bytes());
  if (failed() || source.empty()) return;
  lend(buffer_of(source));
  lend(buffer_of(destination));
  succeeded(context_->driver.copy(queue_, buffer_of(source)->handle(), buffer_of(destination)->handle(), source.offset_bytes, destination.offset_bytes, source.size_bytes(),
                                  0, nullptr, nullptr),
            "a copy");
}

void Stream::fill_zero(const ops::TensorView& destination) {
  constexpr unsigned char kZero = 0;
  fill(place_of(destination), &kZero, sizeof kZero, destination.size_bytes());
}

void Stream::fill(const Place& place, const void* pattern, size_t pattern_bytes, size_t size_bytes) {
  if (failed() || place.buffer == nullptr) return;
  lend(place.buffer);
  succeeded(context_->driver.fill(queue_, place.buffer->handle(), pattern, pattern_bytes, place.offset_bytes, size_bytes, 0, nullptr, nullptr), "filling memory");
}

Result<void> Stream::finish() {
  if (!failed()) succeeded(context_->driver.finish(queue_), "waiting for work");
  return outcome();
}

ops::Mark Stream::mark() {
  const ops::Mark mark = num_marks_++;
  if (failed()) return mark;
  EventObject* event = nullptr;
  if (!succeeded(context_->driver.mark(queue_, 0, nullptr, &event), "a mark")) return mark;
  {
    const std::lock_guard lock(mutex_);
    std::swap(event, marks_[mark % kMaxMarks]);
  }
  if (event != nullptr) context_->driver.event_release(event);
  succeeded(context_->driver.flush(queue_), "submitting work");
  return mark;
}

Result<void> Stream::wait(ops::Mark mark) {
  EventObject* event = nullptr;
  if (!failed()) {
    const std::lock_guard lock(mutex_);
    event = marks_[mark % kMaxMarks];
    if (event != nullptr) context_->driver.event_retain(event);
  }
  if (event != nullptr) {
    succeeded(context_->driver.wait_for_events(1, &event), "waiting for a step");
    context_->driver.event_release(event);
  }
  return outcome();
}

}  // namespace quern::opencl
