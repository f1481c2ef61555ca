#pragma once

#include <cstdint>
#include <vector>

#include "text/pushdown_automaton.h"

namespace quern::text {

/// Stacks of a pushdown automaton: each is its top frame, whose parent is the rest. Equal stacks are one frame, so that ambiguous grammars
/// stay small. Frames are forgotten in the opposite order of their making. One thread.
class FrameStore {
 public:
  static constexpr int32_t kEnd = -1;      // parent of the root rule's frame
  static constexpr int32_t kUnknown = -2;  // a parent that is not known (token_masks.h)
  struct Frame {
    int32_t state, count, parent;
    int32_t next;  // in its bucket
  };

  FrameStore() : buckets_(64, -1) {}
  int32_t intern(int32_t state, int32_t count, int32_t parent);
  [[nodiscard]] const Frame& frame(int32_t id) const { return frames_[static_cast<size_t>(id)]; }
  [[nodiscard]] size_t size() const { return frames_.size(); }
  void truncate(size_t size);

 private:
  [[nodiscard]] size_t bucket(const Frame& frame) const;
  void link(size_t id);
  std::vector<Frame> frames_;
  std::vector<int32_t> buckets_;  // a power of two
};

/// All the stacks that a text can have led to. `tops` can take a byte; each of them can be completed.
struct StackSet {
  std::vector<int32_t> tops;
  bool complete = false;      // the text is complete as it stands
  std::vector<int32_t> left;  // ways into the unknown parent: how often the rule above it had counted
  void clear() {
    tops.clear();
    left.clear();
    complete = false;
  }
  [[nodiscard]] bool empty() const { return tops.empty() && left.empty() && !complete; }
};

/// Moves stacks by bytes. One thread; borrows both.
class StackWalker {
 public:
  /// Of grammars that are more ambiguous than this some readings are dropped: what is still allowed is right, but not everything.
  static constexpr size_t kMaxStacks = 256;

  /// open_rule: a rule that counts and whose frame on the unknown parent has counted nobody knows how far; kNone: there is none.
  StackWalker(const PushdownAutomaton& automaton, FrameStore& frames, int32_t open_rule = PushdownAutomaton::kNone)
      : automaton_(automaton), frames_(frames), open_rule_(open_rule) {}

  void begin(StackSet& out);
  /// The stacks after the rule above `parent` is complete.
  void leave(int32_t parent, StackSet& out);
  /// The stack that stands in `state`.
  void enter(int32_t state, int32_t count, int32_t parent, StackSet& out);
  void step(const StackSet& from, uint8_t byte, StackSet& out);

 private:
  void start(StackSet& out);
  void add(int32_t state, int32_t count, int32_t parent) { work_.push_back(frames_.intern(state, count, parent)); }
  void pop(int32_t count, int32_t parent, StackSet& out);
  void finish(StackSet& out);

  const PushdownAutomaton& automaton_;
  FrameStore& frames_;
  const int32_t open_rule_;
  std::vector<int32_t> work_;
  std::vector<uint32_t> seen_;  // by frame: in which round
  uint32_t round_ = 0;
};

}  // namespace quern::text
