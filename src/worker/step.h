#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ops/rows.h"
#include "ops/sampling.h"

// What the engine and its workers exchange: plain values. A StepPlan is immutable and the same on every rank (architecture.md section 5).

namespace quern::worker {

using ops::kMaxLogitBias;
using ops::kMaxLogprobs;
using ops::kMaxStopIds;
using ops::RowKind;
using ops::SamplingParams;
using ops::TokenLogprobs;

/// What a step shall bring back of a run.
enum class Want : uint8_t {
  kNothing,         // rows are computed and committed: a prompt's middle, a replay
  kSample,          // the token after the last row; of a verify, the accepted drafts and the token after them
  kLogits,          // the logits of the rows in `logit_rows`, for eval; nothing is sampled
  kPromptLogprobs,  // per row, the log-probability of the given token that follows it; then as kSample when `sample_after` is set
};

enum class DraftMethod : uint8_t { kNone, kMtp };

/// Consecutive rows of one sequence in one step. They start at the device's cursor of the slot.
struct StepRun {
  int32_t slot = 0;
  RowKind kind = RowKind::kPrompt;
  int32_t num_rows = 0;
  std::vector<int32_t> tokens;                 // num_rows ids; empty: from the device, last token first, then its drafts (a verify of num_rows - 1 drafts)
  std::array<int32_t, 3> position{};           // P: (t, h, w) of the first row; text: its index three times
  Want want = Want::kNothing;
  int32_t num_prompt_logprobs = 0;             // kPromptLogprobs: most likely tokens beside the given one
  bool sample_after = false;                   // kPromptLogprobs: also sample the token after the last row
  std::vector<int32_t> logit_rows;             // kLogits: rows of the run, ascending
  int32_t following_token = -1;                // kPromptLogprobs without sample_after and P runs with MTP: the prompt's token after the last row, if any
  std::vector<int32_t> drafts;                 // a verify: the num_rows - 1 drafts, where the host has made them; empty: those that the device holds
  int32_t synthetic_acceptance = -1;           // a verify in a benchmark: so many drafts count as accepted, whatever was drawn; -1: those that agree
  DraftMethod propose = DraftMethod::kNone;    // drafts to make after this step, for the next one
  int32_t propose_depth = 0;
  bool fill_mtp = false;                       // keep the MTP layer's KV up to date for these rows
  bool mask_pending = false;                   // sampling waits for this step's StepMasks
  [[nodiscard]] bool verify() const { return tokens.empty() && num_rows > 1; }
};

/// New owner or new parameters of a slot.
struct SlotUpdate {
  int32_t slot = 0;
  SamplingParams sampling;
  std::vector<int32_t> prompt_ids;       // for penalties; only kept when the parameters have any
  std::vector<int32_t> output_ids;       // already generated (resumed after preemption): count for penalties and min_tokens
  int32_t position_delta = 0;            // mrope position of generated rows minus their index
};

/// Blocks of a slot from `first_block` on.
struct BlockTableUpdate {
  int32_t slot = 0;
  int32_t first_block = 0;
  std::vector<int32_t> blocks;
};

/// Work on recurrent state before the rows of the step are computed.
struct StateOp {
  enum class Kind : uint8_t {
    kClear,     // a new sequence: zero state, cursor 0
    kSnapshot,  // the slot's stored boundary -> snapshot
    kRestore,   // snapshot -> slot; cursor and boundary become `boundary`
    kRewind,    // drop rows past the slot's stored boundary: cursor becomes the boundary
    // Between the device and places in host memory.
    kBlockToHost,
    kBlockFromHost,
    kSnapshotToHost,
    kSnapshotFromHost,
  };
  Kind kind = Kind::kClear;
  int32_t slot = 0;
  int32_t snapshot = -1;
  int32_t boundary = 0;
  int32_t block = -1;  // the KV block of kBlockToHost and kBlockFromHost
  int32_t host = -1;   // the place for a block or a snapshot in host memory
};

struct StepPlan {
  uint64_t step = 0;
  std::vector<StateOp> state_ops;
  std::vector<SlotUpdate> slot_updates;
  std::vector<BlockTableUpdate> block_table_updates;
  std::vector<StepRun> runs;  // P runs first; at most one run a slot
};

/// Grammar masks of runs with mask_pending, sent later. Bit t of a row set = token t allowed.
struct StepMasks {
  uint64_t step = 0;
  std::vector<std::pair<int32_t, std::vector<uint32_t>>> rows;  // slot, num_sampled_rows x ceil(vocab / 32) words
};

/// What became of one run.
struct RunResult {
  int32_t slot = 0;
  std::vector<int32_t> tokens;             // accepted drafts and the token after them; empty when nothing was sampled
  std::vector<TokenLogprobs> logprobs;     // parallel to tokens when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // kPromptLogprobs: one per row that has a following token
  std::vector<int32_t> drafts;             // proposed for the next step (for traces and masks)
  int32_t num_draft_rows = 0;              // verified in this step
  bool non_finite = false;                 // a logit was NaN or infinite: no token, the request fails
  std::vector<std::vector<float>> logits;  // kLogits: [logit_rows.size()][vocab_size]
  std::vector<std::vector<float>> draft_logits;  // kLogits with propose_depth > 0: of every draft
};

struct StepResult {
  uint64_t step = 0;
  std::vector<RunResult> runs;             // parallel to the plan's
  int64_t computed_rows = 0;               // counted by the worker
  int64_t gathered_rows = 0;               // rows sampled from logits that ranks had to exchange whole (ops::candidates_needed)
  double device_seconds = 0;
  std::optional<Error> error;              // the step failed as a whole; no run has a result
};

}  // namespace quern::worker
