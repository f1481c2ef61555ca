#pragma once

#include <cstdint>

#include "ops/slot_sampling.h"

namespace quern::cuda {

/// ops::SampleRun
struct SampleRecord {
  int32_t slot, num_rows, first_logits_row, verify, first_mask_row;
};

struct SampleArgs {
  int32_t vocab_size, num_tokens, k_max, drafts_stride;
  int32_t first_id, end_id;  // of the logits
  const SampleRecord* runs;
  float* logits;          // [., end_id - first_id]
  const uint32_t* masks;  // [., ceil(vocab_size / 32)]
  // By slot.
  ops::SlotSampling* params;
  int32_t* counts;            // [., vocab_size]
  const uint8_t* in_prompt;   // [., vocab_size]
  int32_t *cursor, *boundary, *last_token;
  const int32_t* drafts;      // [., drafts_stride]
  // By run (ops::SampleOutput).
  int32_t *tokens, *sampled, *non_finite;
  float* logprobs;
  int32_t *logprob_ids, *chosen_rank;
  // Of a vocabulary in parts.
  int32_t num_candidates, num_parts;
  uint64_t* candidates;      // [., 1 + num_candidates]
  const uint64_t* gathered;  // [., num_parts, 1 + num_candidates]
  // Of the kernels in sample_sm90.cu.
  int32_t num_runs, num_rows;
  int32_t* drawn;   // by row of logits, where a cluster draws itself
  uint64_t* parts;  // [., kSampleCluster, kSamplePartWords]: where it only finds what each of its blocks has
};

/// Of the kernels in sample_sm90.cu: blocks that share a row, their shared memory beside the row, the logits of a block, the draws of a
/// run.
inline constexpr int kSampleCluster = 8, kSampleSharedBytes = 56 << 10, kMaxSampleSlice = 42 << 10, kMaxSampleDraws = 64;
inline constexpr int kSampleUnit = 128;  // the tokens of a block are a multiple of it: four a lane
/// Threads that finish a row, and the rows of a run that are finished at a time.
inline constexpr int kSampleFinishers = 256, kMaxSampleFinishing = 4;
/// The rows that a cluster takes one after the other at most; words of what a block says of a row: 0 where a logit is not finite, else 1 and the number of keys after it.
inline constexpr int kMaxSampleRows = 96, kSamplePartWords = 1 + ops::kMaxCandidates;

/// Of the kernels in sample_rows.cu: dynamic shared memory, and the most logits of a row.
inline constexpr int kSampleRowsSharedBytes = 54 << 10, kMaxSampleRowTokens = 1 << 20;

/// The rows' best tokens, as ids or as keys.
struct ArgmaxArgs {
  const float* logits;          // [rows, width]
  int32_t width, num_tokens;    // the first num_tokens of them have text
  int32_t first_id;
  int32_t* ids;                 // [rows], or null
  uint64_t* keys;               // [rows], or null
};
struct ArgmaxOfArgs {
  const uint64_t* gathered;  // [rows, num_parts]
  int32_t num_rows, num_parts;
  int32_t* ids;
};

}  // namespace quern::cuda
