#pragma once

#include <memory>

#include "worker/slot_values.h"
#include "worker/step.h"

namespace quern::worker {

/// A step as every rank gets it.
struct RankStep {
  std::shared_ptr<const StepPlan> plan;
  std::shared_ptr<const SlotValues> slots;  // null: the device has them, or gets them from nobody
};

/// One of those that execute every step of a RankGroup, in order: a rank's device, or the ranks of another process. It reports the result of each to the group, from a thread of its own.
class GroupMember {
 public:
  virtual ~GroupMember() = default;
  virtual void submit(RankStep step) = 0;
  virtual void submit_masks(StepMasks masks) = 0;
  /// No more steps come; those submitted are still computed.
  virtual void close() = 0;
  /// Waits until they are, after close().
  virtual void join() = 0;
  /// From any thread: no wait for another rank goes on.
  virtual void abort(const Error& error) = 0;
};

}  // namespace quern::worker
