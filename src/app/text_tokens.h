#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace quern::app {

/// Tokens of a plain text by the tokenizer of a model directory. kUnsupported in a build without text/.
Result<std::vector<int32_t>> tokens_of_text(const std::filesystem::path& model_dir, std::string_view text);

}  // namespace quern::app
