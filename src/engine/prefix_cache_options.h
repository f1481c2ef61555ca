#pragma once

#include <cstdint>

namespace quern::engine {

struct PrefixCacheOptions {
  bool enabled = true;
  bool reuse_outputs = true;      // false: only rows that were computed as prompts are resumed from, so that a hit never changes bits
  int32_t snapshot_interval = 0;  // tokens between states that are kept in any case; 0: from the memory for them
};

}  // namespace quern::engine
