#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace quern::engine {

/// What a grammar tells the engine, over token ids only. One object belongs to one sequence and is used by the engine thread alone.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  /// Sets bit t of `mask` (all zero on entry, ceil(vocab / 32) words) for every token that may come next. Returns false when everything is
  /// allowed (the mask is then not used).
  virtual bool fill_mask(std::span<uint32_t> mask) = 0;
  /// The sequence grew by `token`. False when the grammar does not allow it.
  virtual bool accept(int32_t token) = 0;
  /// Forgets the last `num_tokens` accepted tokens (rejected drafts).
  virtual void rollback(int32_t num_tokens) = 0;
  /// The grammar is complete and only an end of sequence may follow.
  [[nodiscard]] virtual bool finished() const = 0;
};

}  // namespace quern::engine
