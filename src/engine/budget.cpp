#include "engine/budget.h"

#include <algorithm>
#include <string_view>

#include "base/check.h"
#include "base/log.h"
#include "engine/sequence.h"

namespace quern::engine {

Budget resolve_budget(const EngineOptions& options, const worker::WorkerLimits& limits) {
  CHECK(limits.num_slots >= 1 && limits.num_blocks >= 1 && limits.max_rows > kBlockSize);

  int32_t seqs = options.max_num_seqs > 0 ? options.max_num_seqs : limits.num_slots;
  const auto clamp_seqs = [&seqs](int32_t most, std::string_view because) {
    if (seqs <= most) return;
    log_info("max_num_seqs {} is lowered to {}: {}", seqs, most, because);
    seqs = most;
  };
  clamp_seqs(limits.num_slots, "there is room for the state of no more sequences");
  clamp_seqs(limits.max_rows - kBlockSize, "a step must hold a row of each and a chunk of 64 prompt rows");

  int32_t tokens = options.max_num_batched_tokens > 0 ? options.max_num_batched_tokens : limits.max_rows;
  if (tokens > limits.max_rows) {
    log_info("max_num_batched_tokens {} is lowered to {}: a step has no more rows", tokens, limits.max_rows);
    tokens = limits.max_rows;
  }
  if (tokens < kBlockSize + seqs) {
    log_info("max_num_batched_tokens {} is raised to {}: a step must hold a row of each of {} sequences and a chunk of {} prompt rows",
             tokens, kBlockSize + seqs, seqs, kBlockSize);
    tokens = kBlockSize + seqs;
  }

  int32_t prompt_rows = options.long_prefill_token_threshold;
  if (prompt_rows > 0 && prompt_rows % kBlockSize != 0) {
    prompt_rows = std::max(prompt_rows / kBlockSize, 1) * kBlockSize;
    log_info("long_prefill_token_threshold {} becomes {}: prompts are cut every {} tokens", options.long_prefill_token_threshold, prompt_rows,
             kBlockSize);
  }
  const int32_t steps = std::max(options.steps_in_flight, 1);
  if (steps == 1 || limits.num_stages == 1) return {seqs, tokens, prompt_rows, steps, 1};
  return {seqs, tokens, prompt_rows, limits.num_stages + 1, limits.num_stages};
}

}  // namespace quern::engine
