#include <algorithm>
#include <limits>
#include <set>

#include "backends/cuda/device_code.h"
#include "backends/cuda/gdn_prompt.h"
#include "backends/cuda/mma.h"

namespace quern::cuda::mma {

namespace {

constexpr int64_t kDim = 128;                    // d_k and d_v
constexpr int64_t kBlocks = 2;                   // of gdn_decode*.cu on a multiprocessor
constexpr unsigned kThreads = 256;               // of gdn_decode*.cu
constexpr int64_t kMaxDealtRuns = kThreads;      // a thread looks at each

class GdnMixKernel final : public ops::GdnMix::Kernel {
 public:
  struct Functions {
    Function<GdnArgs> decode_1, decode_4, alone_1, alone_4;  // rows at a time; alone: a block a multiprocessor
    bool few_apart = false;                                  // heads are, while each has a block of its own; else while key heads are few
    int64_t longest_alone;                                   // rows of a run that alone_4 takes at most
    int shared_bytes;
    bool overlap;  // programmatic dependent launch
  };
  GdnMixKernel(const ops::GdnMix::Problem& problem, GdnLauncher launcher, std::optional<GdnPromptLauncher> prompt,
               const Functions& functions, std::unique_ptr<ops::Buffer> deal, std::unique_ptr<ops::Buffer> key_readers, const Device& gpu)
      : problem_(problem), launcher_(std::move(launcher)), prompt_(prompt), functions_(functions), deal_(std::move(deal)), key_readers_(std::move(key_readers)), num_sms_(gpu.num_sms()), l2_bytes_(gpu.l2_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return !prompt_ ? "cuda.mma.bf16" : prompt_->hopper() ? "cuda.sm90.chunked.bf16" : "cuda.mma.chunked.bf16"; }
  [[nodiscard]] size_t packed_bytes() const override { return launcher_.packed_bytes(); }
  [[nodiscard]] ops::GdnStateLayout state_layout() const override { return launcher_.state_layout(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return prompt_ ? prompt_->workspace_bytes(max_rows) : 0; }
  void pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    launcher_.pack(weights, packed, cuda_stream(stream));
  }
  void enqueue(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state,
               const ops::Activation& out, ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    GdnArgs args = launcher_.arguments(rows, in, packed, state, out);
    const Kinds kinds = kinds_of(rows);
    if (kinds.num_decode_runs > 0) {
      // Few states leave the memory idle while they are computed with. (gdn_few does not ask: what it waits for would come later.)
      const size_t element_bytes = launcher_.state_layout() == ops::GdnStateLayout::kHalves ? sizeof(uint16_t) : sizeof(float);
      const int64_t state_bytes = kinds.num_decode_runs * problem_.num_v_heads * kDim * kDim * static_cast<int64_t>(element_bytes);
      if (state_bytes <= l2_bytes_ / 4) args.prefetch = plain::prefetch_of(launch, l2_bytes_ / 2);
      launch_decode(stream, kinds.longest_decode_run, args);
    }
    if (kinds.prompt) {
      args.kinds = kGdnPrompt;
      args.phases = 0;
      args.first_run = kinds.first_prompt_run;
      args.end_run = kinds.end_prompt_runs;
      if (prompt_)
        prompt_->launch(stream, rows, args, launcher_, launch.workspace);
      else
        launcher_.launch(stream, args);
    }
  }

 private:
  /// A block a head while key heads would leave multiprocessors idle, else blocks that take the heads of a key head, one after the other.
  void launch_decode(Stream& stream, int64_t longest_run, GdnArgs& args) const {
    const int64_t runs = args.step.num_runs, blocks = kBlocks * num_sms_;
    const bool apart = functions_.few_apart ? runs * problem_.num_v_heads <= blocks : runs * problem_.num_k_heads < num_sms_;
    const bool alone = apart && runs * problem_.num_v_heads <= num_sms_ && longest_run <= functions_.longest_alone;
    const Function<GdnArgs>& function = longest_run == 1 ? (alone ? functions_.alone_1 : functions_.decode_1) : (alone ? functions_.alone_4 : functions_.decode_4);
    const int64_t jobs = runs * (apart ? problem_.num_v_heads : problem_.num_k_heads);
    const bool dealt = deal_ != nullptr && !apart && jobs > blocks && runs <= kMaxDealtRuns;
    args.phases = apart ? kGdnHeadsApart : dealt ? kGdnDealt : 0;
    args.key_readers = key_readers_ != nullptr ? reinterpret_cast<uint32_t*>(key_readers_->address()) : nullptr;
    args.dealt = dealt ? reinterpret_cast<int32_t*>(deal_->address()) : nullptr;
    stream.launch(function,
                  {.grid = {static_cast<unsigned>(std::min(jobs, blocks))},
                   .block = {kThreads},
                   .shared_bytes = static_cast<unsigned>(functions_.shared_bytes),
                   .programmatic = functions_.overlap},
                  args);
  }

