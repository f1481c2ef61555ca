// The rate at which memory can be read, which is what a decode step is measured against.

#include "backends/cuda/bandwidth_args.h"

namespace quern::cuda {

extern "C" __global__ void __launch_bounds__(512) read_once(const __grid_constant__ ReadArgs args) {
  constexpr int kTogether = 4;
  const auto* pieces = static_cast<const uint4*>(args.memory);
  const int64_t count = args.size_bytes / 16, step = int64_t{gridDim.x} * blockDim.x;
  uint32_t seen = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += kTogether * step) {
    uint4 piece[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) piece[k] = i + k * step < count ? __ldcs(pieces + i + k * step) : uint4{};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) seen ^= piece[k].x ^ piece[k].y ^ piece[k].z ^ piece[k].w;
  }
  if (seen == 0x2545f491u) *args.unlikely = seen;
}

}  // namespace quern::cuda
