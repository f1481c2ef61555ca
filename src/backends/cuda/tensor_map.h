#pragma once

#include <cstdint>

namespace quern::cuda {

/// What the tensor memory accelerator needs to know of one tensor; passed to kernels by value.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

}  // namespace quern::cuda
