#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_PROMPT(prompt_e4m3_128, 128, true)
QUERN_PROMPT(prompt_bf16_128, 128, false)
QUERN_PROMPT(prompt_e4m3_256, 256, true)
QUERN_PROMPT(prompt_bf16_256, 256, false)

}  // namespace quern::cuda::sm90
