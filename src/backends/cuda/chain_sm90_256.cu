#include "backends/cuda/linear_wide_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_WIDE(chain_e4m3_256, 256, true)
QUERN_CHAIN(chain_bf16_256, 256, false, false)

}  // namespace quern::cuda::sm90
