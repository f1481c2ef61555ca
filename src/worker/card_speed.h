#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "model/config.h"
#include "ops/rows.h"
#include "weights/source.h"
#include "worker/plan.h"

// The time of a step on cards that nobody here has, from what their kernels compile to: what is read, what is issued, what is launched, what ranks exchange. Nothing of it is measured
// on a card, and whoever prints it says so.

namespace quern::worker {

/// What is assumed, beside the datasheet and the compiled kernels.
struct SpeedAssumptions {
  double read_share = 0.85;                 // of the datasheet's bandwidth
  double prompt_share = 0.6;                // of the matrix units' peak, in tiles of prompt rows
  double mixer_share = 0.25;                // of the peak of 16 products a slot in attention of prompts and of opencl.simd16, of the issue rate where instructions are counted, in GDN and in attention of decode rows
  double launch_seconds = 3e-6;             // between two launches that depend on each other
  double all_reduce_seconds = 30e-6;        // of the smallest one
  double exchange_bytes_per_second = 25e9;  // into a rank and out of it at the same time
};

/// The card of a rank.
struct CardRates {
  double read_bandwidth = 0;  // bytes per second, datasheet
  double issue_rate = 0;      // instructions of 16 lanes per second, all engines
  int num_cores = 0;
};

/// Rows of one step: each of `num_sequences` sequences has `rows_each`, which end at `context` tokens.
struct StepShape {
  ops::RowKind kind = ops::RowKind::kDecode;
  int32_t num_sequences = 1, rows_each = 1;
  int32_t context = 1024;
  [[nodiscard]] int64_t num_rows() const { return int64_t{num_sequences} * rows_each; }
};

/// What one rank does in a step.
struct RankWork {
  double weight_bytes = 0, weight_slots = 0;  // linear layers: bytes from memory, issue slots of an engine
  double mixer_bytes = 0;                     // states, rings, keys and values
  double attention_products = 0;              // multiplications, where instructions are not counted: of prompts, and of decode rows of opencl.simd16
  double attention_slots = 0;                 // of decode rows: issue slots of an engine
  int64_t attention_sub_groups = 0;           // of all rows and kv heads: each occupies an engine at most
  double gdn_slots = 0, gdn_walk_slots = 0;   // issue slots of an engine: on any core, and of rows and chunks that follow each other
  int64_t gdn_groups = 0;                     // heads of all sequences: each occupies a core at most with what follows each other
  int64_t launches = 0;
  int64_t all_reduces = 0;
  double all_reduce_bytes = 0;  // that a rank receives in each
  double gather_bytes = 0;      // logits that come from other ranks
  double hand_over_bytes = 0;   // to the next stage; ids back are too few to count
};

/// Seconds of a step by cause.
struct StepTerms {
  double weight_read = 0, weight_issue = 0, mixer_read = 0, mixer_issue = 0;  // of each pair the longer one counts: reading and issuing overlap
  double launches = 0, all_reduces = 0, gather = 0, hand_over = 0;
  [[nodiscard]] double seconds() const { return std::max(weight_read, weight_issue) + std::max(mixer_read, mixer_issue) + launches + all_reduces + gather + hand_over; }
};
StepTerms step_terms(const RankWork& work, const CardRates& card, ops::RowKind kind, const SpeedAssumptions& assumed);

/// A rank's part of the model and where it stands.
struct RankPart {
  const model::ModelConfig& config;     // its layers, with its heads and columns
  const weights::Inventory& inventory;  // and of the checkpoint
  ops::DeviceTraits traits;
  int32_t tp_size = 1;
  bool first_stage = true, last_stage = true;
};
/// Needs choices and dtypes of the plan.
RankWork rank_work(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape);
/// One draft of the MTP head, which the last stage makes.
RankWork draft_work(const ExecutionPlan& plan, const RankPart& part);

/// What a plan's cards should reach.
struct CardSpeed {
  SpeedAssumptions assumed;
  struct Stage {
    RankWork work;  // of the rank that takes longest, for one decode row at 1k context
    CardRates card;
    StepTerms terms;
  };
  std::vector<Stage> stages;
  double decode_seconds = 0;          // of one token, one sequence at 1k context
  double decode_seconds_16 = 0;       // in which each of 16 sequences gets a token; a pipeline has as many groups of them as stages
  double prompt_seconds = 0;          // a prompt of 512 tokens
  double long_prompt_seconds = 0;     // of 8192, in the plan's steps: to its first token
  double verify_seconds[4] = {};      // a step that verifies 1, 2, 3, 4 drafts
  double draft_seconds = 0;           // of one draft; 0: there is no MTP head
  [[nodiscard]] double tokens_per_second() const { return 1 / decode_seconds; }
  [[nodiscard]] double tokens_per_second_16() const { return 16 / decode_seconds_16; }
  /// The published formula: tokens of output over the whole time of a request with 512 tokens in and 256 out.
  [[nodiscard]] double latency_tokens_per_second() const { return 256 / (prompt_seconds + 256 * decode_seconds); }
  /// With `drafts` of 1 to 4, where a verify gives `acceptance_length` tokens.
  [[nodiscard]] double tokens_per_second_mtp(int drafts, double acceptance_length) const { return acceptance_length / (verify_seconds[drafts - 1] + drafts * draft_seconds); }
};
/// Nothing where a card's engines are not known, an op has no kernel, or plain ones were asked for, whose machine code nobody counted.
std::optional<CardSpeed> card_speed(const ExecutionPlan& plan, const SpeedAssumptions& assumed = {});

}  // namespace quern::worker
