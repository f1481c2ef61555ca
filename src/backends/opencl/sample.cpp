#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

constexpr size_t kSampleItems = 256;  // of sample.cl
static_assert(sizeof(ops::SlotSampling) == 56 + 4 * (ops::kMaxStopIds + 2 * ops::kMaxLogitBias) && ops::kMaxStopIds == 64 && ops::kMaxLogitBias == 1024 && ops::kMaxLogprobs == 20);

class SampleKernel final : public ops::Sample::Kernel {
 public:
  SampleKernel(const ops::Sample::Problem& problem, Function sample, Function argmax) : problem_(problem), sample_(sample), argmax_(argmax) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "opencl.plain"; }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
               const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    opencl_stream(launch.stream)
        .launch(sample_, {{static_cast<size_t>(runs.shape[0]), 1, 1}, {kSampleItems, 1, 1}}, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), static_cast<int32_t>(problem_.k_max), row_stride(slots.drafts), runs, logits, masks, sampler.params, sampler.counts,
                sampler.in_prompt, slots.cursor, slots.boundary, slots.last_token, slots.drafts, out.tokens, out.num_tokens, out.non_finite, out.logprobs, out.logprob_ids,
                out.chosen_rank);
  }

  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const override {
    if (ids.empty()) return;
    opencl_stream(launch.stream)
        .launch(argmax_, {{static_cast<size_t>(ids.shape[0]), 1, 1}, {kSampleItems, 1, 1}}, logits, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), ids);
  }

 private:
  ops::Sample::Problem problem_;
  Function sample_, argmax_;
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.num_tokens < 1 || problem.num_tokens > problem.vocab_size)
    return ops::refuse("{} tokens with text in a vocabulary of {}", problem.num_tokens, problem.vocab_size);
  constexpr int64_t kMostTokens = int64_t{1} << 20;  // limbs of 12 bits in sums of 32
  if (problem.vocab_size > kMostTokens) return ops::refuse("a vocabulary of {}; up to {} are supported", problem.vocab_size, kMostTokens);
  return has_device_code(traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const Function sample, opencl_device(device).function("sample", "sample"));
  ASSIGN_OR_RETURN(const Function argmax, opencl_device(device).function("sample", "argmax"));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, sample, argmax));
}

}  // namespace quern::opencl::plain
