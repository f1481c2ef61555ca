#include "backends/cuda/driver.h"

// All functions of the driver that driver.cpp leaves out.

namespace quern::cuda {

#define QUERN_DO_NOTHING(member, name, parameters)  \
  extern "C" Status member##_of_faulty_driver parameters __asm__(name); \
  extern "C" __attribute__((weak)) Status member##_of_faulty_driver parameters { return kSuccess; }
QUERN_CUDA_DRIVER_FUNCTIONS(QUERN_DO_NOTHING)
#undef QUERN_DO_NOTHING

}  // namespace quern::cuda
