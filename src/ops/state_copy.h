#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Copies or clears pieces of state: snapshots, restores, forks, swaps, fresh slots.
struct StateCopy {
  static constexpr std::string_view kName = "state_copy";
  struct Problem {};
  struct Copy {
    TensorView source;  // empty: the destination is cleared
    TensorView destination;
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void enqueue(std::span<const Copy> copies, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
