#pragma once

#include <filesystem>

#include "support/test_support.h"
#include "synth_checkpoint/synth.h"

namespace quern::testing {

/// A checkpoint of the smallest model of the family, of made-up weights that follow from `seed`, in `folder`.
inline void write_tiny_checkpoint(const std::filesystem::path& folder, uint64_t seed = 0) {
  const Result<Json> config = tools::preset_config("tiny");
  ASSERT_OK(config);
  tools::SynthOptions options;
  options.config = *config;
  options.seed = seed;
  ASSERT_OK(tools::write_checkpoint(options, folder));
}

}  // namespace quern::testing
