#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/token_constraint.h"
#include "text/output_grammar.h"
#include "text/token_grammar.h"

namespace quern::server {

/// Holds one output to a grammar.
class GrammarConstraint final : public engine::TokenConstraint {
 public:
  /// end_ids: tokens that may end the output once it is complete.
  GrammarConstraint(std::shared_ptr<const text::TokenGrammar> grammar, std::vector<int32_t> end_ids)
      : matcher_(std::move(grammar), std::move(end_ids)) {}
  bool fill_mask(std::span<uint32_t> mask) override {
    matcher_.fill_mask(mask);
    return true;
  }
  bool accept(int32_t token) override { return matcher_.accept(token); }
  void rollback(int32_t num_tokens) override { matcher_.rollback(num_tokens); }
  [[nodiscard]] bool finished() const override { return matcher_.is_finished(); }

 private:
  text::GrammarMatcher matcher_;
};

struct ConstraintStats {
  uint64_t num_compiled = 0, num_hits = 0, num_failed = 0;
  double compile_seconds = 0;
  uint64_t num_cached = 0, cached_bytes = 0;
};

/// Compiled grammars, made on the thread that asks, and kept for others that ask for the same: the least recently used go first when they
/// take more than `max_bytes`. Requests that ask for what is being compiled wait for it. Thread-safe.
class Constraints {
 public:
  static constexpr size_t kMaxBytes = size_t{256} << 20;
  static constexpr size_t kMaxFormBytes = size_t{1} << 20;  // of one request's schemas, expressions and grammars
  /// Borrows the tokenizer; null: nothing can be held to a grammar.
  Constraints(const text::Tokenizer* tokenizer, int32_t vocab_size, size_t max_bytes = kMaxBytes)
      : tokenizer_(tokenizer), vocab_size_(vocab_size), max_bytes_(max_bytes) {}

  /// Null for a shape that is free. Errors: those of text::compile_output; kUnsupported without a tokenizer.
  Result<std::shared_ptr<const text::TokenGrammar>> compiled(const text::OutputShape& shape);
  [[nodiscard]] ConstraintStats stats() const;

 private:
  using Grammar = std::shared_ptr<const text::TokenGrammar>;
  struct Entry {
    std::string key;
    Grammar grammar;  // null while it is compiled
  };
  /// Makes the vocabulary's masks when they are first wanted.
  text::TokenMasks& masks();
  void shrink();  // under mutex_

  const text::Tokenizer* tokenizer_;
  const int32_t vocab_size_;
  const size_t max_bytes_;
  std::once_flag masks_made_;
  std::unique_ptr<text::TokenMasks> masks_;

  mutable std::mutex mutex_;
  std::condition_variable compiled_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string_view, std::list<Entry>::iterator> by_key_;
  ConstraintStats stats_;
};

}  // namespace quern::server
