#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "base/result.h"

// From a BF16 checkpoint to an FP8 one, file to file (model-spec.md 2.3 to 2.5). What is kept as it is: embeddings, lm_head, norms, conv1d,
// in_proj_a and in_proj_b, mtp.fc, vision tower; of static checkpoints also all Gated DeltaNet layers and the MTP head, as released ones.

namespace quern::weights {

enum class QuantizeScheme : uint8_t {
  kBlockFp8,    // quant_method "fp8": a scale per 128 x 128 block, activations quantized while serving
  kStaticFp8,   // compressed-tensors: a scale per tensor, another one for its input, FP8 KV cache
  kChannelFp8,  // compressed-tensors: a scale per output row, activations quantized per token while serving
};

/// The largest magnitudes that a model met in a text.
struct Calibration {
  struct KeyValue {
    float key = 0, value = 0;
  };
  std::map<std::string, float, std::less<>> inputs;  // of linears, by canonical module: "layers.3.mlp.down_proj"
  std::map<int64_t, KeyValue> kv;                    // by attention layer
};

struct QuantizeOptions {
  QuantizeScheme scheme = QuantizeScheme::kBlockFp8;
  std::optional<Calibration> calibration;       // kStaticFp8 needs one; others store the KV scales of one
  uint64_t shard_bytes = 5'000'000'000;         // of an output file, unless one tensor is larger
  int num_threads = 1;                          // each holds 128 rows of one weight
  std::function<void(double)> progress;         // share of the bytes that were read, 0 to 1; one thread at a time
  std::function<bool()> cancelled;              // asked between two bands of rows
};

struct QuantizeReport {
  int64_t num_quantized = 0, num_copied = 0;  // tensors of the source
  uint64_t source_bytes = 0, written_bytes = 0;
  size_t num_files = 0;                       // of weights
};

/// What quantize_checkpoint would refuse, without reading a weight: a source that is no BF16, F16 or F32 checkpoint, a destination that is
/// there already. Calibration is not asked for. Returns the bytes that will be read.
Result<uint64_t> check_quantizable(const std::filesystem::path& source, const std::filesystem::path& destination, const QuantizeOptions& options);

/// Writes a model directory: weights, config.json, and copies of the source's tokenizer, chat template and other small files. It appears
/// under its name when it is complete; on an error nothing is left. Memory is a few megabytes a thread at any size.
Result<QuantizeReport> quantize_checkpoint(const std::filesystem::path& source, const std::filesystem::path& destination,
                                           const QuantizeOptions& options);

}  // namespace quern::weights
