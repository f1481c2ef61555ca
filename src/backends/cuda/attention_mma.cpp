#include "backends/cuda/attention.h"
#include "backends/cuda/device_code.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda {

using mma::Kinds, mma::kinds_of;

namespace {

constexpr unsigned kThreads = 256;            // of attention_mma.cu, and of attention_merge
constexpr unsigned kThreadsDecode = 128;      // of attention_decode.cu
constexpr unsigned kThreads90 = 384;          // of attention_prompt_sm90.cu
constexpr int64_t kHeadDim = 256;
constexpr int64_t kMaxGroup = 16;             // query heads of a kv head
constexpr int kFewLanes = 8, kManyLanes = 24;  // rows and query heads of a job of attention_decode.cu
constexpr size_t kPartsBytes = size_t{256} << 20;  // where the parts of decode rows meet that several blocks have: of the 27B model 5.5 million tokens, 1.3 with verifies of 4 rows; beyond, blocks take whole jobs

// Code that is not sm_90a's alone fits the 99 KB that every card from sm_80 on gives a block.
constexpr int kLeastSharedBytes = 99 << 10;
static_assert(kPromptSharedBytes <= kLeastSharedBytes && decode_shared_bytes(kFewLanes, false, false) <= kLeastSharedBytes && decode_shared_bytes(kManyLanes, false, false) <= kLeastSharedBytes);

/// How attention_prompt_sm90.cu reads keys or values, bf16 [num_blocks, num_kv_heads, 64, 256]: a block of 64 rows as images of 64 columns.
TensorMap cache_map(Stream& stream, const ops::TensorView& cache) {
  constexpr uint64_t kImageColumns = 64, kImageBytes = kImageColumns * sizeof(uint16_t), kImages = kHeadDim / kImageColumns;
  const uint64_t extents[] = {kImageColumns, static_cast<uint64_t>(cache.shape[0] * cache.shape[1] * cache.shape[2]), kImages};
  const uint64_t strides[] = {kHeadDim * sizeof(uint16_t), kImageBytes};
  const uint32_t box[] = {kImageColumns, static_cast<uint32_t>(ops::kGrid), kImages}, steps[] = {1, 1, 1};
  TensorMap map{};
  const Driver& driver = stream.context()->driver;
  if (const Status status = driver.tensor_map_tiled(&map, kTensorBfloat16, 3, cache.data<void>(), extents, strides, box, steps, kTensorNoInterleave, kSwizzle128,
                                                    kPromotionL2_256, kFillZeros);
      status != kSuccess)
    stream.fail(make_error(ErrorCode::kInternal, "{}: no tensor map of the KV cache: {}", stream.context()->device_name, driver.describe(status)));
  return map;
}

/// AttentionArgs::heads.
std::vector<int32_t> heads_by_kv_head(const ops::Attention::Problem& problem) {
  const auto first = static_cast<size_t>(problem.num_kv_heads) + 1;
  std::vector<int32_t> table(first);
  for (int32_t kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
    table[static_cast<size_t>(kv_head)] = static_cast<int32_t>(table.size());
    for (int32_t head = 0; head < problem.num_q_heads; ++head)
      if (problem.kv_head[static_cast<size_t>(head)] == kv_head) table.push_back(head);
  }
  table[first - 1] = static_cast<int32_t>(table.size());
  return table;
}

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  struct Functions {
    std::string_view arithmetic;
    Function<AttentionArgs> decode_1, decode_3, decode_many, merge_few, merge_many;
    Function<AttentionEitherArgs> decode_either, merge_either;
    Function<AttentionArgs> prompt;            // of attention_mma.cu, or
    Function<AttentionPromptArgs> prompt_90;  // of attention_prompt_sm90.cu
    int decode_1_blocks = 1, decode_3_blocks = 1;  // that fit a multiprocessor
    bool code_90a = false;                     // runs machine code of sm_90a, whose launches also overlap (programmatic dependent launch)
  };
  AttentionKernel(const ops::Attention::Problem& problem, const Functions& functions, std::unique_ptr<ops::Buffer> kv_head, std::unique_ptr<ops::Buffer> heads, std::unique_ptr<ops::Buffer> relay, const Device& device)
      : problem_(problem), functions_(functions), kv_head_(std::move(kv_head)), heads_(std::move(heads)), relay_(std::move(relay)), num_sms_(device.num_sms()), l2_bytes_(device.l2_bytes()) {
    for (int64_t head = 0; head < problem.num_kv_heads; ++head)
      largest_group_ = std::max<int64_t>(largest_group_, std::count(problem.kv_head.begin(), problem.kv_head.end(), static_cast<int32_t>(head)));
  }

