#pragma once

#include "backends/cuda/copy_args.h"
#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"

namespace quern::cuda {

/// Copies that touch no byte of each other.
struct CopyArgs {
  static constexpr int kMaxCopies = 160;
  int32_t num_copies;
  CopyPiece copies[kMaxCopies];
};

/// ops::StateCopy::store_hidden
struct StoreHiddenArgs {
  StepTables step;
  DType activation;
  int32_t width, window_length;
  const void* hidden;     // [rows, width]
  void* window;           // [slots, window_length, width]
  void* boundary_hidden;  // [slots, width]
};

}  // namespace quern::cuda
