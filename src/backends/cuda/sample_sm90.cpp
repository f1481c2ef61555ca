#include <algorithm>

#include "backends/cuda/sample.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

constexpr unsigned kThreads = 1024;  // of sample_sm90.cu
constexpr int64_t kPartBytes = int64_t{kSampleCluster} * kSamplePartWords * static_cast<int64_t>(sizeof(uint64_t));  // of a row

int64_t slice_of(int64_t vocab_size) { return (plain::blocks_for(vocab_size, kSampleCluster) + kSampleUnit - 1) / kSampleUnit * kSampleUnit; }

class SampleKernel final : public SampleKernelBase {
 public:
  struct Functions {
    Function<SampleArgs> draw, advance, candidates;
    Function<ArgmaxArgs> argmax;
  };
  SampleKernel(const ops::Sample::Problem& problem, const Functions& functions, const FromCandidates& from_candidates, const Device& device)
      : SampleKernelBase(problem, from_candidates), functions_(functions), num_clusters_(std::max(device.clusters_at_a_time(functions.draw, shape_for(1, problem.vocab_size)), 1)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.sm90"; }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return static_cast<size_t>(max_rows) * (kPartBytes + sizeof(int32_t)); }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler,
               const ops::SlotTables& slots, const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    SampleArgs args = sample_args(problem(), runs, logits, masks, sampler, slots, out);
    const int64_t num_rows = logits.empty() ? 0 : logits.shape[0];
    CHECK(launch.workspace.size_bytes() >= workspace_bytes(num_rows));
    args.num_rows = static_cast<int32_t>(num_rows);
    if (num_rows > 0) {
      args.parts = launch.workspace.data<uint64_t>();
      args.drawn = reinterpret_cast<int32_t*>(args.parts + num_rows * kPartBytes / static_cast<int64_t>(sizeof(uint64_t)));
    }
    Stream& stream = cuda_stream(launch.stream);
    // One more than there is room for would begin when the first is done.
    const int64_t clusters = std::max(std::min(num_rows, num_clusters_), (num_rows + kMaxSampleRows - 1) / kMaxSampleRows);
    stream.launch(functions_.draw, shape_for(clusters, problem().vocab_size), args);
    const auto finishing = static_cast<unsigned>(std::min<int64_t>(problem().k_max + 1, kMaxSampleFinishing));
    stream.launch(functions_.advance, {.grid = {static_cast<unsigned>(args.num_runs)}, .block = {finishing * kSampleFinishers}, .programmatic = true}, args);
  }

  void enqueue_candidates(const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates, const ops::TensorView& masks,
                          const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates, ops::Launch& launch) const override {
    if (runs.empty() || logits.empty()) return;
    const SampleArgs args = candidate_args(problem(), runs, logits, first_id, num_candidates, masks, sampler, slots, candidates);
    cuda_stream(launch.stream).launch(functions_.candidates, shape_for(logits.shape[0], logits.shape[1]), args);
  }

 private:
  /// Clusters for rows of `width` logits.
  static LaunchShape shape_for(int64_t clusters, int64_t width) {
    return {.grid = {kSampleCluster, static_cast<unsigned>(clusters)},
            .block = {kThreads},
            .shared_bytes = kSampleSharedBytes + static_cast<unsigned>(slice_of(width) * static_cast<int64_t>(sizeof(float))),
            .cluster = {kSampleCluster},
            .programmatic = true};
  }
  void launch_argmax(const ArgmaxArgs& args, int64_t rows, Stream& stream) const override {
    stream.launch(functions_.argmax, {.grid = {kSampleCluster, static_cast<unsigned>(rows)}, .block = {kThreads}, .cluster = {kSampleCluster}, .programmatic = true}, args);
  }

  Functions functions_;
  int64_t num_clusters_;  // that the device holds at a time
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  if (slice_of(problem.vocab_size) > kMaxSampleSlice)
    return ops::refuse("a vocabulary of {}; up to {} fit the shared memory of {} blocks", problem.vocab_size,
                       kSampleCluster * kMaxSampleSlice, kSampleCluster);
  if (problem.k_max >= kMaxSampleDraws)
    return ops::refuse("{} drafts in a verify; up to {} are supported", problem.k_max, kMaxSampleDraws - 1);
  return plain::accepts(problem, traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  Device& gpu = cuda_device(device);
  constexpr int kMostSharedBytes =
      kSampleSharedBytes + kMaxSampleSlice * static_cast<int>(sizeof(float));  // a function is made for samplers of all sizes
  SampleKernel::Functions functions;
  ASSIGN_OR_RETURN(functions.draw, gpu.function<SampleArgs>("sample_sm90", "sample_draw", kMostSharedBytes));
  ASSIGN_OR_RETURN(functions.advance, gpu.function<SampleArgs>("sample_sm90", "sample_advance"));
  ASSIGN_OR_RETURN(functions.argmax, gpu.function<ArgmaxArgs>("sample_sm90", "sample_argmax"));
  ASSIGN_OR_RETURN(functions.candidates, gpu.function<SampleArgs>("sample_sm90", "sample_candidates_sm90", kMostSharedBytes));
  ASSIGN_OR_RETURN(const FromCandidates from_candidates, FromCandidates::load(device));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, functions, from_candidates, gpu));
}

}  // namespace quern::cuda::sm90
