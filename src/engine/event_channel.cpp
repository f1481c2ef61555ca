#include "engine/event_channel.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace quern::engine {
namespace {

template <class T>
void append(std::vector<T>& to, std::vector<T>&& from) {
  if (to.empty()) {
    to = std::move(from);
  } else {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  }
}

}  // namespace

void EventChannel::push(TokenEvent event) {
  {
    std::lock_guard lock(mutex_);
    if (event.finish) finish_ = event.finish;
    if (!event_) event_.emplace();
    append(event_->tokens, std::move(event.tokens));
    append(event_->logprobs, std::move(event.logprobs));
    append(event_->prompt_logprobs, std::move(event.prompt_logprobs));
    event_->finish = std::move(event.finish);
    cut();
    if (!event_) return;
  }
  arrived_.notify_all();
  std::lock_guard lock(wake_mutex_);
  if (wake_) wake_();
}

std::optional<TokenEvent> EventChannel::try_next() {
  std::lock_guard lock(mutex_);
  return take();
}

TokenEvent EventChannel::next() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [this] { return event_ || finish_; });
  if (!event_) return TokenEvent{.finish = finish_};  // read past the end
  return *take();
}

void EventChannel::on_event(std::function<void()> wake) {
  std::lock_guard lock(wake_mutex_);
  wake_ = std::move(wake);
  bool waiting = false;
  {
    std::lock_guard state_lock(mutex_);
    waiting = event_.has_value();
  }
  if (waiting && wake_) wake_();
}

bool EventChannel::cancel() {
  std::lock_guard lock(mutex_);
  const bool first = !std::exchange(cancelled_, true);
  cut();
  return first && !finish_;
}

bool EventChannel::stop_at(int32_t completion_tokens) {
  std::lock_guard lock(mutex_);
  completion_tokens = std::max(completion_tokens, 0);
  if (completion_tokens >= most_tokens_) return false;
  most_tokens_ = completion_tokens;
  cut();
  return !finish_;
}

bool EventChannel::detach() {
  {
    std::lock_guard lock(wake_mutex_);
    wake_ = nullptr;
  }
  return cancel();
}

std::optional<TokenEvent> EventChannel::take() {
  if (!event_) return std::nullopt;
  num_read_ += static_cast<int32_t>(event_->tokens.size());
  return std::exchange(event_, std::nullopt);
}

/// Brings the waiting event in line with what the consumer still wants to hear.
void EventChannel::cut() {
  if (!event_) return;
  if (cancelled_) event_->prompt_logprobs.clear();
  const auto most = static_cast<size_t>(cancelled_ ? 0 : std::max(most_tokens_ - num_read_, 0));
  if (event_->tokens.size() > most) {
    event_->tokens.resize(most);
    event_->logprobs.resize(std::min(event_->logprobs.size(), most));
  }
  // The engine may have ended the request before it heard of the stop.
  if (event_->finish && !cancelled_ && event_->finish->usage.completion_tokens >= most_tokens_) {
    Finish& finish = *event_->finish;
    if (finish.usage.completion_tokens > most_tokens_) finish.stop_token.reset();
    finish.usage.completion_tokens = most_tokens_;
    finish.reason = FinishReason::kStop;
    finish.error.reset();
    finish_ = finish;
  }
  if (event_->tokens.empty() && event_->prompt_logprobs.empty() && !event_->finish) event_.reset();
}

}  // namespace quern::engine