  ops::GdnMix::Problem problem_;
  GdnLauncher launcher_;
  std::optional<GdnPromptLauncher> prompt_;  // none: the plain kernels take prompt rows
  Functions functions_;
  std::unique_ptr<ops::Buffer> deal_;  // GdnArgs::dealt; none where a key head has no value heads, since what is dealt has rows to compute
  std::unique_ptr<ops::Buffer> key_readers_;  // GdnArgs::key_readers
  int64_t num_sms_, l2_bytes_;
};

Result<std::unique_ptr<ops::GdnMix::Kernel>> make(const ops::GdnMix::Problem& problem, ops::Device& device, bool chunked) {
  Device& gpu = cuda_device(device);
  ASSIGN_OR_RETURN(GdnLauncher launcher, GdnLauncher::create(problem, gpu, gdn_state_layout(problem.ring)));
  std::optional<GdnPromptLauncher> prompt;
  if (chunked) {
    ASSIGN_OR_RETURN(prompt, GdnPromptLauncher::create(problem, gpu));
  }
  GdnMixKernel::Functions functions;
  functions.longest_alone = std::numeric_limits<int64_t>::max();
  std::unique_ptr<ops::Buffer> key_readers;
  std::string_view image = "gdn_decode";
  const auto find = [&](Function<GdnArgs>& function, const char* name) -> Result<void> {
    ASSIGN_OR_RETURN(function, gpu.function<GdnArgs>(image, name, functions.shared_bytes));
    return {};
  };
  if (problem.ring == DType::kBF16) {
    image = "gdn_decode_bf16";
    const bool small = gpu.max_shared_bytes() < kGdnDecodeSharedBytesBF16;  // sm_86, sm_89 and sm_120
    functions.shared_bytes = small ? kGdnDecodeSharedBytesBF16Small : kGdnDecodeSharedBytesBF16;
    functions.few_apart = true;
    RETURN_IF_ERROR(find(functions.decode_1, small ? "gdn_decode_1_bf16_small" : "gdn_decode_1_bf16"));
    RETURN_IF_ERROR(find(functions.decode_4, small ? "gdn_decode_4_bf16_small" : "gdn_decode_4_bf16"));
    if (small) {
      functions.alone_1 = functions.decode_1;
      functions.alone_4 = functions.decode_4;
    } else {
      image = "gdn_few_bf16";
      RETURN_IF_ERROR(find(functions.alone_1, "gdn_few_1_bf16"));
      RETURN_IF_ERROR(find(functions.alone_4, "gdn_few_4_bf16"));
      functions.longest_alone = std::min<int64_t>(4, problem.k_max + 1);
      const int64_t runs = gpu.num_sms() / std::max<int64_t>(problem.num_v_heads, 1);
      ASSIGN_OR_RETURN(key_readers, gpu.upload(std::vector<int32_t>(static_cast<size_t>(std::max<int64_t>(runs * problem.num_k_heads, 1))), "the GDN blocks that have read keys"));
    }
  } else if (gpu.max_shared_bytes() >= kGdnDecodeSharedBytesF32) {
    functions.shared_bytes = kGdnDecodeSharedBytesF32;
    RETURN_IF_ERROR(find(functions.decode_1, "gdn_decode_1_f32"));
    RETURN_IF_ERROR(find(functions.decode_4, "gdn_decode_4_f32"));
    RETURN_IF_ERROR(find(functions.alone_1, "gdn_decode_1_f32_alone"));
    RETURN_IF_ERROR(find(functions.alone_4, "gdn_decode_4_f32_alone"));
  } else {  // sm_86, sm_89 and sm_120
    functions.shared_bytes = kGdnDecodeSharedBytesUnstaged;
    RETURN_IF_ERROR(find(functions.decode_1, "gdn_decode_1_f32_unstaged"));
    RETURN_IF_ERROR(find(functions.decode_4, "gdn_decode_4_f32_unstaged"));
    functions.alone_1 = functions.decode_1;
    functions.alone_4 = functions.decode_4;
  }
  functions.overlap = runs_code_for("90a", gpu.traits().architecture);
  std::unique_ptr<ops::Buffer> deal;
  const bool deals = functions.shared_bytes != kGdnDecodeSharedBytesUnstaged;
  if (deals && std::ssize(std::set(problem.k_head.begin(), problem.k_head.end())) == problem.num_k_heads) {
    ASSIGN_OR_RETURN(deal, gpu.upload(std::vector<int32_t>{0, 0}, "the GDN jobs that were dealt"));
  }
  return std::unique_ptr<ops::GdnMix::Kernel>(std::make_unique<GdnMixKernel>(problem, std::move(launcher), prompt, functions, std::move(deal), std::move(key_readers), gpu));
}

}  // namespace

ops::Verdict accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.activation != DType::kBF16) return ops::refuse("activations are {}, not bf16", dtype_name(problem.activation));
  if (problem.d_k != kDim || problem.d_v != kDim) return ops::refuse("heads of {} x {}, not {} x {}", problem.d_k, problem.d_v, kDim, kDim);
  return plain::accepts(problem, traits);
}

Result<std::unique_ptr<ops::GdnMix::Kernel>> make(const ops::GdnMix::Problem& problem, ops::Device& device) { return make(problem, device, false); }
Result<std::unique_ptr<ops::GdnMix::Kernel>> make_chunked(const ops::GdnMix::Problem& problem, ops::Device& device) { return make(problem, device, true); }

}  // namespace quern::cuda::mma
