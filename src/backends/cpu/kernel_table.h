#pragma once

#include "ops/kernel_table.h"

namespace quern::cpu {

extern const ops::KernelTable kKernelTable;

}  // namespace quern::cpu
