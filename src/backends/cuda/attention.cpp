#include "backends/cuda/attention.h"

#include "ops/kv_dtype.h"

namespace quern::cuda {

AttentionArgs attention_arguments(const ops::Attention::Problem& problem, const ops::Buffer& kv_head, const ops::Rows& rows, const ops::TensorView& query,
                                  const ops::TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out) {
  AttentionArgs args{};
  args.step = plain::step_tables(rows);
  args.num_q_heads = static_cast<int32_t>(problem.num_q_heads);
  args.num_kv_heads = static_cast<int32_t>(problem.num_kv_heads);
  args.head_dim = static_cast<int32_t>(problem.head_dim);
  args.first_index = first_index;
  args.activation = problem.activation;
  args.query = plain::address_or_null<const void>(query);
  args.gate = plain::address_or_null<const void>(gate);
  args.out = plain::address_or_null<void>(out.data);
  args.kv_head = reinterpret_cast<const int32_t*>(kv_head.address());
  args.kv = plain::kv_cache(kv);
  return args;
}

namespace plain {

namespace {

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  AttentionKernel(const ops::Attention::Problem& problem, Function<AttentionArgs> attention, std::unique_ptr<ops::Buffer> kv_head)
      : problem_(problem), attention_(attention), kv_head_(std::move(kv_head)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv,
               int32_t first_index, const ops::Activation& out, ops::Launch& launch) const override {
    const AttentionArgs args = attention_arguments(problem_, *kv_head_, rows, query, gate, kv, first_index, out);
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
  if (ops::Verdict verdict = ops::accepts_kv(problem.kv, problem.activation); !verdict.accepted) return verdict;
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

}  // namespace plain

}  // namespace quern::cuda
