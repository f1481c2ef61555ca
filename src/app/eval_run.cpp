#include "app/eval_run.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/shape.h"

namespace quern::app {
namespace {

using worker::RowKind;
using worker::StepPlan;
using worker::StepResult;
using worker::StepRun;
using worker::Want;

constexpr int32_t kBlock = 64;

/// Begins a new sequence in slot 0 with blocks for `num_tokens` tokens.
void begin_sequence(StepPlan& plan, int32_t num_tokens) {
  plan.state_ops.push_back({.kind = worker::StateOp::Kind::kClear, .slot = 0});
  plan.slot_updates.push_back({.slot = 0});
  worker::BlockTableUpdate table{.slot = 0, .first_block = 0};
  table.blocks.resize(static_cast<size_t>(ceil_div(num_tokens, kBlock)));
  std::iota(table.blocks.begin(), table.blocks.end(), 0);
  plan.block_table_updates.push_back(std::move(table));
}

StepRun run_of(const Piece& piece, const std::vector<int32_t>& tokens) {
  StepRun run;
  run.kind = piece.kind;
  run.num_rows = piece.end - piece.begin;
  run.tokens.assign(tokens.begin() + piece.begin, tokens.begin() + piece.end);
  run.position = {piece.begin, piece.begin, piece.begin};
  if (piece.end < static_cast<int32_t>(tokens.size())) run.following_token = tokens[static_cast<size_t>(piece.end)];
  return run;
}

Result<worker::RunResult> execute(worker::WorkerGroup& workers, StepPlan plan) {
  workers.submit(std::move(plan));
  StepResult result = workers.wait();
  if (result.error) return std::move(*result.error);
  CHECK(result.runs.size() == 1);
  if (result.runs[0].non_finite)
    return make_error(ErrorCode::kInternal, "a logit is NaN or infinite; the checkpoint or a kernel is broken");
  return std::move(result.runs[0]);
}

Result<void> check_tokens(const std::vector<int32_t>& tokens, const worker::WorkerLimits& limits) {
  if (tokens.empty()) return invalid_argument("there are no tokens to evaluate");
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= limits.vocab_size)
      return invalid_argument("token {} at position {} is outside the vocabulary (0 to {})", tokens[i], i, limits.vocab_size - 1);
  }
  return {};
}

}  // namespace

std::vector<Piece> cut_prompt(int32_t num_tokens, int32_t chunk, int32_t max_rows) {
  const bool as_prompt = chunk == 0 || chunk % kBlock == 0 || chunk >= num_tokens;
  std::vector<Piece> pieces;
  if (as_prompt) {
    const int32_t largest = max_rows / kBlock * kBlock;
    const int32_t size = chunk == 0 || chunk % kBlock != 0 ? largest : std::min(chunk, largest);
    for (int32_t begin = 0; begin < num_tokens; begin += size)
      pieces.push_back({begin, std::min(begin + size, num_tokens), RowKind::kPrompt});
    return pieces;
  }
  for (int32_t begin = 0; begin < num_tokens;) {
    const int32_t boundary = (begin / kBlock + 1) * kBlock;
    const int32_t end = std::min({begin + std::min(chunk, max_rows), boundary, num_tokens});
    pieces.push_back({begin, end, RowKind::kDecode});
    begin = end;
  }
  return pieces;
}

Result<EvalLogits> eval_logits(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
                               int32_t chunk, int32_t draft_depth) {
  RETURN_IF_ERROR(check_tokens(tokens, workers.limits()));
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  const bool with_drafts = draft_depth > 0;
  if (with_drafts && num_tokens < 2) return invalid_argument("MTP needs at least two tokens");
  std::vector<Piece> pieces = cut_prompt(with_drafts ? num_tokens - 1 : num_tokens, chunk, workers.limits().max_rows);
  if (with_drafts) pieces.push_back({num_tokens - 1, num_tokens, RowKind::kDecode});

  EvalLogits result;
  auto next_position = positions.begin();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    StepPlan plan{.step = i};
    if (i == 0) begin_sequence(plan, num_tokens + draft_depth);
    StepRun run = run_of(piece, tokens);
    const auto first_position = next_position;
    for (; next_position != positions.end() && *next_position < piece.end; ++next_position)
      run.logit_rows.push_back(*next_position - piece.begin);
    const bool drafts_here = with_drafts && i + 2 == pieces.size();
    run.want = run.logit_rows.empty() && !drafts_here ? Want::kNothing : Want::kLogits;
    run.fill_mtp = with_drafts;
    if (drafts_here) {
      run.propose = worker::DraftMethod::kMtp;
      run.propose_depth = draft_depth;
    }
    plan.runs.push_back(std::move(run));
    ASSIGN_OR_RETURN(worker::RunResult got, execute(workers, std::move(plan)));
    CHECK(got.logits.size() == static_cast<size_t>(next_position - first_position));
    for (size_t row = 0; row < got.logits.size(); ++row)
      result.positions.push_back({first_position[static_cast<ptrdiff_t>(row)], std::move(got.logits[row])});
    if (drafts_here) result.drafts = std::move(got.draft_logits);
  }
  return result;
}

