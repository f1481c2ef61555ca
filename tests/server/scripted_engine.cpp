#include "scripted_engine.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace quern::server {

/// Both ends of one request.
struct ScriptedChannel {
  engine::GenerationRequest request;
  Script script;
  size_t next_token = 0, next_event = 0;  // the engine's
  bool prompt_sent = false;

  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<engine::TokenEvent> events;
  bool cancelled = false;
  std::optional<int32_t> stop_at;
  std::mutex wake_mutex;
  std::function<void()> wake;

  void push(engine::TokenEvent event) {
    {
      const std::lock_guard lock(mutex);
      if (cancelled) return;
      events.push_back(std::move(event));
    }
    arrived.notify_all();
    const std::lock_guard lock(wake_mutex);
    if (wake) wake();
  }
};

namespace {

class ScriptedStream final : public engine::RequestStream {
 public:
  explicit ScriptedStream(std::shared_ptr<ScriptedChannel> channel) : channel_(std::move(channel)) {}
  ~ScriptedStream() override {
    {
      const std::lock_guard lock(channel_->wake_mutex);
      channel_->wake = nullptr;
    }
    cancel();
  }
  std::optional<engine::TokenEvent> try_next() override {
    const std::lock_guard lock(channel_->mutex);
    return take();
  }
  engine::TokenEvent next() override {
    std::unique_lock lock(channel_->mutex);
    channel_->arrived.wait(lock, [&] { return !channel_->events.empty(); });
    return *take();
  }
  void on_event(std::function<void()> wake) override {
    bool waiting = false;
    {
      const std::lock_guard lock(channel_->mutex);
      waiting = !channel_->events.empty();
    }
    const std::lock_guard lock(channel_->wake_mutex);
    channel_->wake = std::move(wake);
    if (waiting) channel_->wake();
  }
  void cancel() override {
    const std::lock_guard lock(channel_->mutex);
    channel_->cancelled = true;
  }
  void stop_at(int32_t completion_tokens) override {
    const std::lock_guard lock(channel_->mutex);
    channel_->stop_at = completion_tokens;
  }

 private:
  std::optional<engine::TokenEvent> take() {
    if (channel_->events.empty()) return std::nullopt;
    engine::TokenEvent event = std::move(channel_->events.front());
    channel_->events.pop_front();
    return event;
  }
  std::shared_ptr<ScriptedChannel> channel_;
};

engine::GenerationRequest copy_of(const engine::GenerationRequest& request) {
  engine::GenerationRequest copy;
  copy.id = request.id;
  copy.prompt = request.prompt;
  copy.sampling = request.sampling;
  copy.max_tokens = request.max_tokens;
  copy.prompt_logprobs = request.prompt_logprobs;
  copy.priority = request.priority;
  copy.cache_salt = request.cache_salt;
  copy.cut_hints = request.cut_hints;
  return copy;
}

}  // namespace

ScriptedEngine::ScriptedEngine(Writer writer)
    : writer_(std::move(writer)), logprob_([](int32_t, int32_t rank) { return -0.5F - static_cast<float>(rank); }) {
  limits_.num_slots = 256;
  limits_.num_blocks = 4096;
  limits_.max_model_len = 4096;
  limits_.max_rows = 2048;
  limits_.vocab_size = 151936;
  stats_.num_blocks = stats_.num_free_blocks = limits_.num_blocks;
  stats_.num_slots = stats_.num_free_slots = limits_.num_slots;
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

ScriptedEngine::~ScriptedEngine() {
  thread_.request_stop();
  changed_.notify_all();
}

Result<std::unique_ptr<engine::RequestStream>> ScriptedEngine::submit(engine::GenerationRequest request) {
  const std::lock_guard lock(mutex_);
  if (running_.size() >= max_queue_len_)
    return make_error(ErrorCode::kResourceExhausted, "the queue is full ({} requests)", running_.size());
  if (request.prompt.empty()) return Error{ErrorCode::kInvalidArgument, "the prompt is empty", "prompt"};
  auto channel = std::make_shared<ScriptedChannel>();
  channel->script = writer_(request);
  submitted_.push_back(copy_of(request));
  channel->request = std::move(request);
  running_.push_back(channel);
  stats_.num_running = static_cast<int32_t>(running_.size());
  changed_.notify_all();
  std::unique_ptr<engine::RequestStream> stream = std::make_unique<ScriptedStream>(std::move(channel));
  return Result<std::unique_ptr<engine::RequestStream>>(std::move(stream));
}

void ScriptedEngine::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] {
    const bool cancelled = std::ranges::any_of(running_, [](const auto& channel) {
      const std::lock_guard channel_lock(channel->mutex);
      return channel->cancelled;
    });
    return !running_.empty() && (permits_ != 0 || cancelled);
  })) {
    const bool may_step = permits_ != 0;
    if (permits_ > 0) --permits_;
    const auto channels = running_;
    for (const auto& channel : channels) {
      bool cancelled = false;
      {
        const std::lock_guard channel_lock(channel->mutex);
        cancelled = channel->cancelled;
      }
      if (cancelled) {
        std::erase(running_, channel);
        ++stats_.requests_cancelled;
      } else if (may_step) {
        step(*channel);
      }
    }
    stats_.num_running = static_cast<int32_t>(running_.size());
    changed_.notify_all();
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
}

