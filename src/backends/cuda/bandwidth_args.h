#pragma once

#include <cstdint>

namespace quern::cuda {

/// Reads memory once, front to back.
struct ReadArgs {
  const void* memory;
  int64_t size_bytes;  // a multiple of 16
  uint32_t* unlikely;  // written in one of 2^32 cases, so that the reads are not left out
};

}  // namespace quern::cuda
