#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "base/shape.h"

// Checkpoints with made-up weights of any config, in every format that quern loads (model-spec.md section 2): for tests, and to measure
// real sizes where the real weights are not at hand.

namespace quern::tools {

enum class SynthScheme : uint8_t {
  kBf16,           // shards with an index
  kBlockFp8,       // the official FP8 release: a file per layer, bf16 weight_scale_inv
  kBlockFp8Vocab,  // the same with embed_tokens and lm_head in block fp8
  kStaticFp8,      // compressed-tensors W8A8, one static scale per tensor, GDN and MTP in bf16, k/v/q scales, one file
  kChannelFp8,     // compressed-tensors, scales [out], activations as they are
  kFp8Dynamic,     // compressed-tensors, scales [out, 1], activations per token
  kModelOptFp8,    // NVIDIA ModelOpt, f32 scalars
  kMixed,          // compressed-tensors groups: static MLP and attention, channel GDN, block MTP
  kHybrid,         // kStaticFp8 without MTP, beside it mtp.safetensors of the official FP8 release, in no index
};
std::span<const std::string_view> synth_scheme_names();  // "bf16", "block-fp8", ... in the order of the enum
Result<SynthScheme> parse_synth_scheme(std::string_view name);

struct SynthOptions {
  Json config;  // config.json of a model; a quantization_config in it is replaced
  SynthScheme scheme = SynthScheme::kBf16;
  std::optional<Shape> scale_shape;  // of per-tensor scales: {}, {1} or {1, 1}; empty: as the format usually has them
  bool with_mtp = true;
  bool f32_gates = false;  // A_log and linear_attn.norm in f32, as one release has them
  bool text_files = true;  // tokenizer, chat template, generation_config
  uint64_t seed = 0;
  bool holes = false;      // tensors of more than a megabyte are never written: files of the right size that take no disk, zeros in every matrix
  uint64_t shard_bytes = 5'000'000'000;
  int num_threads = 2;
};

/// Writes a model directory; memory stays bounded at any size, and config.json comes last, so that a partial one is not taken for a model.
/// Errors: configs that quern does not serve, a vocabulary without room for the tokenizer, a full disk.
Result<void> write_checkpoint(const SynthOptions& options, const std::filesystem::path& out);

/// "tiny", "demo", "0.8b", "2b", "4b", "9b", "27b": a config.json of the family.
Result<Json> preset_config(std::string_view name);
std::span<const std::string_view> preset_names();

}  // namespace quern::tools
