#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

constexpr size_t kSampleItems = 256, kSimd16SampleItems = 1024;  // of sample.cl
static_assert(sizeof(ops::SlotSampling) == 56 + 4 * (ops::kMaxStopIds + 2 * ops::kMaxLogitBias) && ops::kMaxStopIds == 64 && ops::kMaxLogitBias == 1024 && ops::kMaxLogprobs == 20);

class SampleKernel final : public ops::Sample::Kernel {
 public:
  SampleKernel(const ops::Sample::Problem& problem, Function sample, Function argmax, size_t items) : problem_(problem), sample_(sample), argmax_(argmax), items_(items) {}

  [[nodiscard]] std::string_view arithmetic() const override { return items_ == kSampleItems ? "opencl.plain" : "opencl.simd16"; }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
               const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    opencl_stream(launch.stream)
        .launch(sample_, {{static_cast<size_t>(runs.shape[0]), 1, 1}, {items_, 1, 1}}, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), static_cast<int32_t>(problem_.k_max), row_stride(slots.drafts), runs, logits, masks, sampler.params, sampler.counts,
                sampler.in_prompt, slots.cursor, slots.boundary, slots.last_token, slots.drafts, out.tokens, out.num_tokens, out.non_finite, out.logprobs, out.logprob_ids,
                out.chosen_rank);
  }

  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const override {
    if (ids.empty()) return;
    opencl_stream(launch.stream)
        .launch(argmax_, {{static_cast<size_t>(ids.shape[0]), 1, 1}, {items_, 1, 1}}, logits, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), ids);
  }

 private:
  ops::Sample::Problem problem_;
  Function sample_, argmax_;
  size_t items_;
};

Result<std::unique_ptr<ops::Sample::Kernel>> make_with(const ops::Sample::Problem& problem, Device& device, std::string_view definitions, size_t items) {
  ASSIGN_OR_RETURN(const Function sample, device.function("sample", "sample", definitions));
  ASSIGN_OR_RETURN(const Function argmax, device.function("sample", "argmax", definitions));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, sample, argmax, items));
}

}  // namespace

ops::Verdict plain::accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.num_tokens < 1 || problem.num_tokens > problem.vocab_size)
    return ops::refuse("{} tokens with text in a vocabulary of {}", problem.num_tokens, problem.vocab_size);
  constexpr int64_t kMostTokens = int64_t{1} << 20;  // limbs of 12 bits in sums of 32
  if (problem.vocab_size > kMostTokens) return ops::refuse("a vocabulary of {}; up to {} are supported", problem.vocab_size, kMostTokens);
  return has_device_code(traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> plain::make(const ops::Sample::Problem& problem, ops::Device& device) { return make_with(problem, opencl_device(device), "", kSampleItems); }

ops::Verdict simd16::accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  const ops::Verdict verdict = accepts_device(traits);
  return verdict.accepted ? plain::accepts(problem, traits) : verdict;
}
Result<std::unique_ptr<ops::Sample::Kernel>> simd16::make(const ops::Sample::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  return make_with(problem, d, portable_definitions(d, DType::kBF16), kSimd16SampleItems);
}

}  // namespace quern::opencl
