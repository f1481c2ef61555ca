#include "backends/cuda/sample.h"
#include "backends/cuda/sample_rows.h"

namespace quern::cuda::rows {

namespace {

constexpr unsigned kThreads = 1024;  // of sample_rows.cu
constexpr unsigned kRunsPerBlock = 32;

class SampleKernel final : public SampleKernelBase {
 public:
  struct Functions {
    Function<SampleArgs> draw, advance, candidates;
    Function<ArgmaxArgs> argmax;
  };
  SampleKernel(const ops::Sample::Problem& problem, const Functions& functions, const FromCandidates& from_candidates)
      : SampleKernelBase(problem, from_candidates), functions_(functions) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.rows"; }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return static_cast<size_t>(max_rows) * sizeof(int32_t); }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
               const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    SampleArgs args = sample_args(problem(), runs, logits, masks, sampler, slots, out);
    const int64_t num_rows = logits.empty() ? 0 : logits.shape[0];
    CHECK(launch.workspace.size_bytes() >= workspace_bytes(num_rows));
    args.drawn = plain::address_or_null<int32_t>(launch.workspace);
    Stream& stream = cuda_stream(launch.stream);
    if (num_rows > 0) stream.launch(functions_.draw, shape_for(num_rows), args);
    stream.launch(functions_.advance, {.grid = {plain::blocks_for(args.num_runs, kRunsPerBlock)}, .block = {kRunsPerBlock}}, args);
  }

  void enqueue_candidates(const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates, const ops::TensorView& masks,
                          const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates, ops::Launch& launch) const override {
    if (runs.empty() || logits.empty()) return;
    const SampleArgs args = candidate_args(problem(), runs, logits, first_id, num_candidates, masks, sampler, slots, candidates);
    cuda_stream(launch.stream).launch(functions_.candidates, shape_for(logits.shape[0]), args);
  }

 private:
  /// A block for each of `rows` rows.
  static LaunchShape shape_for(int64_t rows) { return {.grid = {static_cast<unsigned>(rows)}, .block = {kThreads}, .shared_bytes = kSampleRowsSharedBytes}; }
  void launch_argmax(const ArgmaxArgs& args, int64_t rows, Stream& stream) const override { stream.launch(functions_.argmax, shape_for(rows), args); }

  Functions functions_;
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.vocab_size > kMaxSampleRowTokens) return ops::refuse("a vocabulary of {}; up to {} are supported", problem.vocab_size, kMaxSampleRowTokens);
  if (problem.k_max >= kMaxSampleDraws) return ops::refuse("{} drafts in a verify; up to {} are supported", problem.k_max, kMaxSampleDraws - 1);
  return plain::accepts(problem, traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  Device& gpu = cuda_device(device);
  SampleKernel::Functions functions;
  ASSIGN_OR_RETURN(functions.draw, gpu.function<SampleArgs>("sample_rows", "sample_rows_draw", kSampleRowsSharedBytes));
  ASSIGN_OR_RETURN(functions.candidates, gpu.function<SampleArgs>("sample_rows", "sample_rows_candidates", kSampleRowsSharedBytes));
  ASSIGN_OR_RETURN(functions.argmax, gpu.function<ArgmaxArgs>("sample_rows", "sample_rows_argmax", kSampleRowsSharedBytes));
  ASSIGN_OR_RETURN(functions.advance, gpu.function<SampleArgs>("sample_rows", "sample_rows_advance"));
  ASSIGN_OR_RETURN(const FromCandidates from_candidates, FromCandidates::load(device));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, functions, from_candidates));
}

}  // namespace quern::cuda::rows
