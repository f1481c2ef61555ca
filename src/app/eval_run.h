#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "worker/plan.h"
#include "worker/worker_group.h"

// Evaluation: one sequence of given tokens through the workers themselves, without engine. The same StepPlans as in serving, slot 0, blocks
// 0, 1, ...

namespace quern::app {

/// A stretch of the prompt that is computed in one step.
struct Piece {
  int32_t begin = 0, end = 0;
  worker::RowKind kind = worker::RowKind::kPrompt;
};

/// Cuts a prompt of `num_tokens` as `--chunk` says: 0, multiples of 64 and everything as long as the prompt give prompt rows in pieces of
/// that size on the 64-grid; another size gives decode rows, so many at a time, further cut at every 64-boundary. No piece is longer than
/// `max_rows`.
std::vector<Piece> cut_prompt(int32_t num_tokens, int32_t chunk, int32_t max_rows);

/// Logits of one position, or of one draft.
struct PositionLogits {
  int32_t position = 0;
  std::vector<float> logits;  // [vocab_size]
};
struct EvalLogits {
  std::vector<PositionLogits> positions;   // as asked for, ascending
  std::vector<std::vector<float>> drafts;  // of the MTP chain after the last token
};

/// The logits after the tokens at `positions` (ascending, inside the prompt). With `draft_depth` > 0 also those of an MTP chain whose first
/// pair is the last token and the hidden state before it; the last token is then a piece of its own.
Result<EvalLogits> eval_logits(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
                               int32_t chunk, int32_t draft_depth);

/// Sum of -log p of every token but the first of each window of the model's length.
struct Likelihood {
  double nll = 0;
  int64_t num_tokens = 0;  // that were scored
};
Result<Likelihood> eval_likelihood(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, int32_t chunk);

/// How often the MTP head's first draft is right: after every token but the first `given` ones it drafts the token after the next, and the
/// draft counts as accepted where the model itself, greedy, would take it. Windows as in eval_likelihood, one token shorter.
struct Acceptance {
  int64_t num_drafts = 0, num_accepted = 0;
};
Result<Acceptance> eval_acceptance(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, int32_t given);

/// `plan` again with room for exactly one sequence of `capacity` tokens and for the logits of up to `logit_rows` rows of a step.
Result<worker::ExecutionPlan> plan_for_eval(const worker::ExecutionPlan& plan, int32_t capacity, int32_t logit_rows);

}  // namespace quern::app
