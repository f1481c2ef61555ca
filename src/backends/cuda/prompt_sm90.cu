#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_PROMPT(prompt_e4m3, true, false)
QUERN_PROMPT(prompt_bf16, false, false)
QUERN_PROMPT(prompt_pair_e4m3, true, true)
QUERN_PROMPT(prompt_pair_bf16, false, true)

}  // namespace quern::cuda::sm90
