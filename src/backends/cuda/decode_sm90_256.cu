#include "backends/cuda/linear_wide_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_WIDE(decode_e4m3_256, 256, true)
QUERN_DECODE(decode_bf16_256, 256, false, false)

}  // namespace quern::cuda::sm90
