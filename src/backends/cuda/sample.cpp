#include "backends/cuda/sample.h"

#include <algorithm>

namespace quern::cuda {

namespace {

constexpr unsigned kThreads = 1024;  // of sample.cu

/// What every kernel is told.
SampleArgs common_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::SamplerTables& sampler, const ops::SlotTables& slots) {
  static_assert(sizeof(SampleRecord) == sizeof(ops::SampleRun));
  SampleArgs args{};
  args.vocab_size = static_cast<int32_t>(problem.vocab_size);
  args.num_tokens = static_cast<int32_t>(problem.num_tokens);
  args.k_max = static_cast<int32_t>(problem.k_max);
  args.drafts_stride = slots.drafts.shape.rank() == 2 ? static_cast<int32_t>(slots.drafts.shape[1]) : 0;
  args.end_id = args.vocab_size;
  args.runs = runs.data<const SampleRecord>();
  args.params = sampler.params.data<ops::SlotSampling>();
  args.counts = sampler.counts.data<int32_t>();
  args.in_prompt = sampler.in_prompt.data<const uint8_t>();
  args.cursor = slots.cursor.data<int32_t>();
  args.boundary = slots.boundary.data<int32_t>();
  args.last_token = slots.last_token.data<int32_t>();
  args.drafts = plain::address_or_null<const int32_t>(slots.drafts);
  args.num_runs = static_cast<int32_t>(runs.shape[0]);
  return args;
}
void add_output(const ops::SampleOutput& out, SampleArgs& args) {
  args.tokens = out.tokens.data<int32_t>();
  args.sampled = out.num_tokens.data<int32_t>();
  args.non_finite = out.non_finite.data<int32_t>();
  args.logprobs = out.logprobs.data<float>();
  args.logprob_ids = out.logprob_ids.data<int32_t>();
  args.chosen_rank = out.chosen_rank.data<int32_t>();
}

ArgmaxArgs argmax_args(const ops::Sample::Problem& problem, const ops::TensorView& logits, int32_t first_id) {
  const int64_t width = logits.shape[1];
  return {.logits = logits.data<float>(),
          .width = static_cast<int32_t>(width),
          .num_tokens = static_cast<int32_t>(std::clamp<int64_t>(problem.num_tokens - first_id, 0, width)),
          .first_id = first_id,
          .ids = nullptr,
          .keys = nullptr};
}

}  // namespace

SampleArgs sample_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits,
                       const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out) {
  SampleArgs args = common_args(problem, runs, sampler, slots);
  args.logits = plain::address_or_null<float>(logits);
  args.masks = plain::address_or_null<const uint32_t>(masks);
  add_output(out, args);
  return args;
}

SampleArgs candidate_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates,
                          const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates) {
  SampleArgs args = common_args(problem, runs, sampler, slots);
  args.first_id = first_id;
  args.end_id = first_id + static_cast<int32_t>(logits.shape[1]);
  args.logits = logits.data<float>();
  args.masks = plain::address_or_null<const uint32_t>(masks);
  args.num_candidates = num_candidates;
  args.candidates = candidates.data<uint64_t>();
  return args;
}

Result<FromCandidates> FromCandidates::load(ops::Device& device) {
  FromCandidates loaded;
  ASSIGN_OR_RETURN(loaded.drawing, cuda_device(device).function<SampleArgs>("sample", "sample_drawing"));
  ASSIGN_OR_RETURN(loaded.argmax_of, cuda_device(device).function<ArgmaxOfArgs>("sample", "argmax_of"));
  return loaded;
}

void SampleKernelBase::enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch& launch) const {
  if (ids.empty()) return;
  ArgmaxArgs args = argmax_args(problem_, logits, 0);
  args.ids = ids.data<int32_t>();
  launch_argmax(args, ids.shape[0], cuda_stream(launch.stream));
}

void SampleKernelBase::enqueue_argmax_candidates(const ops::TensorView& logits, int32_t first_id, const ops::TensorView& keys, ops::Launch& launch) const {
  if (keys.empty()) return;
  ArgmaxArgs args = argmax_args(problem_, logits, first_id);
  args.keys = keys.data<uint64_t>();
  launch_argmax(args, keys.shape[0], cuda_stream(launch.stream));
}

