#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "text/pushdown_automaton.h"
#include "text/token_trie.h"

namespace quern::text {

/// Which tokens a stack's top frame allows, whatever lies below it, worked out once for each state of an automaton:
///   staying   tokens within the rule: allowed, but for a rule that counts, where `need` more bodies have to be left
///   leaving   tokens that complete the rule and go on behind it: what they have left there is to be followed on the real stack
/// Immutable but for masks that it makes of its lists when they are first wanted; thread-safe.
class StateMask {
 public:
  StateMask(const PushdownAutomaton& automaton, int32_t state, const TokenVocabulary& vocabulary);

  /// Adds the tokens that stay in the rule when at most `room` more bodies may begin.
  void add_staying(int32_t room, std::span<uint32_t> mask) const;
  struct Leaving {
    int32_t token;
    int32_t count;  // bodies that it completes first
  };
  /// What is left of the leaving tokens behind the rule; values are indices of leaving().
  [[nodiscard]] const TokenTrie& rests() const { return rests_; }
  [[nodiscard]] const std::vector<Leaving>& leaving() const { return leaving_; }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_.load(std::memory_order_relaxed); }
  /// Nodes of the vocabulary's trie that were looked at to make it.
  [[nodiscard]] size_t work() const { return work_; }

 private:
  using Words = std::vector<uint32_t>;
  [[nodiscard]] const Words& words_for(size_t need) const;
  int32_t num_tokens_;
  std::vector<std::vector<int32_t>> staying_;                     // by need
  std::vector<size_t> num_staying_;                               // up to need
  mutable std::vector<std::atomic<const Words*>> words_;          // up to need; made when first wanted
  mutable std::vector<std::unique_ptr<const Words>> owned_words_;  // under mutex_
  mutable std::mutex mutex_;
  TokenTrie rests_;
  std::vector<Leaving> leaving_;
  mutable std::atomic<size_t> size_bytes_{0};
  size_t work_ = 0;
};

/// The masks of one rule's states, made when they are first wanted. Thread-safe.
class RuleMasks {
 public:
  explicit RuleMasks(int32_t num_states) : masks_(static_cast<size_t>(num_states)) {}
  RuleMasks(const RuleMasks&) = delete;
  RuleMasks& operator=(const RuleMasks&) = delete;
  ~RuleMasks();
  /// `state` is a state of `automaton`, the rule's `offset`-th.
  const StateMask& get(const PushdownAutomaton& automaton, int32_t state, int32_t offset, const TokenVocabulary& vocabulary);
  [[nodiscard]] bool has(int32_t offset) const { return masks_[static_cast<size_t>(offset)].load(std::memory_order_acquire) != nullptr; }
  [[nodiscard]] size_t size_bytes() const;

 private:
  std::vector<std::atomic<const StateMask*>> masks_;
};

/// Masks over one vocabulary. Rules that call no others, such as JSON's strings and numbers, share theirs between all grammars. Thread-safe.
class TokenMasks {
 public:
  explicit TokenMasks(std::shared_ptr<const TokenVocabulary> vocabulary) : vocabulary_(std::move(vocabulary)) {}
  [[nodiscard]] const TokenVocabulary& vocabulary() const { return *vocabulary_; }
  std::shared_ptr<RuleMasks> of_rule(const PushdownAutomaton::Rule& rule);

 private:
  std::shared_ptr<const TokenVocabulary> vocabulary_;
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<RuleMasks>, std::less<>> shared_;  // under mutex_
};

}  // namespace quern::text
