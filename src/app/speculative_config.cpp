#include "app/speculative_config.h"

#include <string>

#include "base/json.h"
#include "engine/speculator.h"

namespace quern::app {
namespace {

using engine::SpeculationMethod;

Result<SpeculationMethod> parse_method(const Json& value) {
  const std::string name = value.is_string() ? value.get<std::string>() : "";
  if (name == "mtp" || name == "qwen3_5_mtp" || name == "qwen3_next_mtp") return SpeculationMethod::kMtp;
  if (name == "ngram") return SpeculationMethod::kNgram;
  if (name == "none") return SpeculationMethod::kNone;
  return invalid_argument("method {} is not one of mtp, ngram, none", dump_json(value));
}

Result<worker::DraftHead> parse_draft_head(const Json& value) {
  const std::string name = value.is_string() ? value.get<std::string>() : "";
  if (name == "auto") return worker::DraftHead::kAuto;
  if (name == "fp8") return worker::DraftHead::kFp8;
  if (name == "model") return worker::DraftHead::kModel;
  return invalid_argument("draft_head {} is not one of auto, fp8, model", dump_json(value));
}

Result<int32_t> parse_count(const std::string& key, const Json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer() || value.get<int64_t>() < least || value.get<int64_t>() > most)
    return invalid_argument("{} must be a whole number from {} to {}, not {}", key, least, most, dump_json(value));
  return value.get<int32_t>();
}

}  // namespace

Result<SpeculativeConfig> parse_speculative_config(std::string_view json) {
  ASSIGN_OR_RETURN(const Json config, parse_json(json, "--speculative-config"));
  if (!config.is_object()) return invalid_argument("a JSON object is wanted, not {}", dump_json(config));
  constexpr int64_t kLongest = 64;  // tokens that an n-gram may have
  SpeculativeConfig result;
  engine::SpeculationOptions& options = result.options;
  int32_t lookup_min = 0, lookup_max = 0;
  for (const auto& [key, value] : config.items()) {
    if (key == "method") {
      ASSIGN_OR_RETURN(options.method, parse_method(value));
    } else if (key == "num_speculative_tokens") {
      ASSIGN_OR_RETURN(options.num_speculative_tokens, parse_count(key, value, 0, engine::kMaxDrafts));
    } else if (key == "prompt_lookup_min") {
      ASSIGN_OR_RETURN(lookup_min, parse_count(key, value, 1, kLongest));
    } else if (key == "prompt_lookup_max") {
      ASSIGN_OR_RETURN(lookup_max, parse_count(key, value, 1, kLongest));
    } else if (key == "adaptive") {
      if (!value.is_boolean()) return invalid_argument("adaptive must be true or false, not {}", dump_json(value));
      options.adaptive = value.get<bool>();
    } else if (key == "synthetic_acceptance_length") {
      if (!value.is_number() || value.get<double>() < 1) return invalid_argument("{} must be a number from 1 on, not {}", key, dump_json(value));
      options.synthetic_acceptance_length = value.get<double>();
    } else if (key == "draft_head") {
      ASSIGN_OR_RETURN(result.draft_head, parse_draft_head(value));
    } else {
      return invalid_argument(
          "{} is not known; method, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, adaptive, draft_head and synthetic_acceptance_length are",
          key);
    }
  }
  // One of the two stands for both.
  if (lookup_min > 0 || lookup_max > 0) {
    options.prompt_lookup_min = lookup_min > 0 ? lookup_min : lookup_max;
    options.prompt_lookup_max = lookup_max > 0 ? lookup_max : lookup_min;
  }
  if (options.prompt_lookup_min > options.prompt_lookup_max)
    return invalid_argument("prompt_lookup_min {} is above prompt_lookup_max {}", options.prompt_lookup_min, options.prompt_lookup_max);
  if (options.synthetic_acceptance_length && *options.synthetic_acceptance_length > options.num_speculative_tokens + 1)
    return invalid_argument("synthetic_acceptance_length {} is more than {} drafts and the token after them can give",
                            *options.synthetic_acceptance_length, options.num_speculative_tokens);
  return result;
}

Setter to_speculation(engine::SpeculationOptions& target, worker::DraftHead& draft_head) {
  return [&target, &draft_head](std::string_view text) -> Result<void> {
    ASSIGN_OR_RETURN(const SpeculativeConfig config, parse_speculative_config(text));
    target = config.options;
    draft_head = config.draft_head;
    return {};
  };
}

}  // namespace quern::app
