#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_CHAIN(chain_e4m3_256, 256, true, false)
QUERN_CHAIN(chain_bf16_256, 256, false, false)

}  // namespace quern::cuda::sm90
