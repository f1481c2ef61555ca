#include "backends/cuda/attention.h"
#include "backends/cuda/device_code.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda {

using mma::Kinds, mma::kinds_of;

namespace {

constexpr unsigned kThreads = 256;            // of attention_mma.cu
constexpr unsigned kThreads90 = 384;          // of attention_prompt_sm90.cu
constexpr int64_t kHeadDim = 256;
constexpr int64_t kMaxGroup = 16;             // query heads of a kv head
constexpr size_t kPartsBytes = size_t{64} << 20;  // where the parts of long decode rows meet
constexpr int64_t kMaxSplits = 64;
constexpr int64_t kPartTiles = ops::kKvSplit / ops::kGrid;

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

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  struct Functions {
    std::string_view arithmetic;
    Function<AttentionArgs> decode_1, decode_2, merge;
    Function<AttentionArgs> prompt;            // of attention_mma.cu, or
    Function<AttentionPromptArgs> prompt_90;  // of attention_prompt_sm90.cu
    bool overlap = false;                      // clusters, and programmatic dependent launch
  };
  AttentionKernel(const ops::Attention::Problem& problem, const Functions& functions, std::unique_ptr<ops::Buffer> kv_head, int num_sms)
      : problem_(problem), functions_(functions), kv_head_(std::move(kv_head)), num_sms_(num_sms) {
    for (int64_t head = 0; head < problem.num_kv_heads; ++head)
      largest_group_ = std::max<int64_t>(largest_group_, std::count(problem.kv_head.begin(), problem.kv_head.end(), static_cast<int32_t>(head)));
  }

  [[nodiscard]] std::string_view arithmetic() const override { return functions_.arithmetic; }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return kPartsBytes; }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv,
               int32_t first_index, const ops::Activation& out, ops::Launch& launch) const override {
    if (rows.num_rows == 0 || problem_.num_q_heads == 0) return;
    Stream& stream = cuda_stream(launch.stream);
    AttentionArgs args = attention_arguments(problem_, *kv_head_, rows, query, gate, kv, first_index, out);
    const Kinds kinds = kinds_of(rows);
    const auto q_heads = static_cast<unsigned>(problem_.num_q_heads), kv_heads = static_cast<unsigned>(problem_.num_kv_heads);
    if (kinds.num_decode_runs > 0) {
      const int64_t num_rows = kinds.end_decode_row - kinds.first_decode_row;
      const int64_t part_bytes = num_rows * problem_.num_q_heads * (kHeadDim + 2) * static_cast<int64_t>(sizeof(float));
      CHECK(launch.workspace.size_bytes() >= kPartsBytes);
      args.first_decode_row = kinds.first_decode_row;
      args.parts = launch.workspace.data<float>();
      args.max_parts = static_cast<int32_t>(static_cast<int64_t>(kPartsBytes) / part_bytes);
      const bool small = kinds.longest_decode_run * largest_group_ <= 16;  // the bits are the same
      const int64_t slots = (small ? 2 : 1) * num_sms_, heads = kinds.num_decode_runs * problem_.num_kv_heads;
      args.cluster = functions_.overlap && heads * kPartTiles <= slots ? static_cast<int32_t>(kPartTiles) : 1;
      args.num_splits = static_cast<int32_t>(std::clamp<int64_t>(slots / (heads * args.cluster), 1, kMaxSplits));
      const auto cluster = static_cast<unsigned>(args.cluster), blocks = static_cast<unsigned>(args.num_splits) * cluster;
      stream.launch(small ? functions_.decode_1 : functions_.decode_2,
                    {.grid = {blocks, kv_heads, static_cast<unsigned>(args.step.num_runs)},
                     .block = {kThreads},
                     .shared_bytes = static_cast<unsigned>(small ? kDecodeSharedBytes1 : kDecodeSharedBytes2),
                     .cluster = {cluster},
                     .programmatic = functions_.overlap},
                    args);
      if (blocks > 1)
        stream.launch(functions_.merge,
                      {.grid = {static_cast<unsigned>(num_rows), q_heads}, .block = {kThreads}, .programmatic = functions_.overlap}, args);
    }
    if (kinds.prompt) {
      unsigned tiles = 0;
      for (const ops::RowRun& run : rows.runs)
        if (run.kind == ops::RowKind::kPrompt) tiles += plain::blocks_for(run.num_rows, kPromptTileRows);
      if (functions_.prompt_90.handle == nullptr) {
        stream.launch(functions_.prompt, {.grid = {tiles, q_heads}, .block = {kThreads}, .shared_bytes = kPromptSharedBytes}, args);
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
  ops::Attention::Problem problem_;
  Functions functions_;
  std::unique_ptr<ops::Buffer> kv_head_;  // i32 [num_q_heads]
  int num_sms_;
  int64_t largest_group_ = 0;
};

Result<std::unique_ptr<ops::Attention::Kernel>> make_kernel(const ops::Attention::Problem& problem, ops::Device& device, bool hopper) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  Device& gpu = cuda_device(device);
  AttentionKernel::Functions functions{
      .arithmetic = hopper ? "cuda.sm90.attention.bf16" : "cuda.mma.bf16", .decode_1 = {}, .decode_2 = {}, .merge = {}, .prompt = {}, .prompt_90 = {}};
  ASSIGN_OR_RETURN(functions.decode_1, gpu.function<AttentionArgs>("attention_mma", "attention_decode_1", kDecodeSharedBytes1));
  ASSIGN_OR_RETURN(functions.decode_2, gpu.function<AttentionArgs>("attention_mma", "attention_decode_2", kDecodeSharedBytes2));
  ASSIGN_OR_RETURN(functions.merge, gpu.function<AttentionArgs>("attention_mma", "attention_merge"));
  if (hopper) {
    const char* name = problem.kv == DType::kE4M3 ? "attention_prompt_e4m3_sm90" : "attention_prompt_bf16_sm90";
    ASSIGN_OR_RETURN(functions.prompt_90, gpu.function<AttentionPromptArgs>("attention_prompt_sm90", name, kPromptSharedBytes90));
  } else {
    ASSIGN_OR_RETURN(functions.prompt, gpu.function<AttentionArgs>("attention_mma", "attention_prompt", kPromptSharedBytes));
  }
  functions.overlap = runs_code_for("90a", gpu.traits().architecture);
  ASSIGN_OR_RETURN(auto kv_head, gpu.upload(problem.kv_head, "the attention's head map"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, functions, std::move(kv_head), gpu.num_sms()));
}

}  // namespace

namespace mma {

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.activation != DType::kBF16) return ops::refuse("activations are {}, not bf16", dtype_name(problem.activation));
  if (problem.head_dim != kHeadDim) return ops::refuse("heads of {} elements, not {}", problem.head_dim, kHeadDim);
  if (traits.architecture < 90) return ops::refuse("sm_{} has too little shared memory for its tiles; sm_90 has enough", traits.architecture);
  if (traits.architecture >= 120) return ops::refuse("sm_{} has too little shared memory for its tiles; sm_90 and sm_100 have enough", traits.architecture);
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
