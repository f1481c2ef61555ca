#pragma once

#include "backends/cuda/plain.h"
#include "backends/cuda/sample_args.h"

namespace quern::cuda {

/// What the sampler's kernels are told; `drawn` is the caller's.
SampleArgs sample_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits,
                       const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out);
SampleArgs candidate_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates,
                          const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates);

/// The kernels that draw from the candidates of all ranks, the same for all samplers.
struct FromCandidates {
  static Result<FromCandidates> load(ops::Device& device);

  Function<SampleArgs> drawing;
  Function<ArgmaxOfArgs> argmax_of;
};

/// What all samplers do alike: whatever looks for a maximum, and draws from candidates.
class SampleKernelBase : public ops::Sample::Kernel {
 public:
  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const final;
  void enqueue_argmax_candidates(const ops::TensorView& logits, int32_t first_id, const ops::TensorView& keys, ops::Launch& launch) const final;
  void enqueue_drawing(const ops::TensorView& runs, const ops::TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out, ops::Launch& launch) const final;
  void enqueue_argmax_of(const ops::TensorView& gathered, const ops::TensorView& ids, ops::Launch& launch) const final;

 protected:
  SampleKernelBase(const ops::Sample::Problem& problem, const FromCandidates& from_candidates) : problem_(problem), from_candidates_(from_candidates) {}
  [[nodiscard]] const ops::Sample::Problem& problem() const { return problem_; }

 private:
  /// The largest of each of `rows` rows.
  virtual void launch_argmax(const ArgmaxArgs& args, int64_t rows, Stream& stream) const = 0;

  ops::Sample::Problem problem_;
  FromCandidates from_candidates_;
};

}  // namespace quern::cuda
