#pragma once

#include <type_traits>

#include "backends/cuda/driver.h"

namespace quern::cuda {

struct Extent3 {
  unsigned x = 1, y = 1, z = 1;
};

/// How a kernel is launched. A grid with a zero extent launches nothing.
struct LaunchShape {
  Extent3 grid, block;
  unsigned shared_bytes = 0;    // dynamic; at most what the Function was made with
  Extent3 cluster;              // 1 x 1 x 1: none
  bool programmatic = false;    // may start before its predecessor in the stream has ended; the kernel itself waits (griddepcontrol.wait)
};

/// A kernel of loaded device code. It takes one parameter, a plain struct that host and device code include from one header.
template <class Args>
struct Function {
  static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) <= 4096);
  FunctionObject* handle = nullptr;
  const char* name = "";  // for messages
};

}  // namespace quern::cuda
