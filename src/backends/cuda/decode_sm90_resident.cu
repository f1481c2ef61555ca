#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_DECODE(decode_resident_1, 8, true, 1)
QUERN_DECODE(decode_resident_2, 8, true, 2)
QUERN_DECODE(decode_resident_4, 8, true, 4)

}  // namespace quern::cuda::sm90
