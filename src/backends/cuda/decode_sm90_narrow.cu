#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_DECODE(decode_e4m3_8, 8, true, false)
QUERN_DECODE(decode_bf16_8, 8, false, false)
QUERN_DECODE(decode_e4m3_16, 16, true, false)
QUERN_DECODE(decode_bf16_16, 16, false, false)
QUERN_DECODE(decode_e4m3_32, 32, true, false)
QUERN_DECODE(decode_bf16_32, 32, false, false)

}  // namespace quern::cuda::sm90
