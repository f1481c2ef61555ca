#include "backends/cuda/sample.h"

namespace quern::cuda {

SampleArgs sample_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits,
                       const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out) {
  static_assert(sizeof(SampleRecord) == sizeof(ops::SampleRun));
  SampleArgs args{};
  args.vocab_size = static_cast<int32_t>(problem.vocab_size);
  args.num_tokens = static_cast<int32_t>(problem.num_tokens);
  args.k_max = static_cast<int32_t>(problem.k_max);
  args.drafts_stride = slots.drafts.shape.rank() == 2 ? static_cast<int32_t>(slots.drafts.shape[1]) : 0;
  args.runs = runs.data<const SampleRecord>();
  args.logits = plain::address_or_null<float>(logits);
  args.masks = plain::address_or_null<const uint32_t>(masks);
  args.params = sampler.params.data<ops::SlotSampling>();
  args.counts = sampler.counts.data<int32_t>();
  args.in_prompt = sampler.in_prompt.data<const uint8_t>();
  args.cursor = slots.cursor.data<int32_t>();
  args.boundary = slots.boundary.data<int32_t>();
  args.last_token = slots.last_token.data<int32_t>();
  args.drafts = plain::address_or_null<const int32_t>(slots.drafts);
  args.tokens = out.tokens.data<int32_t>();
  args.sampled = out.num_tokens.data<int32_t>();
  args.non_finite = out.non_finite.data<int32_t>();
  args.logprobs = out.logprobs.data<float>();
  args.logprob_ids = out.logprob_ids.data<int32_t>();
  args.chosen_rank = out.chosen_rank.data<int32_t>();
  args.num_runs = static_cast<int32_t>(runs.shape[0]);
  return args;
}

namespace plain {

namespace {

constexpr unsigned kThreads = 1024;  // of sample.cu

class SampleKernel final : public ops::Sample::Kernel {
 public:
  SampleKernel(const ops::Sample::Problem& problem, Function<SampleArgs> sample, Function<ArgmaxArgs> argmax)
      : problem_(problem), sample_(sample), argmax_(argmax) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.plain"; }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler,
               const ops::SlotTables& slots, const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    const SampleArgs args = sample_args(problem_, runs, logits, masks, sampler, slots, out);
    cuda_stream(launch.stream).launch(sample_, {.grid = {static_cast<unsigned>(runs.shape[0])}, .block = {kThreads}}, args);
  }

  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const override {
    if (ids.empty()) return;
    const ArgmaxArgs args{logits.data<float>(), static_cast<int32_t>(problem_.vocab_size), static_cast<int32_t>(problem_.num_tokens), ids.data<int32_t>()};
    cuda_stream(launch.stream).launch(argmax_, {.grid = {static_cast<unsigned>(ids.shape[0])}, .block = {kThreads}}, args);
  }

 private:
  ops::Sample::Problem problem_;
  Function<SampleArgs> sample_;
  Function<ArgmaxArgs> argmax_;
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.num_tokens < 1 || problem.num_tokens > problem.vocab_size)
    return ops::refuse("{} tokens with text in a vocabulary of {}", problem.num_tokens, problem.vocab_size);
  return has_device_code(traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const auto sample, cuda_device(device).function<SampleArgs>("sample", "sample"));
  ASSIGN_OR_RETURN(const auto argmax, cuda_device(device).function<ArgmaxArgs>("sample", "argmax"));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, sample, argmax));
}

}  // namespace plain

}  // namespace quern::cuda
