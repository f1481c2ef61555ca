#pragma once

#include <string>
#include <vector>

#include "app/option.h"
#include "engine/engine.h"
#include "worker/options.h"

namespace quern::app {

/// What every command that plans or runs a model can be told, with vLLM's names.
struct ModelOptions {
  worker::WorkerOptions worker;
  int32_t max_queue_len = 1024, long_prefill_token_threshold = 0;
  engine::PrefixCacheOptions prefix_cache;
  engine::SpeculationOptions speculation;
  bool allow_synthetic_acceptance = false;  // without it a speculative config that makes nonsense of texts is refused
  std::vector<std::string> notices;  // given options that have no effect in this version, in words; logged at start
};

/// MODEL, the groups "Model", "Memory and limits", "Prefix cache and speculation" and "Device" of a command. `options` must outlive the command.
void add_model_options(Command& command, ModelOptions& options);

/// --log-level, which takes effect while the command line is read.
Option log_level_option();

/// An option that is understood and changes nothing in this version; `why` is logged when it is given.
Option without_effect(ModelOptions& options, std::string name, std::string value, std::string why);

/// What the options mean together: kInvalidArgument for wishes that contradict, workers that suit the speculation, notices that depend on the device.
Result<void> settle_options(ModelOptions& options);

/// The engine's share of the options.
engine::EngineOptions engine_options(const ModelOptions& options);

}  // namespace quern::app
