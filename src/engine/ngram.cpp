#include "engine/ngram.h"

#include <algorithm>

namespace quern::engine {

std::vector<int32_t> ngram_drafts(std::span<const int32_t> prompt, std::span<const int32_t> generated, int32_t least, int32_t most,
                                  int32_t num_drafts) {
  const int64_t num_prompt = std::ssize(prompt), size = num_prompt + std::ssize(generated);
  const auto token = [&](int64_t i) {
    return i < num_prompt ? prompt[static_cast<size_t>(i)] : generated[static_cast<size_t>(i - num_prompt)];
  };
  // Where a run that agrees with the last tokens ends; the longest, and of equal ones the latest.
  int64_t best_end = -1, best_length = std::max(least, 1) - 1;
  for (int64_t end = size - 1; end >= 1 && best_length < most; --end) {
    int64_t length = 0;
    while (length < most && length < end && token(end - 1 - length) == token(size - 1 - length)) ++length;
    if (length <= best_length) continue;
    best_length = length;
    best_end = end;
  }
  std::vector<int32_t> drafts;
  if (best_end < 0) return drafts;
  for (int64_t i = best_end; i < size && std::ssize(drafts) < num_drafts; ++i) drafts.push_back(token(i));
  return drafts;
}

}  // namespace quern::engine
