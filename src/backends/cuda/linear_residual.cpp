#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

template <class Linears>
class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, const Linears& linears)
      : problem_(problem), linears_(linears), weight_(problem.linear, 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return weight_.end_bytes(); }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream& stream) const override { linears_.pack(weight_, weight, packed, stream); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || x.empty()) return;
    linears_.multiply(cuda_stream(launch.stream), weight_, packed, problem_.activation, address_or_null<const void>(in.data), rows.num_rows,
                       problem_.add_residual ? Epilogue::kAddResidual : Epilogue::kStore, x.data<void>());
  }

 private:
  ops::LinearResidual::Problem problem_;
  Linears linears_;
  typename Linears::Packed weight_;
};

}  // namespace

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_activation(traits, problem.activation, problem.in);
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device) { return make_on<ops::LinearResidual, LinearResidualKernel, LinearLauncher>(problem, device); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  return TiledLinears::accepts(problem.activation, {problem.linear});
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device) { return make_on<ops::LinearResidual, plain::LinearResidualKernel, TiledLinears>(problem, device); }

}  // namespace quern::cuda::mma
