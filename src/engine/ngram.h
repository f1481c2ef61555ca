#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace quern::engine {

/// Guesses what follows `tokens` from what they hold already: the longest run of last tokens, of at most `most` and at least `least`, that
/// occurs earlier is looked up at its latest place, and what followed there is returned, at most `num_drafts` tokens. Empty: it occurs nowhere.
/// Cost: num_tokens * most comparisons at worst.
std::vector<int32_t> ngram_drafts(std::span<const int32_t> prompt, std::span<const int32_t> generated, int32_t least, int32_t most,
                                  int32_t num_drafts);

}  // namespace quern::engine
