#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/sampling_defaults.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "worker/plan.h"

namespace quern::app {

struct ModelTextOptions {
  std::filesystem::path chat_template;     // empty: the checkpoint's
  std::string generation_config = "auto";  // auto, vllm, or a path
};

/// What a checkpoint says about text and sampling, beside its weights.
struct ModelText {
  std::optional<text::Tokenizer> tokenizer;         // empty: the directory has none, prompts are token ids
  std::optional<text::ChatTemplate> chat_template;  // empty: no chat
  server::SamplingDefaults sampling_defaults;
  std::vector<int32_t> eos_ids;
};

/// Reads tokenizer, chat template and generation_config.json; logs what is missing and what then does not work. Errors: files that are
/// there and broken, and files named by an option that are not there.
Result<ModelText> load_model_text(const worker::ExecutionPlan& plan, const ModelTextOptions& options);

}  // namespace quern::app
