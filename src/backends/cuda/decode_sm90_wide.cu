#include "backends/cuda/linear_wide_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_WIDE(decode_e4m3_64, 64, true)
QUERN_WIDE(decode_bf16_64, 64, false)
QUERN_WIDE(decode_e4m3_128, 128, true)
QUERN_WIDE(decode_bf16_128, 128, false)

}  // namespace quern::cuda::sm90
