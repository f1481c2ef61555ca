#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace quern::server {

/// What a request that is silent about sampling gets. Absent: the neutral value (temperature 1, everything else off).
struct SamplingDefaults {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int32_t> top_k;
};

/// A model's generation_config.json.
struct GenerationConfig {
  SamplingDefaults sampling;
  std::vector<int32_t> eos_ids;
};

/// Errors name the member that is not what it should be. `do_sample: false` means temperature 0.
Result<GenerationConfig> parse_generation_config(const Json& config);
/// Reads the file; kNotFound where there is none.
Result<GenerationConfig> read_generation_config(const std::filesystem::path& path);

}  // namespace quern::server
