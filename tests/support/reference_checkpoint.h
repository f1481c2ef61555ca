#pragma once

#include <cstdint>
#include <filesystem>

#include "base/result.h"

namespace quern::testing {

enum class Scheme : uint8_t { kBf16, kFp8Block };

/// Writes config.json and model.safetensors of a reference checkpoint into `folder`, which is made if needed, and returns `folder`.
/// Weights are regenerated from an integer hash (tools/reference/checkpoint.py is the twin in Python), since stored ones would be
/// too large for the tree; the expected values lie in tests/data/{tiny,second}-reference/expected.json under "bf16" and "fp8_block".
///
/// tiny    hidden 160, 4 layers, heads 4/2 of 32, GDN heads 2/6 of 16, vocabulary 320; nothing is a multiple of 128. 2.4 or 1.4 MB.
/// second  hidden 256, 8 layers, heads 6/1 of 256, GDN heads 2/6 of 128, vocabulary 8192: the head geometry of the real models,
///         two full-attention layers, memory across several 64-token chunks. 36 or 22 MB, a fraction of a second.
///
/// Errors: those of the file system.
Result<std::filesystem::path> tiny_reference(Scheme scheme, const std::filesystem::path& folder);
Result<std::filesystem::path> second_reference(Scheme scheme, const std::filesystem::path& folder);

}  // namespace quern::testing
