#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "server/http_message.h"
#include "server/metrics.h"
#include "server/output_assembler.h"

namespace quern::server {

/// One choice of an answer: what the engine shall do, and how its tokens become text.
struct ChoiceRequest {
  engine::GenerationRequest request;
  OutputOptions output;
};

/// How long an answer may take, from when the engine has the request; 0: any time.
struct TimeLimits {
  std::chrono::milliseconds first_token{0};  // --first-token-timeout
  std::chrono::milliseconds total{0};        // --request-timeout
};

/// The choices of one answer while the engine works on them. Destroying it cancels those that still run. One owner, one thread.
class Generation {
 public:
  /// choices: at least one; those of one prompt stand together, choices_per_prompt of them.
  /// Errors: those of Engine::submit; nothing runs then.
  static Result<std::unique_ptr<Generation>> submit(engine::Engine& engine, Metrics& metrics, std::vector<ChoiceRequest> choices,
                                                    int32_t choices_per_prompt);

  void on_ready(const std::function<void()>& wake);
  /// The answer fails with kCancelled when it takes longer.
  void limit_time(const TimeLimits& limits) { limits_ = limits; }
  /// advance() has to be called by then: a limit ends there.
  [[nodiscard]] std::chrono::steady_clock::time_point deadline() const;

  /// Takes in what has arrived and hands it on, piece by piece; false when all choices have ended or one has failed.
  using Visitor = std::function<void(int32_t choice, OutputDelta delta, const OutputUsage& usage)>;
  bool advance(const Visitor& visit);

  /// Why the answer as a whole has failed.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }
  /// Of all choices together; a prompt counts once, however many choices it has.
  [[nodiscard]] OutputUsage usage() const;
  [[nodiscard]] int32_t num_choices() const { return static_cast<int32_t>(choices_.size()); }
  void describe(RequestFacts& facts) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Choice {
    std::unique_ptr<engine::RequestStream> stream;
    OutputAssembler assembler;
    Clock::time_point submitted, first_token, last_token;
    double queue_seconds = 0;
  };
  Generation(Metrics& metrics, int32_t choices_per_prompt) : metrics_(metrics), choices_per_prompt_(choices_per_prompt) {}
  void take(int32_t index, engine::TokenEvent event, const Visitor& visit);
  void observe(Choice& choice, int32_t num_tokens, bool ended);
  void check_time();

  Metrics& metrics_;
  int32_t choices_per_prompt_;
  std::string id_;
  TimeLimits limits_;
  Clock::time_point submitted_ = Clock::now();
  std::optional<Clock::time_point> first_token_;  // of whichever choice came first
  std::vector<Choice> choices_;
  int32_t num_ended_ = 0, longest_output_ = 0;
  std::optional<Error> error_;
  bool timed_out_ = false;
};

}  // namespace quern::server
