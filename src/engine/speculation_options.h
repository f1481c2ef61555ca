#pragma once

#include <cstdint>
#include <optional>

namespace quern::engine {

enum class SpeculationMethod : uint8_t {
  kAuto,   // kMtp where the model has the head, else kNone
  kNone,
  kMtp,    // the model's own head, chained
  kNgram,  // what followed the last tokens where they stood before
};

/// How tokens are guessed ahead. Guesses change the time that a text takes, never the text (architecture.md section 5).
struct SpeculationOptions {
  SpeculationMethod method = SpeculationMethod::kAuto;
  int32_t num_speculative_tokens = 3;  // most drafts of a step
  int32_t prompt_lookup_min = 2, prompt_lookup_max = 5;  // kNgram: tokens that must agree
  bool adaptive = true;                // fewer drafts, or none, where more do not pay; false: always all
  /// For benchmarks: so many tokens come out of a step with drafts on average, whatever the model says. Makes nonsense of the text.
  std::optional<double> synthetic_acceptance_length;
};

}  // namespace quern::engine
