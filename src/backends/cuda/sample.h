#pragma once

#include "backends/cuda/plain.h"
#include "backends/cuda/sample_args.h"

namespace quern::cuda {

/// What the sampler's kernels are told; `drawn` is the caller's.
SampleArgs sample_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits,
                       const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out);
ArgmaxArgs argmax_args(const ops::Sample::Problem& problem, const ops::TensorView& logits, int32_t first_id);

/// What a sampler does with the candidates of all ranks, and what it is told of its own part. Both samplers draw from candidates with these kernels.
class FromCandidates {
 public:
  static Result<FromCandidates> make(ops::Device& device);
  void enqueue_drawing(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler,
                       const ops::SlotTables& slots, const ops::SampleOutput& out, ops::Launch& launch) const;
  void enqueue_argmax_of(const ops::TensorView& gathered, const ops::TensorView& ids, ops::Launch& launch) const;

 private:
  Function<SampleArgs> drawing_;
  Function<ArgmaxOfArgs> argmax_of_;
};
SampleArgs candidate_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates,
                          const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates);

}  // namespace quern::cuda
