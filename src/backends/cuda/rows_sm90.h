#pragma once

#include "backends/cuda/linear_sm90.h"

namespace quern::cuda::sm90 {

/// Of norm_pair_of_rows: rows with norms, twice, that do not wait for each other.
struct QuantisePairArgs {
  QuantiseArgs first, second;
};

}  // namespace quern::cuda::sm90
