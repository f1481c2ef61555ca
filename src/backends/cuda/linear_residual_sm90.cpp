#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

TileLayer::Spec spec_of(const ops::LinearResidual::Problem& problem) { return {.parts = {problem.linear}}; }

class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, Linears linears) : problem_(problem), linears_(std::move(linears)), layer_(spec_of(problem), 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return layer_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_); }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weight}}, packed, linears_.packers(), cuda_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    const int64_t width = problem_.linear.out_features;
    linears_.enqueue(cuda_stream(launch.stream), layer_, packed, rows, {row_data(in.data), problem_.linear.in_features}, launch.workspace,
                     [&](LinearLayer& linear, int64_t row) {
                       linear.epilogue = problem_.add_residual ? Epilogue::kResidual : Epilogue::kStore;
                       linear.segments[0].out = row_data(x, row, width);
                       linear.segments[0].stride = width;
                     });
  }

 private:
  ops::LinearResidual::Problem problem_;
  Linears linears_;
  TileLayer layer_;
};

}  // namespace

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_activation(problem.activation, problem.in); !verdict.accepted) return verdict;
  return TileLayer::accepts(spec_of(problem), traits);
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device, PromptShape shape) {
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  return std::unique_ptr<ops::LinearResidual::Kernel>(std::make_unique<LinearResidualKernel>(problem, std::move(linears)));
}

}  // namespace quern::cuda::sm90
