#include "backends/cuda/linear_prompt_sm90.cuh"

namespace quern::cuda::sm90 {

QUERN_PROMPT(prompt_e4m3, true, false, false)
QUERN_PROMPT(prompt_bf16, false, false, false)
QUERN_PROMPT(prompt_pair_e4m3, true, true, false)
QUERN_PROMPT(prompt_pair_bf16, false, true, false)
QUERN_PROMPT(prompt_tall_pair_e4m3, true, true, true)

}  // namespace quern::cuda::sm90
