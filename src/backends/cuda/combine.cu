#include "backends/cuda/combine_args.h"
#include "backends/cuda/numeric.cuh"

namespace quern::cuda {

extern "C" __global__ void combine(const __grid_constant__ CombineArgs args) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.num_elements) return;
  float sum = 0;
  for (int rank = 0; rank < args.num_ranks; ++rank) sum += load(args.partials[rank], args.dtype, i);
  store(args.x, args.dtype, i, load(args.x, args.dtype, i) + round_to(args.dtype, sum));
}

}  // namespace quern::cuda