void SampleKernelBase::enqueue_drawing(const ops::TensorView& runs, const ops::TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler,
                                       const ops::SlotTables& slots, const ops::SampleOutput& out, ops::Launch& launch) const {
  if (runs.empty()) return;
  SampleArgs args = common_args(problem_, runs, sampler, slots);
  args.num_candidates = num_candidates;
  if (!gathered.empty()) {
    args.num_parts = static_cast<int32_t>(gathered.shape[1] / ops::candidate_words(num_candidates));
    args.gathered = gathered.data<const uint64_t>();
  }
  add_output(out, args);
  cuda_stream(launch.stream).launch(from_candidates_.drawing, {.grid = {static_cast<unsigned>(runs.shape[0])}, .block = {kThreads}}, args);
}

void SampleKernelBase::enqueue_argmax_of(const ops::TensorView& gathered, const ops::TensorView& ids, ops::Launch& launch) const {
  if (ids.empty()) return;
  constexpr unsigned kRowThreads = 64;
  const ArgmaxOfArgs args{gathered.data<const uint64_t>(), static_cast<int32_t>(ids.shape[0]), static_cast<int32_t>(gathered.shape[1] / ops::kKeyWords), ids.data<int32_t>()};
  cuda_stream(launch.stream).launch(from_candidates_.argmax_of, {.grid = {plain::blocks_for(ids.shape[0], kRowThreads)}, .block = {kRowThreads}}, args);
}

namespace plain {

namespace {

class SampleKernel final : public SampleKernelBase {
 public:
  struct Functions {
    Function<SampleArgs> sample, candidates;
    Function<ArgmaxArgs> argmax;
  };
  SampleKernel(const ops::Sample::Problem& problem, const Functions& functions, const FromCandidates& from_candidates)
      : SampleKernelBase(problem, from_candidates), functions_(functions) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.plain"; }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks, const ops::SamplerTables& sampler,
               const ops::SlotTables& slots, const ops::SampleOutput& out, ops::Launch& launch) const override {
    if (runs.empty()) return;
    const SampleArgs args = sample_args(problem(), runs, logits, masks, sampler, slots, out);
    cuda_stream(launch.stream).launch(functions_.sample, {.grid = {static_cast<unsigned>(runs.shape[0])}, .block = {kThreads}}, args);
  }

  void enqueue_candidates(const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates, const ops::TensorView& masks,
                          const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::TensorView& candidates, ops::Launch& launch) const override {
    if (runs.empty() || logits.empty()) return;
    const SampleArgs args = candidate_args(problem(), runs, logits, first_id, num_candidates, masks, sampler, slots, candidates);
    const auto draws = static_cast<unsigned>(problem().k_max + 1);
    cuda_stream(launch.stream).launch(functions_.candidates, {.grid = {static_cast<unsigned>(runs.shape[0]), draws}, .block = {kThreads}}, args);
  }

 private:
  void launch_argmax(const ArgmaxArgs& args, int64_t rows, Stream& stream) const override {
    stream.launch(functions_.argmax, {.grid = {static_cast<unsigned>(rows)}, .block = {kThreads}}, args);
  }

  Functions functions_;
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.num_tokens < 1 || problem.num_tokens > problem.vocab_size)
    return ops::refuse("{} tokens with text in a vocabulary of {}", problem.num_tokens, problem.vocab_size);
  return has_device_code(traits);
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  SampleKernel::Functions functions;
  ASSIGN_OR_RETURN(functions.sample, cuda_device(device).function<SampleArgs>("sample", "sample"));
  ASSIGN_OR_RETURN(functions.candidates, cuda_device(device).function<SampleArgs>("sample", "sample_candidates"));
  ASSIGN_OR_RETURN(functions.argmax, cuda_device(device).function<ArgmaxArgs>("sample", "argmax"));
  ASSIGN_OR_RETURN(const FromCandidates from_candidates, FromCandidates::load(device));
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, functions, from_candidates));
}

}  // namespace plain

}  // namespace quern::cuda
