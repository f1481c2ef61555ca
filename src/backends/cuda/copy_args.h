#pragma once

#include <cstdint>

namespace quern::cuda {

/// A copy by a kernel; a null source clears.
struct CopyPiece {
  const void* source;
  void* destination;
  int64_t size_bytes;
};

}  // namespace quern::cuda
