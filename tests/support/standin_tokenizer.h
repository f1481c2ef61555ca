#pragma once

#include <filesystem>

namespace quern::testing {

/// A model directory with the tokenizer.json of Qwen3 (151,643 tokens and 26 added ones), which stands in for that of
/// Qwen3.6: the same construction, another vocabulary and the pattern before Qwen3.5.
/// The build unpacks it; a test program that uses it has `add_dependencies(<program> quern_standin_tokenizer)`.
inline std::filesystem::path standin_tokenizer_dir() { return std::filesystem::path(QUERN_BINARY_DIR) / "tests/data/qwen3"; }

}  // namespace quern::testing
