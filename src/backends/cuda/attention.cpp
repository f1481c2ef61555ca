#include "backends/cuda/attention_args.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  AttentionKernel(const ops::Attention::Problem& problem, Function<AttentionArgs> attention, std::unique_ptr<ops::Buffer> kv_head)
      : problem_(problem), attention_(attention), kv_head_(std::move(kv_head)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv,
               int32_t first_index, const ops::Activation& out, ops::Launch& launch) const override {
    AttentionArgs args{};
    args.step = step_tables(rows);
    args.kinds = kPromptRuns | kDecodeRuns;
    args.num_q_heads = static_cast<int32_t>(problem_.num_q_heads);
    args.num_kv_heads = static_cast<int32_t>(problem_.num_kv_heads);
    args.head_dim = static_cast<int32_t>(problem_.head_dim);
    args.first_index = first_index;
    args.activation = problem_.activation;
    args.query = address_or_null<const void>(query);
    args.gate = address_or_null<const void>(gate);
    args.out = address_or_null<void>(out.data);
    args.kv_head = reinterpret_cast<const int32_t*>(kv_head_->address());
    args.kv = kv_cache(kv);
    cuda_stream(launch.stream)
        .launch(attention_, {.grid = {static_cast<unsigned>(rows.num_rows), static_cast<unsigned>(problem_.num_q_heads)}, .block = {256}}, args);
  }

 private:
  ops::Attention::Problem problem_;
  Function<AttentionArgs> attention_;
  std::unique_ptr<ops::Buffer> kv_head_;  // i32 [num_q_heads]
};

}  // namespace

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.kv != problem.activation && problem.kv != DType::kE4M3)
    return ops::refuse("KV dtype {} with {} activations is not supported; {} and e4m3 are", dtype_name(problem.kv),
                       dtype_name(problem.activation), dtype_name(problem.activation));
  if (problem.head_dim > kMaxHeadDim) return ops::refuse("heads of {} elements; up to {} are supported", problem.head_dim, kMaxHeadDim);
  return accepts_activation(traits, problem.activation, problem.out);
}

Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  for (const int32_t head : problem.kv_head) CHECK(head >= 0 && head < problem.num_kv_heads);
  ASSIGN_OR_RETURN(const auto attention, cuda_device(device).function<AttentionArgs>("attention", "attention"));
  ASSIGN_OR_RETURN(auto kv_head, cuda_device(device).upload(problem.kv_head, "the attention's head map"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, attention, std::move(kv_head)));
}

}  // namespace quern::cuda::plain
