#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_PROMPT(prompt_e4m3, true)
QUERN_PROMPT(prompt_bf16, false)

}  // namespace quern::cuda::sm90
