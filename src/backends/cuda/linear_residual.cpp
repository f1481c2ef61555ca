#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
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
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Linears::operand_bytes(std::min(max_rows, Linears::kRowTile), problem_.linear.in_features);
  }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream& stream) const override { linears_.pack(weight_, weight, packed, stream); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || x.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    const ops::LinearShape& shape = problem_.linear;
    const int64_t most = Linears::operand_bytes(1, shape.in_features) == 0 ? rows.num_rows : Linears::kRowTile;
    for (int64_t first = 0; first < rows.num_rows; first += most) {
      const int64_t n = std::min<int64_t>(most, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const void* from = in.data.empty() ? nullptr : row_address(in.data, first, shape.in_features);
      linears_.multiply(stream, weight_, packed, problem_.activation, linears_.operand(stream, scratch, from, nullptr, n, {&weight_}), n,
                        problem_.add_residual ? Epilogue::kAddResidual : Epilogue::kStore, row_address(x, first, shape.out_features));
    }
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

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.linear});
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device) { return make_on<ops::LinearResidual, plain::LinearResidualKernel, E4M3Linears>(problem, device); }

}  // namespace quern::cuda::e4m3
