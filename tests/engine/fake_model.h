#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/hash.h"
#include "engine/request.h"

namespace quern::engine::testing {

/// A model without weights: the next token is a hash of all tokens before it and of the sampling parameters, and of nothing else.
class FakeModel {
 public:
  explicit FakeModel(int32_t vocab_size) : vocab_size_(vocab_size) {}

  static constexpr uint64_t kEmptyState = 0x5eed;
  /// The "recurrent state" after one more token.
  static uint64_t grow(uint64_t state, int32_t token) { return hash_combine(state, static_cast<uint64_t>(token)); }

  /// What a slot holds besides its state.
  struct Context {
    const SamplingParams& sampling;
    std::span<const int32_t> prompt_ids;  // as sent: only when the parameters have penalties
    std::span<const int32_t> output;
  };
  /// `allowed` is asked for candidates until it says yes.
  [[nodiscard]] int32_t next(uint64_t state, const Context& context, const std::function<bool(int32_t)>& allowed) const;
  [[nodiscard]] TokenLogprobs logprobs(uint64_t state, int32_t token, int32_t num_top) const;

  /// What a request must yield, computed row by row: at most max_tokens tokens, the stop id included.
  [[nodiscard]] std::vector<int32_t> output(const std::vector<int32_t>& prompt, const SamplingParams& sampling, int32_t max_tokens) const;

  [[nodiscard]] int32_t vocab_size() const { return vocab_size_; }

 private:
  const int32_t vocab_size_;
};

}  // namespace quern::engine::testing
