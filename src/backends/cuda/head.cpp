#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

template <class Linears>
class HeadKernel final : public ops::Head::Kernel {
 public:
  HeadKernel(const ops::Head::Problem& problem, const Linears& linears) : problem_(problem), linears_(linears), lm_head_(problem.lm_head, 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return problem_.tied ? 0 : lm_head_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return Linears::kTableLayout; }
  void pack(const ops::LinearSource& lm_head, ops::Buffer& packed, ops::Stream& stream) const override {
    CHECK(!problem_.tied);
    linears_.pack(lm_head_, lm_head, packed, stream);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows,
               const ops::Buffer& packed, const ops::TensorView& hidden, const ops::TensorView& logits,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    Stream& stream = cuda_stream(launch.stream);
    linears_.norm(stream, problem_.activation, x.data<void>(), rows.num_rows, problem_.hidden, problem_.eps, norm.data<float>(), 1.0f, hidden.data<void>(),
                   problem_.hidden);
    if (logit_rows.empty()) return;
    linears_.multiply(stream, lm_head_, packed, problem_.activation, hidden.data<void>(), logit_rows.shape[0], Epilogue::kStoreF32, logits.data<void>(),
                       logit_rows.data<int32_t>());
  }

 private:
  ops::Head::Problem problem_;
  Linears linears_;
  typename Linears::Packed lm_head_;
};

}  // namespace

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device) { return make_on<ops::Head, HeadKernel, LinearLauncher>(problem, device); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  if (problem.tied) return ops::refuse("a tied table stays in rows, as embed reads it");
  return TiledLinears::accepts(problem.activation, {problem.lm_head});
}

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device) { return make_on<ops::Head, plain::HeadKernel, TiledLinears>(problem, device); }

}  // namespace quern::cuda::mma
