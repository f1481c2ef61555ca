#pragma once

#include <bit>

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

// Where ranks have parts of the vocabulary, each reduces its part of a row to some candidates, and these alone travel. Every rank then draws from the candidates of all, which hold every token that could
// be drawn: the same one as from the whole row, bit for bit.

/// How many candidates of each rank the row of such a sequence needs. 1 where it is greedy or every token may be drawn: the candidate is the token that wins among the rank's own. kMaxCandidates where top-k leaves no
/// more. 0: the row has to be seen whole. `synthetic`: it is a verify in which drafts count as accepted, whatever was drawn.
int32_t candidates_needed(const SamplingParams& params, int64_t num_tokens, bool synthetic);

/// A candidate as 64 bits. Larger: more likely, by its value and then by its lower id. 0: none.
inline uint64_t candidate_key(float value, int32_t id) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{ordered} << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
inline int32_t candidate_id(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }
inline float candidate_value(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered);
}
inline constexpr int64_t kKeyWords = sizeof(uint64_t) / sizeof(int32_t);
/// i32 elements of what a rank tells of a row: 1 where all its logits are finite, else 0, and so many keys.
constexpr int64_t candidate_words(int64_t num_candidates) { return (1 + num_candidates) * kKeyWords; }

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

    /// A rank's part of `enqueue`: logits f32 [n, width] (overwritten) of the ids from first_id on -> candidates i32 [n, candidate_words(num_candidates)] of each row that a run samples, most likely first, filled
    /// with 0; of other rows they mean nothing. num_candidates: 1 or kMaxCandidates, at least what each row needs (candidates_needed). Changes nothing of the sequences.
    virtual void enqueue_candidates(const TensorView& runs, const TensorView& logits, int32_t first_id, int32_t num_candidates, const TensorView& masks, const SamplerTables& sampler,
                                    const SlotTables& slots, const TensorView& candidates, Launch& launch) const = 0;
    /// The rest of it: `gathered` i32 [n, num_parts * candidate_words(num_candidates)] are the candidates of all ranks. Writes no log-probabilities.
    virtual void enqueue_drawing(const TensorView& runs, const TensorView& gathered, int32_t num_candidates, const SamplerTables& sampler, const SlotTables& slots, const SampleOutput& out,
                                 Launch& launch) const = 0;
    /// enqueue_argmax in two parts as well: logits f32 [n, width] of the ids from first_id on -> keys i32 [n, kKeyWords];  gathered i32 [n, num_parts * kKeyWords] -> ids i32 [n].
    virtual void enqueue_argmax_candidates(const TensorView& logits, int32_t first_id, const TensorView& keys, Launch& launch) const = 0;
    virtual void enqueue_argmax_of(const TensorView& gathered, const TensorView& ids, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
