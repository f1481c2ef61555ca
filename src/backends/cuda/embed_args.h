#pragma once

#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"

namespace quern::cuda {

/// Token, index and position of every row.
struct ResolveArgs {
  StepTables step;
};

/// out[row] = table[tokens[row]]
struct LookupArgs {
  Weight table;
  DType activation;
  const int32_t* tokens;
  void* out;  // [rows, in_features of the table]
};

}  // namespace quern::cuda
