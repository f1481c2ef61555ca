#pragma once

#include <cstddef>
#include <string_view>

#include "ops/activation.h"
#include "ops/device.h"
#include "ops/linear.h"
#include "ops/rows.h"
#include "ops/tensor.h"

// What the kernels of all ops share. An op is a contract at the level where platforms may fuse, not a launch.

namespace quern::ops {

/// What an enqueue call may use.
struct Launch {
  Stream& stream;
  TensorView workspace;  // u8, at least Kernel::workspace_bytes(rows of the call); free for the next call
  const Buffer* next_weights = nullptr;  // packed weights that the op after this one in the step reads: kernels that leave the memory idle may bring them into a cache
};

/// A chosen candidate, made for one problem. One object serves all row counts from one packing of its weights.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Equal ids promise equal bits.
  [[nodiscard]] virtual std::string_view arithmetic() const = 0;
  /// Device memory for the packed weights; 0 for ops without weights.
  [[nodiscard]] virtual size_t packed_bytes() const { return 0; }
  [[nodiscard]] virtual size_t workspace_bytes(int64_t max_rows) const { return max_rows * 0; }
};

}  // namespace quern::ops