Result<Likelihood> eval_likelihood(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, int32_t chunk) {
  RETURN_IF_ERROR(check_tokens(tokens, workers.limits()));
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  Likelihood result;
  uint64_t step = 0;
  for (int32_t window = 0; window < num_tokens; window += workers.limits().max_model_len) {
    const int32_t length = std::min(workers.limits().max_model_len, num_tokens - window);
    const std::vector<int32_t> in_window(tokens.begin() + window, tokens.begin() + window + length);
    bool begun = false;
    for (const Piece& piece : cut_prompt(length, chunk, workers.limits().max_rows)) {
      StepPlan plan{.step = step++};
      if (!begun) begin_sequence(plan, length);
      begun = true;
      StepRun run = run_of(piece, in_window);
      run.want = Want::kPromptLogprobs;
      plan.runs.push_back(std::move(run));
      ASSIGN_OR_RETURN(const worker::RunResult got, execute(workers, std::move(plan)));
      for (const worker::TokenLogprobs& token : got.prompt_logprobs) result.nll -= static_cast<double>(token.chosen);
      result.num_tokens += static_cast<int64_t>(got.prompt_logprobs.size());
    }
  }
  return result;
}

Result<Acceptance> eval_acceptance(worker::WorkerGroup& workers, const std::vector<int32_t>& tokens, int32_t given) {
  RETURN_IF_ERROR(check_tokens(tokens, workers.limits()));
  if (!workers.limits().has_mtp) return make_error(ErrorCode::kUnsupported, "this checkpoint has no MTP head");
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  const int32_t window_size = workers.limits().max_model_len - 1;  // a draft has a place, too
  Acceptance result;
  uint64_t step = 0;
  for (int32_t window = 0; window < num_tokens; window += window_size) {
    const int32_t length = std::min(window_size, num_tokens - window);
    const int32_t first = std::min(given, length - 1);
    const std::vector<int32_t> in_window(tokens.begin() + window, tokens.begin() + window + length);
    std::vector<Piece> pieces = cut_prompt(first, 0, workers.limits().max_rows);
    for (int32_t i = first; i + 1 < length; ++i) pieces.push_back({i, i + 1, RowKind::kDecode});
    std::optional<int32_t> draft;  // for the token after the next
    for (size_t i = 0; i < pieces.size(); ++i) {
      StepPlan plan{.step = step++};
      if (i == 0) begin_sequence(plan, length + 1);
      StepRun run = run_of(pieces[i], in_window);
      run.fill_mtp = true;
      const bool counts = pieces[i].begin >= first;
      if (counts) {
        run.want = Want::kPromptLogprobs;
        run.num_prompt_logprobs = 1;
        run.propose = worker::DraftMethod::kMtp;
        run.propose_depth = 1;
      }
      plan.runs.push_back(std::move(run));
      ASSIGN_OR_RETURN(const worker::RunResult got, execute(workers, std::move(plan)));
      if (!counts) continue;
      CHECK(got.prompt_logprobs.size() == 1 && got.prompt_logprobs[0].top.size() == 1 && got.drafts.size() == 1);
      if (draft) {
        ++result.num_drafts;
        result.num_accepted += got.prompt_logprobs[0].top[0].first == *draft;
      }
      draft = got.drafts[0];
    }
  }
  return result;
}

Result<worker::ExecutionPlan> plan_for_eval(const worker::ExecutionPlan& plan, int32_t capacity, int32_t logit_rows) {
  worker::WorkerOptions options = plan.options;
  options.max_num_seqs = 1;
  options.max_model_len = capacity;
  options.max_logit_rows = std::max(logit_rows, 1);
  if (!options.kv_cache_memory_bytes)
    options.kv_cache_memory_bytes = plan.kv_bytes_for(ceil_div(capacity, kBlock));
  return worker::make_plan(options, plan.config, plan.inventory, plan.device_traits());
}

}  // namespace quern::app
