#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_CHAIN(chain_e4m3_64, 64, true, false)
QUERN_CHAIN(chain_bf16_64, 64, false, false)
QUERN_CHAIN(chain_e4m3_128, 128, true, false)
QUERN_CHAIN(chain_bf16_128, 128, false, false)

}  // namespace quern::cuda::sm90
