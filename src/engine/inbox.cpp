#include "engine/inbox.h"

#include <algorithm>
#include <utility>

namespace quern::engine {

Result<void> Inbox::submit(std::unique_ptr<Sequence> sequence) {
  std::lock_guard lock(mutex_);
  if (refusal_) return *refusal_;
  // New requests may take free places at once, unless others already wait (for memory).
  const int32_t free_places = num_waiting_ > 0 ? 0 : std::max(max_num_seqs_ - num_running_, 0);
  if (num_new_ + num_waiting_ >= max_queue_len_ + free_places)
    return make_error(ErrorCode::kResourceExhausted,
                      "the queue is full: {} requests run and {} wait, and at most {} may wait; try again later", num_running_,
                      num_waiting_ + num_new_, max_queue_len_);
  ++num_new_;
  idle_ = false;
  commands_.emplace_back(Submit{std::move(sequence)});
  arrived();
  return {};
}

void Inbox::post(Command command) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  commands_.push_back(std::move(command));
  arrived();
}

void Inbox::refuse(Error why) {
  std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = std::move(why);
}

void Inbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  if (!refusal_) refusal_ = make_error(ErrorCode::kUnavailable, "the engine has ended");
  arrived();
}

/// Under the lock, so that nobody who listened is called once it has taken what was there.
void Inbox::arrived() {
  command_arrived_.notify_one();
  if (wake_) wake_();
}

bool Inbox::wait_until_idle(std::optional<std::chrono::steady_clock::time_point> deadline) {
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return idle_; };
  if (deadline) return became_idle_.wait_until(lock, *deadline, idle);
  became_idle_.wait(lock, idle);
  return true;
}

bool Inbox::take(std::vector<Command>& commands, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) command_arrived_.wait(lock, [this] { return closed_ || !commands_.empty(); });
  std::swap(commands, commands_);
  num_taken_ = num_new_;
  wake_ = nullptr;
  return !closed_;
}

bool Inbox::listen(std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  if (closed_ || !commands_.empty()) return false;
  wake_ = std::move(wake);
  return true;
}

void Inbox::publish(int32_t num_running, int32_t num_waiting) {
  std::lock_guard lock(mutex_);
  num_new_ -= std::exchange(num_taken_, 0);
  num_running_ = num_running;
  num_waiting_ = num_waiting;
}

void Inbox::set_idle(bool idle) {
  {
    std::lock_guard lock(mutex_);
    idle_ = idle && num_new_ == 0;
  }
  became_idle_.notify_all();
}

}  // namespace quern::engine
