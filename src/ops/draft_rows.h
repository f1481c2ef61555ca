#pragma once

#include "ops/kernel.h"
#include "ops/sample.h"

namespace quern::ops {

/// What is drafted for one run of the step.
struct DraftRun {
  int32_t slot = -1;             // -1: padding
  int32_t fill = 0;              // 1: the MTP layer's KV is kept up to date for the run's committed rows
  int32_t following_token = -1;  // the token after the last row where nothing is sampled, -1: not known yet
  int32_t depth = 0;             // drafts to propose, 0 .. k_max
};
inline constexpr int64_t kDraftRunFields = sizeof(DraftRun) / sizeof(int32_t);

/// Prepares the rows of the MTP layer on the device, where alone it is known how many drafts were accepted (model-spec.md 1.8, architecture.md section 4).
/// Index j of the layer pairs the embedding of token x_j with the final hidden of index j - 1. So the first pass has the step's own rows and hidden states, each with the
/// token that follows; rows whose following token is unknown, or that were not committed, are padding. Every further pass has one row per run, which continues the draft.
/// `last_rows` i32 [num_runs] names the row of each run from whose logits the next draft is taken; -1: of a run that drafts no more.
struct DraftRows {
  static constexpr std::string_view kName = "draft_rows";
  struct Problem {
    int64_t hidden = 0;
    int64_t k_max = 0;
    DType activation = DType::kBF16;
  };
  class Kernel : public ops::Kernel {
   public:
    /// After `sample`: runs i32 [num_runs, kDraftRunFields], parallel to step.runs; `sampled` of the same runs. Fills rows.tokens, rows.indices and rows.positions
    /// (tensors of their own; the rest of `rows` is the step's) and last_rows.
    virtual void enqueue_first(const TensorView& runs, const Rows& step, const SampleOutput& sampled, const Rows& rows, const TensorView& last_rows,
                               Launch& launch) const = 0;
    /// After pass number `pass` (0: the first): `ids` i32 [num_runs] are the drafts taken from last_rows. They go to slots.drafts[slot, pass] and drafts [num_runs, k_max]
    /// where depth > pass; `rows` [num_runs] and hidden_out [num_runs, hidden] become the next pass of the runs with depth > pass + 1, and last_rows follows.
    virtual void enqueue_next(const TensorView& runs, int32_t pass, const TensorView& ids, const Rows& before, const TensorView& hidden, const Rows& rows,
                              const TensorView& hidden_out, const TensorView& last_rows, const TensorView& drafts, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
