#pragma once

#include "ops/kernel_table.h"

namespace quern::cuda {

extern const ops::KernelTable kKernelTable;

}  // namespace quern::cuda
