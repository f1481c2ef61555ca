#pragma once

#include "ops/kernel_table.h"

namespace quern::opencl {

extern const ops::KernelTable kKernelTable;

}  // namespace quern::opencl
