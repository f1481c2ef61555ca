#pragma once

#include "ops/kernel.h"
#include "ops/slot_sampling.h"

namespace quern::ops {

/// What the sampler keeps per slot, owned by the device.
struct SamplerTables {
  TensorView params;        // u8 [num_slots, sizeof(SlotSampling)]
  TensorView counts;        // i32 [num_slots, vocab_size]: occurrences in the output
  TensorView in_prompt;     // u8 [num_slots, vocab_size]: 1 where the prompt holds the token
};

/// One run of the step as the sampler sees it; all runs of the step are listed, since the sampler also advances cursors.
struct SampleRun {
  int32_t slot = -1;              // -1: padding
  int32_t num_rows = 0;
  int32_t first_logits_row = -1;  // of this run in `logits`, one per sampled row; -1: nothing is sampled and all rows are committed
  int32_t verify = 0;             // 1: every row has logits, drafts are compared with the sampled tokens; 0: the last row alone is sampled;
                                  // kSyntheticAcceptance + n: as 1, but the first n drafts count as accepted and no others (benchmarks)
  int32_t first_mask_row = -1;    // of this run in `masks`; -1: no grammar mask
};
inline constexpr int32_t kSyntheticAcceptance = 2;
inline constexpr int64_t kSampleRunFields = sizeof(SampleRun) / sizeof(int32_t);

/// Results on the device, one entry a run.
struct SampleOutput {
  TensorView tokens;         // i32 [runs, k_max + 1]: the accepted drafts and the token after them
  TensorView num_tokens;     // i32 [runs]: 0 where nothing was sampled
  TensorView non_finite;     // i32 [runs]: 1 where a logit was NaN or infinite; num_tokens is then 0
  TensorView logprobs;       // f32 [runs, k_max + 1, 1 + kMaxLogprobs]: of the raw distribution; entry 0 is the chosen token's
  TensorView logprob_ids;    // i32 [runs, k_max + 1, 1 + kMaxLogprobs]
  TensorView chosen_rank;    // i32 [runs, k_max + 1]
};

/// Draws the token of each row by Gumbel-max, argmax_t (logit_t / temperature + gumbel(RNG(seed, index, t))), over the transformed logits; greedy is argmax, the
/// lowest id on ties. A draft is accepted iff it equals the token drawn at its position. Then cursor, boundary, last_token, counts and num_generated advance.
/// Ids at and above `num_tokens` (no text) and, before min_tokens, stop ids are masked.
struct Sample {
  static constexpr std::string_view kName = "sample";
  struct Problem {
    int64_t vocab_size = 0;
    int64_t num_tokens = 0;
    int64_t k_max = 0;
  };
  class Kernel : public ops::Kernel {
   public:
    /// runs i32 [num_runs, kSampleRunFields]: SampleRun; logits f32 [n, vocab_size] (overwritten); masks u32 [m, ceil(vocab_size / 32)], bit set = allowed; indices as in Rows: the row at index i yields the token at i + 1.
    virtual void enqueue(const TensorView& runs, const TensorView& logits, const TensorView& masks, const SamplerTables& sampler,
                         const SlotTables& slots, const SampleOutput& out, Launch& launch) const = 0;
    /// The most likely id below num_tokens of each row, the lowest on ties: drafts. logits f32 [n, vocab_size] -> ids i32 [n].
    virtual void enqueue_argmax(const TensorView& logits, const TensorView& ids, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
