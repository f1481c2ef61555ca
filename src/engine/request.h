#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/token_constraint.h"
#include "worker/step.h"

namespace quern::engine {

using worker::kMaxLogitBias;
using worker::kMaxLogprobs;
using worker::kMaxStopIds;
using worker::SamplingParams;
using worker::TokenLogprobs;

/// What was asked for: token ids, no text.
struct GenerationRequest {
  std::string id;
  std::vector<int32_t> prompt;
  SamplingParams sampling;         // stop_ids holds the eos ids too, unless they are ignored
  int32_t max_tokens = 16;         // >= 0; 0 only computes the prompt
  int32_t prompt_logprobs = -1;    // -1: none; n: of every prompt token but the first, with the n most likely
  int32_t priority = 0;            // lower runs earlier
  std::string cache_salt;          // prompts share cached prefixes only with the same salt
  std::vector<int32_t> cut_hints;  // prompt lengths at which conversations diverge
  std::unique_ptr<TokenConstraint> constraint;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t completion_tokens = 0;
  int32_t cached_tokens = 0;  // prompt tokens whose rows were not computed
};

/// How a request ended.
struct Finish {
  FinishReason reason = FinishReason::kStop;
  std::optional<int32_t> stop_token;  // kStop: the id that ended the output; it is part of the tokens
  std::optional<Error> error;         // kError
  Usage usage;
  double queue_seconds = 0;  // from submission until it was first given a place among those that run, or until its end
};

/// News of one request, in order; the last one has `finish`. What arrives before the last event was read is joined to it.
struct TokenEvent {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;         // parallel to tokens when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // once, before the first token
  std::optional<Finish> finish;
};

/// The consumer's end of one request; thread-safe. Destroying it cancels a request that still runs.
class RequestStream {
 public:
  virtual ~RequestStream() = default;
  /// The next event if there is one.
  virtual std::optional<TokenEvent> try_next() = 0;
  /// Waits for the next event. After the one with `finish` there are none (only that finish again, so that nobody waits for ever).
  virtual TokenEvent next() = 0;
  /// `wake` is called (on the engine thread, quickly) whenever an event arrives, and at once if one is waiting. It must not destroy the
  /// stream; once the stream's destructor has returned it is not running and will not be called.
  virtual void on_event(std::function<void()> wake) = 0;
  /// Ends the request; events with tokens already on their way are dropped.
  virtual void cancel() = 0;
  /// A stop string matched: the output ends after `completion_tokens` tokens, and usage counts to there. The finish event then has kStop.
  virtual void stop_at(int32_t completion_tokens) = 0;
};

}  // namespace quern::engine
