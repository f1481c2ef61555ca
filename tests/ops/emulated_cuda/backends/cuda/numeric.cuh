#pragma once

#include "emulation.h"

namespace quern::cuda {

using quern::DType;

}  // namespace quern::cuda