  [[nodiscard]] std::string_view arithmetic() const override { return functions_.arithmetic; }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return kPartsBytes; }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv,
               int32_t first_index, const ops::Activation& out, ops::Launch& launch) const override {
    if (rows.num_rows == 0 || problem_.num_q_heads == 0) return;
    Stream& stream = cuda_stream(launch.stream);
    const AttentionArgs args = attention_arguments(problem_, *kv_head_, rows, query, gate, kv, first_index, out);
    const Kinds kinds = kinds_of(rows);
    const auto q_heads = static_cast<unsigned>(problem_.num_q_heads);
    if (kinds.num_decode_runs > 0) decode(args, kinds, launch);
    if (kinds.prompt) {
      unsigned tiles = 0;
      for (const ops::RowRun& run : rows.runs)
        if (run.kind == ops::RowKind::kPrompt) tiles += plain::blocks_for(run.num_rows, kPromptTileRows);
      if (functions_.prompt_90.handle == nullptr) {
        stream.launch(functions_.prompt, {.grid = {q_heads, tiles}, .block = {kThreads}, .shared_bytes = kPromptSharedBytes}, args);
        return;
      }
      AttentionPromptArgs prompt{.attention = args, .k = {}, .v = {}};
      if (kv.k.dtype == DType::kBF16) {
        prompt.k = cache_map(stream, kv.k);
        prompt.v = cache_map(stream, kv.v);
      }
      stream.launch(functions_.prompt_90, {.grid = {q_heads, tiles}, .block = {kThreads90}, .shared_bytes = kPromptSharedBytes90}, prompt);
    }
  }

 private:
  void decode(const AttentionArgs& args, const Kinds& kinds, ops::Launch& launch) const {
    const auto splits_of = [](const AttentionArgs& of) { return std::min<int64_t>(of.num_jobs, of.num_blocks); };
    const bool small = kinds.longest_decode_run * largest_group_ <= kFewLanes;
    AttentionArgs together = decode_arguments(args, kinds, small ? kFewLanes : kManyLanes, small ? functions_.decode_1_blocks : functions_.decode_3_blocks, launch);
    const bool relay = small && together.num_jobs >= num_sms_;
    together.relay = relay ? reinterpret_cast<int32_t*>(relay_->address()) : nullptr;
    const auto shape = [&](int64_t columns) {
      return LaunchShape{.grid = {static_cast<unsigned>(together.num_blocks)},
                         .block = {kThreadsDecode},
                         .shared_bytes = static_cast<unsigned>(decode_shared_bytes(static_cast<int>(columns), problem_.kv == DType::kE4M3, functions_.code_90a)),
                         .programmatic = functions_.code_90a};
    };
    Stream& stream = cuda_stream(launch.stream);
    if (!small && args.first_index == 0 && largest_group_ <= kFewLanes) {
      const AttentionEitherArgs either{together, decode_arguments(args, kinds, kFewLanes, functions_.decode_3_blocks, launch)};
      const int64_t columns = std::max(splits_of(either.together) * either.together.lanes, splits_of(either.apart) * either.apart.lanes);
      if (columns <= num_sms_) {
        stream.launch(functions_.decode_either, shape(kManyLanes), either);
        stream.launch(functions_.merge_either, {.grid = {static_cast<unsigned>(columns), 1, 8}, .block = {kThreads}, .programmatic = functions_.code_90a}, either);
        return;
      }
    }
    stream.launch(relay ? functions_.decode_many : small ? functions_.decode_1 : functions_.decode_3, shape(small ? kFewLanes : kManyLanes), together);
    if (relay) return;
    const auto splits = static_cast<unsigned>(splits_of(together)), lanes = static_cast<unsigned>(together.lanes);
    // Few: blocks share the parts of a long job, and elements are merged apart; the bits are the same.
    const bool few = int64_t{splits} * lanes <= num_sms_;
    stream.launch(few ? functions_.merge_few : functions_.merge_many, {.grid = {splits, lanes, few ? 8u : 1u}, .block = {kThreads}, .programmatic = functions_.code_90a}, together);
  }
  /// Of kernels that take `columns` rows and heads at a time, `blocks` on a multiprocessor.
  AttentionArgs decode_arguments(AttentionArgs args, const Kinds& kinds, int64_t columns, int blocks, const ops::Launch& launch) const {
    const int64_t rows_per_group = std::min(columns / std::max<int64_t>(largest_group_, 1), kinds.longest_decode_run);
    args.num_blocks = blocks * num_sms_;
    args.rows_per_group = static_cast<int32_t>(rows_per_group);
    args.max_groups = static_cast<int32_t>((kinds.longest_decode_run + rows_per_group - 1) / rows_per_group);
    args.num_jobs = args.step.num_runs * args.max_groups * args.num_kv_heads;
    args.lanes = static_cast<int32_t>(rows_per_group * largest_group_);
    CHECK(launch.workspace.size_bytes() >= kPartsBytes);
    const size_t splits_bytes = static_cast<size_t>(args.num_blocks) * sizeof(SplitJob), slot_bytes = static_cast<size_t>(args.lanes) * (kHeadDim + 2) * sizeof(float);
    args.max_slots = static_cast<int32_t>((kPartsBytes - splits_bytes) / slot_bytes);
    args.slots = launch.workspace.data<float>();
    args.slot_sums = args.slots + int64_t{args.max_slots} * args.lanes * kHeadDim;
    args.split_jobs = reinterpret_cast<SplitJob*>(args.slot_sums + int64_t{args.max_slots} * args.lanes * 2);
    args.heads = reinterpret_cast<const int32_t*>(heads_->address());
    args.next = plain::prefetch_of(launch, l2_bytes_ / 2);
    return args;
  }

  ops::Attention::Problem problem_;
  Functions functions_;
  std::unique_ptr<ops::Buffer> kv_head_;  // i32 [num_q_heads]
  std::unique_ptr<ops::Buffer> heads_;    // AttentionArgs::heads
  std::unique_ptr<ops::Buffer> relay_;    // AttentionArgs::relay
  int num_sms_;
  int64_t l2_bytes_;
  int64_t largest_group_ = 0;
};

