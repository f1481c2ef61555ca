#include "metronome_engine.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "engine/event_channel.h"

namespace quern::tools {

struct MetronomeEngine::Running {
  int32_t stream = 0, num_tokens = 0, max_tokens = 0, num_prompt = 0;
  std::atomic<bool> left{false};
  engine::EventChannel events;
};

namespace {

template <class Shared>
class Stream final : public engine::RequestStream {
 public:
  explicit Stream(std::shared_ptr<Shared> running) : running_(std::move(running)) {}
  ~Stream() override {
    running_->events.detach();
    running_->left = true;
  }
  std::optional<engine::TokenEvent> try_next() override { return running_->events.try_next(); }
  engine::TokenEvent next() override { return running_->events.next(); }
  void on_event(std::function<void()> wake) override { running_->events.on_event(std::move(wake)); }
  void cancel() override { running_->left = true; }
  void stop_at(int32_t completion_tokens) override { running_->events.stop_at(completion_tokens); }

 private:
  std::shared_ptr<Shared> running_;
};

}  // namespace

MetronomeEngine::MetronomeEngine(const TokenTimes& times, std::chrono::microseconds beat, int32_t vocab_size) : times_(times), beat_(beat) {
  limits_.num_slots = 1 << 20;
  limits_.num_blocks = 1 << 20;
  limits_.max_model_len = 1 << 20;
  limits_.max_rows = 1 << 20;
  limits_.vocab_size = vocab_size;
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

MetronomeEngine::~MetronomeEngine() { thread_.request_stop(); }

Result<std::unique_ptr<engine::RequestStream>> MetronomeEngine::submit(engine::GenerationRequest request) {
  auto running = std::make_shared<Running>();
  running->stream = static_cast<int32_t>(request.sampling.seed);
  running->max_tokens = request.max_tokens;
  running->num_prompt = static_cast<int32_t>(request.prompt.size());
  // The prompt takes no time either: its first token is there at once.
  if (step(*running)) {
    const std::lock_guard lock(mutex_);
    arrived_.push_back(running);
  }
  std::unique_ptr<engine::RequestStream> stream = std::make_unique<Stream<Running>>(std::move(running));
  return Result<std::unique_ptr<engine::RequestStream>>(std::move(stream));
}

engine::EngineStats MetronomeEngine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

bool MetronomeEngine::step(Running& running) {
  engine::TokenEvent event;
  // Letters and digits of a byte-level vocabulary: text that any detokenizer can tell at once.
  event.tokens = {32 + running.num_tokens % 58};
  times_.at(running.stream, running.num_tokens).store(TokenTimes::now());
  const bool last = ++running.num_tokens == running.max_tokens;
  if (last) {
    engine::Finish finish;
    finish.reason = engine::FinishReason::kLength;
    finish.usage = {running.num_prompt, running.num_tokens, 0};
    event.finish = std::move(finish);
  }
  running.events.push(std::move(event));
  return !last;
}

void MetronomeEngine::run(const std::stop_token& stop) {
  std::vector<std::shared_ptr<Running>> running;
  auto next = std::chrono::steady_clock::now();
  while (!stop.stop_requested()) {
    next = std::max(next + beat_, std::chrono::steady_clock::now());
    std::this_thread::sleep_until(next);
    {
      const std::lock_guard lock(mutex_);
      running.insert(running.end(), arrived_.begin(), arrived_.end());
      arrived_.clear();
      stats_.num_running = static_cast<int32_t>(running.size());
      stats_.generation_tokens += running.size();
      ++stats_.num_steps;
    }
    std::erase_if(running, [this](const std::shared_ptr<Running>& one) { return one->left || !step(*one); });
  }
}

}  // namespace quern::tools
