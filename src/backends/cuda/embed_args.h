#pragma once

#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"

namespace quern::cuda {

/// Token, index and position of every row.
struct ResolveArgs {
  StepTables step;
};

/// out[row] = table[tokens[row] - first_id], zeros for other ids below num_ids
struct LookupArgs {
  Weight table;
  int64_t first_id, num_ids;
  DType activation;
  const int32_t* tokens;
  void* out;  // [rows, in_features of the table]
};

}  // namespace quern::cuda
