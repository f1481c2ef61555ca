#include "app/with_server/model_text.h"

#include <fmt/ranges.h>

#include "base/log.h"

namespace quern::app {
namespace {

constexpr const char* kGenerationConfigFile = "generation_config.json";

/// generation_config.json of the checkpoint, or an empty one where there is none.
Result<server::GenerationConfig> own_generation_config(const std::filesystem::path& model_dir) {
  Result<server::GenerationConfig> config = server::read_generation_config(model_dir / kGenerationConfigFile);
  if (!config && config.error().code == ErrorCode::kNotFound) return server::GenerationConfig{};
  return config;
}

Result<server::SamplingDefaults> sampling_defaults(const server::GenerationConfig& own, const std::string& wanted) {
  if (wanted == "auto") return own.sampling;
  if (wanted == "vllm") return server::SamplingDefaults{};
  std::filesystem::path file = wanted;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) file /= kGenerationConfigFile;
  Result<server::GenerationConfig> config = server::read_generation_config(file);
  if (!config) return config.error().with_context("--generation-config");
  return config->sampling;
}

void log_sampling(const server::SamplingDefaults& defaults, const std::string& source) {
  std::vector<std::string> set;
  const auto add = [&](std::string_view name, const auto& value) {
    if (value) set.push_back(fmt::format("{} {}", name, *value));
  };
  add("temperature", defaults.temperature);
  add("top_p", defaults.top_p);
  add("top_k", defaults.top_k);
  add("min_p", defaults.min_p);
  add("repetition_penalty", defaults.repetition_penalty);
  if (!set.empty()) log_info("default sampling ({}): {}", source == "auto" ? kGenerationConfigFile : source, fmt::join(set, ", "));
}

/// The end-of-sequence ids of generation_config.json, else of config.json; those outside the vocabulary can never be drawn.
std::vector<int32_t> eos_ids(const server::GenerationConfig& own, const worker::ExecutionPlan& plan) {
  std::vector<int32_t> ids = own.eos_ids.empty() ? plan.config.eos_token_ids : own.eos_ids;
  std::erase_if(ids, [&](int32_t id) { return id < 0 || id >= plan.limits.vocab_size; });
  if (ids.empty())
    log_warning("the checkpoint names no end-of-sequence token inside its vocabulary; answers end at max_tokens or a stop string");
  return ids;
}

}  // namespace

Result<ModelText> load_model_text(const worker::ExecutionPlan& plan, const ModelTextOptions& options) {
  const std::filesystem::path& model_dir = plan.options.model_dir;
  ModelText result;
  ASSIGN_OR_RETURN(const server::GenerationConfig own, own_generation_config(model_dir));
  ASSIGN_OR_RETURN(result.sampling_defaults, sampling_defaults(own, options.generation_config));
  log_sampling(result.sampling_defaults, options.generation_config);
  result.eos_ids = eos_ids(own, plan);

  Result<text::Tokenizer> tokenizer = text::Tokenizer::load(model_dir);
  if (tokenizer) {
    result.tokenizer = std::move(tokenizer).value();
  } else if (tokenizer.error().code != ErrorCode::kNotFound) {
    return std::move(tokenizer).error();
  } else {
    log_warning("{} has no tokenizer.json: only /v1/completions with token-id prompts will work", model_dir.string());
    if (!options.chat_template.empty())
      return invalid_argument("--chat-template needs a tokenizer, and {} has no tokenizer.json", model_dir.string());
    return result;
  }
  const std::optional<std::filesystem::path> override_file =
      options.chat_template.empty() ? std::nullopt : std::optional(options.chat_template);
  Result<text::ChatTemplate> chat_template = text::ChatTemplate::load(model_dir, override_file);
  if (chat_template) {
    result.chat_template = std::move(chat_template).value();
  } else if (override_file || chat_template.error().code != ErrorCode::kNotFound) {
    return std::move(chat_template).error();
  } else {
    log_warning("{} has no chat template: /v1/chat/completions will not work; --chat-template gives one", model_dir.string());
  }
  return result;
}

}  // namespace quern::app
