#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_DECODE(decode_resident, 8, true, true)

}  // namespace quern::cuda::sm90
