#include "server/generation.h"

#include <utility>

namespace quern::server {
namespace {

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

Result<std::unique_ptr<Generation>> Generation::submit(engine::Engine& engine, Metrics& metrics, std::vector<ChoiceRequest> choices,
                                                       int32_t choices_per_prompt) {
  std::unique_ptr<Generation> generation(new Generation(metrics, choices_per_prompt));
  for (ChoiceRequest& choice : choices) {
    const auto now = Clock::now();
    ASSIGN_OR_RETURN(auto stream, engine.submit(std::move(choice.request)));
    generation->choices_.push_back(Choice{std::move(stream), OutputAssembler(std::move(choice.output)), now, now, now});
  }
  return Result<std::unique_ptr<Generation>>(std::move(generation));
}

void Generation::on_ready(const std::function<void()>& wake) {
  for (Choice& choice : choices_) choice.stream->on_event(wake);
}

bool Generation::advance(const Visitor& visit) {
  bool running = false;
  for (int32_t i = 0; i < num_choices() && !error_; ++i) {
    Choice& choice = choices_[static_cast<size_t>(i)];
    while (choice.stream != nullptr && !error_) {
      std::optional<engine::TokenEvent> event = choice.stream->try_next();
      if (!event) break;
      take(i, std::move(*event), visit);
    }
    running = running || choice.stream != nullptr;
  }
  if (error_) {
    for (Choice& choice : choices_) choice.stream.reset();
  }
  return running && !error_;
}

void Generation::take(int32_t index, engine::TokenEvent event, const Visitor& visit) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (event.finish && event.finish->reason == engine::FinishReason::kError) {
    error_ = event.finish->error.value_or(make_error(ErrorCode::kInternal, "the request failed"));
    return;
  }
  if (event.finish && event.finish->reason == engine::FinishReason::kCancelled && !choice.assembler.stopped()) {
    error_ = make_error(ErrorCode::kUnavailable, "the request was cancelled because the server shuts down");
    return;
  }
  const bool was_stopped = choice.assembler.stopped();
  OutputDelta delta = choice.assembler.push(std::move(event));
  if (!was_stopped && choice.assembler.stopped() && !delta.end) choice.stream->stop_at(choice.assembler.usage().completion_tokens);
  observe(choice, static_cast<int32_t>(delta.token_ids.size()), delta.end.has_value());
  if (delta.end) choice.stream.reset();
  visit(index, std::move(delta), choice.assembler.usage());
}

void Generation::observe(Choice& choice, int32_t num_tokens, bool ended) {
  const auto now = Clock::now();
  const OutputUsage& usage = choice.assembler.usage();
  if (num_tokens > 0) {
    if (usage.completion_tokens == num_tokens) {
      choice.first_token = now;
      metrics_.observe_time_to_first_token(seconds_between(choice.submitted, now));
    } else {
      metrics_.observe_inter_token_latency(seconds_between(choice.last_token, now), num_tokens);
    }
    choice.last_token = now;
  }
  if (ended)
    metrics_.observe_finished(usage, seconds_between(choice.submitted, now), seconds_between(choice.first_token, choice.last_token));
}

OutputUsage Generation::usage() const {
  OutputUsage total;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const OutputUsage& usage = choices_[i].assembler.usage();
    total.completion_tokens += usage.completion_tokens;
    total.reasoning_tokens += usage.reasoning_tokens;
    if (i % static_cast<size_t>(choices_per_prompt_) != 0) continue;
    total.prompt_tokens += usage.prompt_tokens;
    total.cached_tokens += usage.cached_tokens;
  }
  return total;
}

}  // namespace quern::server
