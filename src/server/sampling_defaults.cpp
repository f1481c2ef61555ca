#include "server/sampling_defaults.h"

#include "server/json_fields.h"

namespace quern::server {

Result<GenerationConfig> parse_generation_config(const Json& config) {
  if (!config.is_object()) return invalid_argument("generation_config.json: expected an object, found {}", json_kind(config));
  GenerationConfig result;
  JsonFields fields(config, "generation_config.json: ");
  SamplingDefaults& sampling = result.sampling;
  sampling.temperature = fields.number("temperature", 0, 1e6);
  sampling.top_p = fields.number("top_p", 0, 1);
  sampling.min_p = fields.number("min_p", 0, 1);
  sampling.repetition_penalty = fields.number("repetition_penalty", 0, 1e6);
  if (const auto top_k = fields.integer("top_k", -1, INT32_MAX)) sampling.top_k = static_cast<int32_t>(*top_k);
  if (fields.boolean("do_sample") == false) sampling.temperature = 0;
  if (const Json* eos = fields.find("eos_token_id"); eos != nullptr && eos->is_array()) {
    if (auto ids = fields.integers("eos_token_id", 0, INT32_MAX, 64)) result.eos_ids = std::move(*ids);
  } else if (const auto id = fields.integer("eos_token_id", 0, INT32_MAX)) {
    result.eos_ids = {static_cast<int32_t>(*id)};
  }
  RETURN_IF_ERROR(fields.status());
  return result;
}

Result<GenerationConfig> read_generation_config(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const Json config, read_json_file(path));
  return parse_generation_config(config);
}

}  // namespace quern::server
