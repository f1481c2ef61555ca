#include "text/grammar_frames.h"

#include <algorithm>
#include <utility>

#include "base/hash.h"

namespace quern::text {

size_t FrameStore::bucket(const Frame& frame) const {
  const uint64_t a = static_cast<uint64_t>(static_cast<uint32_t>(frame.state)) << 32 | static_cast<uint32_t>(frame.count);
  return static_cast<size_t>(mix64(a * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(static_cast<uint32_t>(frame.parent)))) & (buckets_.size() - 1);
}

void FrameStore::link(size_t id) {
  int32_t& head = buckets_[bucket(frames_[id])];
  frames_[id].next = head;
  head = static_cast<int32_t>(id);
}

int32_t FrameStore::intern(int32_t state, int32_t count, int32_t parent) {
  const Frame wanted{state, count, parent, -1};
  for (int32_t id = buckets_[bucket(wanted)]; id >= 0; id = frame(id).next) {
    const Frame& f = frame(id);
    if (f.state == state && f.count == count && f.parent == parent) return id;
  }
  frames_.push_back(wanted);
  if (frames_.size() > buckets_.size()) {
    buckets_.assign(buckets_.size() * 4, -1);
    for (size_t id = 0; id < frames_.size(); ++id) link(id);
  } else {
    link(frames_.size() - 1);
  }
  return static_cast<int32_t>(frames_.size() - 1);
}

void FrameStore::truncate(size_t size) {
  while (frames_.size() > size) {
    // The last one made is the first of its bucket.
    buckets_[bucket(frames_.back())] = frames_.back().next;
    frames_.pop_back();
  }
}

void StackWalker::start(StackSet& out) {
  out.clear();
  work_.clear();
  if (++round_ == 0) seen_.assign(seen_.size(), 0), ++round_;
}

void StackWalker::begin(StackSet& out) {
  start(out);
  add(automaton_.start(), 0, FrameStore::kEnd);
  finish(out);
}

void StackWalker::leave(int32_t parent, StackSet& out) {
  start(out);
  pop(0, parent, out);
  finish(out);
}

void StackWalker::enter(int32_t state, int32_t count, int32_t parent, StackSet& out) {
  start(out);
  add(state, count, parent);
  finish(out);
}

void StackWalker::step(const StackSet& from, uint8_t byte, StackSet& out) {
  start(out);
  for (const int32_t top : from.tops) {
    const FrameStore::Frame frame = frames_.frame(top);
    const int32_t to = automaton_.next(frame.state, byte);
    if (to != PushdownAutomaton::kNone) add(to, frame.count + (automaton_.is_loop_head(to) ? 1 : 0), frame.parent);
  }
  finish(out);
}

void StackWalker::pop(int32_t count, int32_t parent, StackSet& out) {
  if (parent == FrameStore::kEnd) {
    out.complete = true;
  } else if (parent == FrameStore::kUnknown) {
    if (std::ranges::find(out.left, count) == out.left.end()) out.left.push_back(count);
  } else {
    work_.push_back(parent);  // it stands already where it goes on
  }
}

/// Follows calls and ends until every stack waits for a byte.
void StackWalker::finish(StackSet& out) {
  while (!work_.empty()) {
    const int32_t id = work_.back();
    work_.pop_back();
    if (seen_.size() <= static_cast<size_t>(id)) seen_.resize(static_cast<size_t>(id) * 2 + 64);
    if (std::exchange(seen_[static_cast<size_t>(id)], round_) == round_) continue;
    const FrameStore::Frame frame = frames_.frame(id);
    bool may_go_on = true, may_leave = automaton_.accepts(frame.state);
    if (automaton_.is_loop_head(frame.state)) {
      const int32_t rule_number = automaton_.rule_of(frame.state);
      const PushdownAutomaton::Rule& rule = automaton_.rules()[static_cast<size_t>(rule_number)];
      const bool is_open = frame.parent == FrameStore::kUnknown && rule_number == open_rule_;
      may_go_on = is_open || frame.count < rule.max;
      may_leave = is_open || frame.count >= rule.min;
    }
    if (may_leave) pop(frame.count, frame.parent, out);
    if (!may_go_on) continue;
    if (out.tops.size() >= kMaxStacks) continue;  // only the way to the end is looked for any more
    if (automaton_.has_edges(frame.state)) out.tops.push_back(id);
    for (const PushdownAutomaton::Call& call : automaton_.calls(frame.state)) {
      const int32_t parent = call.is_tail ? frame.parent : frames_.intern(call.to, frame.count + (automaton_.is_loop_head(call.to) ? 1 : 0), frame.parent);
      add(call.start, 0, parent);
    }
  }
}

}  // namespace quern::text
