#include "backends/opencl/plain.h"
#include "ops/kv_dtype.h"

namespace quern::opencl::plain {

namespace {

constexpr int64_t kMaxHeadDim = 512;  // of attention.cl

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  AttentionKernel(const ops::Attention::Problem& problem, Function attention, std::unique_ptr<ops::Buffer> kv_head)
      : problem_(problem), attention_(attention), kv_head_(std::move(kv_head)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out,
               ops::Launch& launch) const override {
    opencl_stream(launch.stream)
        .launch(attention_, {{static_cast<size_t>(rows.num_rows), static_cast<size_t>(problem_.num_q_heads), 1}, {kItems, 1, 1}}, static_cast<int32_t>(problem_.num_q_heads),
                static_cast<int32_t>(problem_.num_kv_heads), static_cast<int32_t>(problem_.head_dim), first_index, query, gate, out.data, place_in(*kv_head_, 0), rows.run_table,
                rows.row_runs, rows.indices, rows.slots.block_tables, row_stride(rows.slots.block_tables), kv.k, kv.v, kv.k_scale, kv.v_scale);
  }

 private:
  ops::Attention::Problem problem_;
  Function attention_;
  std::unique_ptr<ops::Buffer> kv_head_;  // i32 [num_q_heads]
};

}  // namespace

ops::Verdict accepts_kv(const ops::DeviceTraits& traits, DType activation, DType kv, int64_t head_dim, ops::ActivationLayout layout) {
  if (ops::Verdict verdict = ops::accepts_kv(kv, activation); !verdict.accepted) return verdict;
  if (head_dim > kMaxHeadDim) return ops::refuse("heads of {} elements; up to {} are supported", head_dim, kMaxHeadDim);
  return accepts_activation(traits, activation, layout);
}

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_kv(traits, problem.activation, problem.kv, problem.head_dim, problem.out);
}

Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  for (const int32_t head : problem.kv_head) CHECK(head >= 0 && head < problem.num_kv_heads);
  ASSIGN_OR_RETURN(const Function attention, opencl_device(device).function("attention", "attention", kv_definitions(problem.activation, problem.kv)));
  ASSIGN_OR_RETURN(auto kv_head, opencl_device(device).upload(problem.kv_head, "the attention's head map"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, attention, std::move(kv_head)));
}

}  // namespace quern::opencl::plain
