#pragma once

#include "backends/cuda/plain.h"

namespace quern::cuda {

/// What the kernels of all attention candidates need to know of a launch. `kv_head`: i32 [num_q_heads] on the device.
AttentionArgs attention_arguments(const ops::Attention::Problem& problem, const ops::Buffer& kv_head, const ops::Rows& rows, const ops::TensorView& query,
                                  const ops::TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out);

}  // namespace quern::cuda
