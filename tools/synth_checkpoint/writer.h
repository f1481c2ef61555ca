#pragma once

#include <filesystem>
#include <vector>

#include "base/result.h"
#include "synth_checkpoint/plan.h"

namespace quern::tools {

/// Writes the files into `folder`: threads make chunks of a few megabytes and put each at its place. With `holes`, tensors of more than a megabyte are left out: zeros, for which the disk has no blocks.
/// Errors name file and cause.
Result<void> write_safetensors(const std::vector<PlannedFile>& files, const std::filesystem::path& folder, int num_threads, bool holes = false);

}  // namespace quern::tools
