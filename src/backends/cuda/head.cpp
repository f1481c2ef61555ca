#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
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
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return Linears::operand_bytes(std::min(max_rows, Linears::kRowTile), problem_.hidden); }
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
    const int64_t num_named = logit_rows.shape[0], most = Linears::operand_bytes(1, problem_.hidden) == 0 ? num_named : Linears::kRowTile;
    for (int64_t first = 0; first < num_named; first += most) {
      const int64_t n = std::min<int64_t>(most, num_named - first);
      Scratch scratch(launch.workspace);
      const auto operand = linears_.operand(stream, scratch, hidden.data<void>(), logit_rows.data<int32_t>() + first, n, {&lm_head_});
      linears_.multiply(stream, lm_head_, packed, problem_.activation, operand, n, Epilogue::kStoreF32, row_address(logits, first, problem_.vocab_size));
    }
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

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.lm_head});
}

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device) { return make_on<ops::Head, plain::HeadKernel, E4M3Linears>(problem, device); }

}  // namespace quern::cuda::e4m3