void ScriptedEngine::step(ScriptedChannel& channel) {
  const engine::GenerationRequest& request = channel.request;
  const worker::SamplingParams& sampling = request.sampling;
  const auto logprobs_of = [&](int32_t token, int32_t num_top) {
    engine::TokenLogprobs result;
    result.chosen = logprob_(token, 0);
    result.chosen_rank = 1;
    for (int32_t rank = 0; rank < num_top; ++rank) result.top.emplace_back((token + rank) % limits_.vocab_size, logprob_(token, rank));
    return result;
  };
  engine::TokenEvent event;
  if (!std::exchange(channel.prompt_sent, true)) {
    stats_.prompt_tokens += request.prompt.size();
    if (request.prompt_logprobs >= 0) {
      for (size_t i = 1; i < request.prompt.size(); ++i)
        event.prompt_logprobs.push_back(logprobs_of(request.prompt[i], request.prompt_logprobs));
    }
  }
  std::optional<engine::FinishReason> reason;
  std::optional<int32_t> stop_token;
  int32_t completion_tokens = static_cast<int32_t>(channel.next_token);
  {
    const std::lock_guard lock(channel.mutex);
    if (channel.stop_at) reason = engine::FinishReason::kStop, completion_tokens = *channel.stop_at;
  }
  if (!reason && request.max_tokens == 0) reason = engine::FinishReason::kLength;
  if (!reason) {
    const size_t count = channel.next_event < channel.script.events.size() ? channel.script.events[channel.next_event++] : 1;
    for (size_t i = 0; i < count && !reason; ++i) {
      if (channel.next_token == channel.script.tokens.size()) {
        reason = engine::FinishReason::kStop;
        break;
      }
      const int32_t token = channel.script.tokens[channel.next_token++];
      event.tokens.push_back(token);
      if (sampling.num_logprobs >= 0) event.logprobs.push_back(logprobs_of(token, sampling.num_logprobs));
      ++stats_.generation_tokens;
      if (std::ranges::find(sampling.stop_ids, token) != sampling.stop_ids.end()) {
        reason = engine::FinishReason::kStop;
        stop_token = token;
      } else if (std::cmp_greater_equal(channel.next_token, request.max_tokens)) {
        reason = engine::FinishReason::kLength;
      }
    }
    completion_tokens = static_cast<int32_t>(channel.next_token);
  }
  ++stats_.num_steps;
  if (reason) {
    engine::Finish finish;
    finish.reason = *reason;
    finish.stop_token = stop_token;
    if (channel.script.error_after_end) finish.reason = engine::FinishReason::kError, finish.error = channel.script.error_after_end;
    finish.usage = {static_cast<int32_t>(request.prompt.size()), completion_tokens, channel.script.cached_tokens};
    event.finish = finish;
    ++(finish.reason == engine::FinishReason::kError    ? stats_.requests_error
       : finish.reason == engine::FinishReason::kLength ? stats_.requests_length
                                                        : stats_.requests_stop);
    std::erase_if(running_, [&](const auto& other) { return other.get() == &channel; });
  }
  if (event.finish || !event.tokens.empty() || !event.prompt_logprobs.empty()) channel.push(std::move(event));
}

engine::EngineStats ScriptedEngine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}
void ScriptedEngine::drain(int64_t) {}
std::optional<Error> ScriptedEngine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}
void ScriptedEngine::set_writer(Writer writer) {
  const std::lock_guard lock(mutex_);
  writer_ = std::move(writer);
}
void ScriptedEngine::set_logprob(Logprob logprob) {
  const std::lock_guard lock(mutex_);
  logprob_ = std::move(logprob);
}
void ScriptedEngine::set_max_queue_len(size_t length) {
  const std::lock_guard lock(mutex_);
  max_queue_len_ = length;
}
void ScriptedEngine::set_failure(std::optional<Error> failure) {
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
}
void ScriptedEngine::hold() {
  const std::lock_guard lock(mutex_);
  permits_ = 0;
}
void ScriptedEngine::permit(int64_t steps) {
  const std::lock_guard lock(mutex_);
  permits_ += steps;
  changed_.notify_all();
}
void ScriptedEngine::let_run() {
  const std::lock_guard lock(mutex_);
  permits_ = -1;
  changed_.notify_all();
}
std::vector<engine::GenerationRequest> ScriptedEngine::submitted() const {
  const std::lock_guard lock(mutex_);
  std::vector<engine::GenerationRequest> copies;
  for (const auto& request : submitted_) copies.push_back(copy_of(request));
  return copies;
}
bool ScriptedEngine::wait_until_idle() const {
  std::unique_lock lock(mutex_);
  for (int i = 0; i < 1000; ++i) {
    if (running_.empty()) return true;
    changed_.notify_all();  // a cancelled request shows only when the thread looks
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
  return running_.empty();
}

}  // namespace quern::server
