#pragma once

#include <string_view>

#include "app/option.h"
#include "base/result.h"
#include "engine/speculation_options.h"
#include "worker/options.h"

namespace quern::app {

/// The JSON of --speculative-config, keys as vLLM's: method (mtp, ngram, none), num_speculative_tokens, prompt_lookup_min,
/// prompt_lookup_max, synthetic_acceptance_length; and ours: adaptive, draft_head (auto, fp8, model). A key that is not known is an error.
struct SpeculativeConfig {
  engine::SpeculationOptions options;
  worker::DraftHead draft_head = worker::DraftHead::kAuto;
};
Result<SpeculativeConfig> parse_speculative_config(std::string_view json);

Setter to_speculation(engine::SpeculationOptions& target, worker::DraftHead& draft_head);

}  // namespace quern::app
