#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/faults.h"
#include "model/config.h"
#include "ops/linear.h"
#include "weights/checkpoint.h"
#include "weights/declared.h"
#include "weights/source.h"

namespace quern::weights {

/// Where one linear weight of the model lies in a checkpoint: rows of a stored tensor, since some checkpoints store merged projections.
struct LinearEntry {
  TensorRef weight, scale, input_scale;  // scale: of FP8 only; input_scale: where the checkpoint has a static one that applies
  int64_t row_begin = 0;                 // of the stored tensor
  int64_t segment = 0;                   // index into scales that hold one value per merged projection
  ops::LinearShape stored;               // extent without the rows of merged neighbours
  bool quantize = false;                 // to channel fp8, while loading
};

/// Every tensor of the checkpoint has one role (architecture.md section 7).
struct Account {
  Inventory inventory;
  std::map<std::string, LinearEntry, std::less<>> linears;  // by canonical name
  std::map<std::string, TensorRef, std::less<>> vectors;
};

/// Matches what the model asks for with what the checkpoint has. Everything that does not fit becomes a fault; `files_ok` is false when
/// shards could not be opened, so that tensors that are not there prove nothing.
Account account_for(const model::ModelConfig& config, const DeclaredQuantization& declared, const Checkpoint& checkpoint,
                    const LoadOptions& options, bool files_ok, Faults& faults);

/// What a scale of this shape means for an e4m3 weight [rows, columns]: one per 128 x 128 block, per row, or for all; empty: none of them.
/// One element for a weight of at most one block means either: `block_first` (weight_scale_inv) decides.
std::optional<ops::WeightScheme> scheme_of_scale(const Shape& scale, int64_t rows, int64_t columns, bool block_first);

}  // namespace quern::weights
