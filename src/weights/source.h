#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "model/config.h"
#include "model/tensors.h"
#include "ops/device.h"
#include "ops/linear.h"

// From a checkpoint directory to tensors in device memory, ready to be packed. Everything that can be known without reading weight bytes is
// known when a source is open: names, shapes, schemes, faults (architecture.md section 7, model-spec.md section 2).

namespace quern::weights {

enum class LoadFormat : uint8_t { kAuto, kSafetensors, kDummy };

struct LoadOptions {
  LoadFormat format = LoadFormat::kAuto;
  bool quantize_fp8 = false;           // --quantization fp8: BF16 linears become channel fp8 while loading
  std::optional<bool> with_mtp;        // empty: when the checkpoint has the head
  bool strict = false;                 // unknown tensors are errors
  uint64_t dummy_seed = 0;
};

/// Scales of one attention layer's KV cache: one value, or one per kv head. Empty: the checkpoint has none (1.0 is used).
struct KvScales {
  std::vector<float> k, v;
};

/// What a checkpoint holds, by canonical name.
struct Inventory {
  std::map<std::string, ops::LinearShape, std::less<>> linears;        // "layers.0.mlp.gate_proj.weight" -> extent and scheme as it will be packed
  std::map<std::string, std::pair<DType, Shape>, std::less<>> vectors;
  bool has_mtp = false;
  std::map<int64_t, KvScales> kv_scales;   // by layer; -1 is the MTP layer
  bool fp8_kv_declared = false;            // a kv_cache_scheme: kv dtype auto means fp8
  std::vector<std::string> ignored;        // recognised and not needed: vision tower, rotary_emb.inv_freq, q scales, ...
  std::vector<std::string> unknown;        // reported as warnings unless strict
  uint64_t stored_bytes = 0;               // of all consumed tensors, as stored
  std::vector<std::string> notes;          // e.g. "--quantization fp8 has no effect: the checkpoint is FP8 already"
};

/// A tensor staged for packing. On devices that read host memory it points into the mapped file.
struct StagedTensor {
  std::vector<std::unique_ptr<ops::Buffer>> buffers;  // owns what the views point to
  ops::TensorView view;
};
struct StagedLinear {
  std::vector<std::unique_ptr<ops::Buffer>> buffers;
  ops::LinearSource source;
};

/// [begin, end)
struct Range {
  int64_t begin = 0, end = 0;
  [[nodiscard]] int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// Rows and columns of a tensor that one rank keeps; the default is everything. Rows may come in several pieces, which are joined in order. Cuts of block scales may lie anywhere, as long as
/// the joined rows can be put on a grid of 128 again (scale_rows_of in weights/slices.h).
struct Slice {
  int64_t row_begin = 0, row_end = -1, column_begin = 0, column_end = -1;  // -1: to the end
  std::vector<Range> further_rows;                                         // pieces behind [row_begin, row_end)
};

/// Thread-safe: ranks load at the same time, each its own slices.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  [[nodiscard]] virtual const Inventory& inventory() const = 0;
  /// By canonical name. NaN codes are refused by name and position. The staged memory may be released after Stream::finish().
  virtual Result<StagedLinear> linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) = 0;
  /// As linear(), in FP8 with a scale a row, whatever it is stored in: for a copy that is good enough for guesses. Refuses what is FP8 already.
  virtual Result<StagedLinear> linear_in_fp8(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) = 0;
  /// Pieces of the first extent; columns stay whole.
  virtual Result<StagedTensor> vector(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) = 0;
  /// Bytes of the checkpoint will not be needed again: gives page cache mappings back.
  virtual void done_with(std::string_view name) = 0;
};

/// Opens DIR for `config`. One error lists every fault of the checkpoint. LoadFormat::kDummy needs only config.json and makes weights from
/// `dummy_seed` in memory, in the schemes that the config declares.
Result<std::unique_ptr<WeightSource>> open_weights(const std::filesystem::path& model_dir, const model::ModelConfig& config, const LoadOptions& options);

/// The inventory that a checkpoint of this config would have, from its quantization_config alone: for `plan` on a directory without weights, and for dummy weights.
Result<Inventory> inventory_from_config(const model::ModelConfig& config, const LoadOptions& options);

}  // namespace quern::weights
