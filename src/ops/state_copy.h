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
    /// Keeps the final hidden states that later steps need; called before `sample` moves the cursors. hidden [rows, hidden].
    /// A run's rows go to window [num_slots, W, hidden] at their index mod W (the last W of a long run). A fold that gdn_mix stored in this step at a boundary B
    /// puts the hidden of index B - 1 into boundary_hidden [num_slots, hidden], from this step's rows or else from the window.
    virtual void store_hidden(const Rows& rows, const TensorView& hidden, const TensorView& window, const TensorView& boundary_hidden, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
