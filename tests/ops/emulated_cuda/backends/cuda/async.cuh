#pragma once

#include "emulation.h"

namespace quern::cuda {

inline void release_successor() {}
inline void await_predecessor() {}

}  // namespace quern::cuda