Result<std::unique_ptr<ops::Attention::Kernel>> make_kernel(const ops::Attention::Problem& problem, ops::Device& device, bool hopper) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  Device& gpu = cuda_device(device);
  AttentionKernel::Functions functions{
      .arithmetic = hopper ? "cuda.sm90.attention.bf16" : "cuda.mma.bf16", .decode_1 = {}, .decode_3 = {}, .decode_many = {}, .merge_few = {}, .merge_many = {}, .decode_either = {}, .merge_either = {}, .prompt = {}, .prompt_90 = {}};
  const bool codes = problem.kv == DType::kE4M3;
  functions.code_90a = runs_code_for("90a", gpu.traits().architecture);
  const auto decode_function = [&](const char* name, int columns, Function<AttentionArgs>& function, int& blocks) -> Result<void> {
    const int shared_bytes = decode_shared_bytes(columns, codes, functions.code_90a);
    ASSIGN_OR_RETURN(function, gpu.function<AttentionArgs>("attention_decode", name, shared_bytes));
    blocks = std::clamp(gpu.blocks_by_shared_bytes(shared_bytes), 1, decode_blocks(columns, codes, functions.code_90a));
    return {};
  };
  RETURN_IF_ERROR(decode_function(codes ? "attention_decode_1_e4m3" : "attention_decode_1_bf16", kFewLanes, functions.decode_1, functions.decode_1_blocks));
  RETURN_IF_ERROR(decode_function(codes ? "attention_decode_3_e4m3" : "attention_decode_3_bf16", kManyLanes, functions.decode_3, functions.decode_3_blocks));
  int many_blocks = 1;  // as decode_1_blocks
  RETURN_IF_ERROR(decode_function(codes ? "attention_decode_many_e4m3" : "attention_decode_many_bf16", kFewLanes, functions.decode_many, many_blocks));
  ASSIGN_OR_RETURN(functions.merge_few, gpu.function<AttentionArgs>("attention_decode", "attention_merge_few"));
  ASSIGN_OR_RETURN(functions.merge_many, gpu.function<AttentionArgs>("attention_decode", "attention_merge_many"));
  ASSIGN_OR_RETURN(functions.decode_either, gpu.function<AttentionEitherArgs>("attention_decode", codes ? "attention_decode_either_e4m3" : "attention_decode_either_bf16",
                                                                              decode_shared_bytes(kManyLanes, codes, functions.code_90a)));
  ASSIGN_OR_RETURN(functions.merge_either, gpu.function<AttentionEitherArgs>("attention_decode", "attention_merge_either"));
  if (hopper) {
    const char* name = codes ? "attention_prompt_e4m3_sm90" : "attention_prompt_bf16_sm90";
    ASSIGN_OR_RETURN(functions.prompt_90, gpu.function<AttentionPromptArgs>("attention_prompt_sm90", name, kPromptSharedBytes90));
  } else {
    ASSIGN_OR_RETURN(functions.prompt, gpu.function<AttentionArgs>("attention_mma", codes ? "attention_prompt_e4m3" : "attention_prompt_bf16", kPromptSharedBytes));
  }
  ASSIGN_OR_RETURN(auto kv_head, gpu.upload(problem.kv_head, "the attention's head map"));
  ASSIGN_OR_RETURN(auto heads, gpu.upload(heads_by_kv_head(problem), "the attention's head lists"));
  const std::vector<int32_t> flags(2 * static_cast<size_t>(functions.decode_1_blocks * gpu.num_sms()));
  ASSIGN_OR_RETURN(auto relay, gpu.upload(flags, "flags between the attention's blocks"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, functions, std::move(kv_head), std::move(heads), std::move(relay), gpu));
}

}  // namespace

namespace mma {

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.activation != DType::kBF16) return ops::refuse("activations are {}, not bf16", dtype_name(problem.activation));
  if (problem.head_dim != kHeadDim) return ops::refuse("heads of {} elements, not {}", problem.head_dim, kHeadDim);
  if (const int64_t heads = std::max(problem.num_q_heads, problem.num_kv_heads); heads > kMaxDecodeHeads) return ops::refuse("{} heads; up to {} are supported", heads, kMaxDecodeHeads);
  for (int64_t head = 0; head < problem.num_kv_heads; ++head)
    if (const auto group = std::count(problem.kv_head.begin(), problem.kv_head.end(), static_cast<int32_t>(head)); group > kMaxGroup)
      return ops::refuse("{} query heads share a kv head; up to {} are supported", group, kMaxGroup);
  return plain::accepts(problem, traits);
}

Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device) {
  return make_kernel(problem, device, false);
}

}  // namespace mma

namespace sm90 {

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  return mma::accepts(problem, traits);
}

Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device) {
  return make_kernel(problem, device, true);
}

}  // namespace sm90

}  // namespace quern::cuda
