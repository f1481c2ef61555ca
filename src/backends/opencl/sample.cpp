#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

constexpr size_t kSampleItems = 256, kSimd16SampleItems = 1024;  // of sample.cl
static_assert(sizeof(ops::SlotSampling) == 56 + 4 * (ops::kMaxStopIds + 2 * ops::kMaxLogitBias) && ops::kMaxStopIds == 64 && ops::kMaxLogitBias == 1024 && ops::kMaxLogprobs == 20 && ops::kMaxCandidates == 64);

class SampleKernel final : public ops::Sample::Kernel {
 public:
  struct Functions {
    Function sample, candidates, drawing, argmax, argmax_candidates, argmax_of;
  };
  SampleKernel(const ops::Sample::Problem& problem, const Functions& functions, size_t items) : problem_(problem), functions_(functions), items_(items) {}

  [[nodiscard]] std::string_view arithmetic() const override { return items_ == kSampleItems ? "opencl.plain" : "opencl.simd16"; }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
               const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    opencl_stream(launch.stream)
        .launch(functions_.sample, {{static_cast<size_t>(runs.shape[0]), 1, 1}, {items_, 1, 1}}, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), static_cast<int32_t>(problem_.k_max), row_stride(slots.drafts), runs, logits, masks, sampler.params, sampler.counts,
                sampler.in_prompt, slots.cursor, slots.boundary, slots.last_token, slots.drafts, out.tokens, out.num_tokens, out.non_finite, out.logprobs, out.logprob_ids,
                out.chosen_rank);
  }

  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const override {
    if (ids.empty()) return;
    opencl_stream(launch.stream)
        .launch(functions_.argmax, {{static_cast<size_t>(ids.shape[0]), 1, 1}, {items_, 1, 1}}, logits, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), ids);
  }

  void enqueue_candidates(const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates, const ops::TensorView& masks, const ops::SamplerTables& sampler,
                          const ops::SlotTables& slots, const ops::TensorView& candidates, ops::Launch& launch) const override {
    if (runs.empty() || logits.empty()) return;
    opencl_stream(launch.stream)
        .launch(functions_.candidates, {{static_cast<size_t>(runs.shape[0]), static_cast<size_t>(problem_.k_max + 1), 1}, {items_, 1, 1}}, static_cast<int32_t>(problem_.vocab_size),
                static_cast<int32_t>(problem_.num_tokens), first_id, static_cast<int32_t>(logits.shape[1]), row_stride(slots.drafts), num_candidates, runs, logits, masks, sampler.params,
                sampler.counts, sampler.in_prompt, slots.cursor, slots.drafts, candidates);
  }

  void enqueue_drawing(const ops::TensorView& runs, const ops::TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    const int64_t num_parts = gathered.empty() ? 0 : gathered.shape[1] / ops::candidate_words(num_candidates);
    opencl_stream(launch.stream)
        .launch(functions_.drawing, {{static_cast<size_t>(runs.shape[0]), 1, 1}, {items_, 1, 1}}, static_cast<int32_t>(problem_.vocab_size), static_cast<int32_t>(problem_.num_tokens),
                static_cast<int32_t>(problem_.k_max), row_stride(slots.drafts), num_candidates, static_cast<int32_t>(num_parts), runs, gathered, sampler.params, sampler.counts, slots.cursor,
                slots.boundary, slots.last_token, slots.drafts, out.tokens, out.num_tokens, out.non_finite);
  }

  void enqueue_argmax_candidates(const ops::TensorView& logits, int32_t first_id, const ops::TensorView& keys, ops::Launch& launch) const override {
    if (keys.empty()) return;
    opencl_stream(launch.stream)
        .launch(functions_.argmax_candidates, {{static_cast<size_t>(keys.shape[0]), 1, 1}, {items_, 1, 1}}, logits, static_cast<int32_t>(logits.shape[1]),
                static_cast<int32_t>(problem_.num_tokens), first_id, keys);
  }

  void enqueue_argmax_of(const ops::TensorView& gathered, const ops::TensorView& ids, ops::Launch& launch) const override {
    if (ids.empty()) return;
    constexpr int64_t kRowItems = 64;
    opencl_stream(launch.stream)
        .launch(functions_.argmax_of, {{static_cast<size_t>(ceil_div(ids.shape[0], kRowItems)), 1, 1}, {kRowItems, 1, 1}}, gathered, static_cast<int32_t>(ids.shape[0]),
                static_cast<int32_t>(gathered.shape[1] / ops::kKeyWords), ids);
  }

 private:
  ops::Sample::Problem problem_;
  Functions functions_;
  size_t items_;
};

Result<std::unique_ptr<ops::Sample::Kernel>> make_with(const ops::Sample::Problem& problem, Device& device, std::string_view definitions, size_t items) {
  SampleKernel::Functions functions;
  ASSIGN_OR_RETURN(functions.sample, device.function("sample", "sample", definitions));
  ASSIGN_OR_RETURN(functions.candidates, device.function("sample", "sample_candidates", definitions));
  ASSIGN_OR_RETURN(functions.drawing, device.function("sample", "sample_drawing", definitions));
  ASSIGN_OR_RETURN(functions.argmax, device.function("sample", "argmax", definitions));
  ASSIGN_OR_RETURN(functions.argmax_candidates, device.function("sample", "argmax_candidates", definitions));
  ASSIGN_OR_RETURN(functions.argmax_of, device.function("sample", "argmax_of", definitions));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, functions, items));
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
