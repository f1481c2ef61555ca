#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

TileLayer::Spec spec_of(const ops::MlpIn::Problem& problem) { return {.parts = {problem.gate, problem.up}, .gate_and_up = true, .norm_width = problem.hidden}; }

class MlpInKernel final : public ops::MlpIn::Kernel {
 public:
  MlpInKernel(const ops::MlpIn::Problem& problem, Linears linears) : problem_(problem), linears_(std::move(linears)), layer_(spec_of(problem), 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return layer_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_); }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weights.gate, &weights.up}, .norm = weights.norm}, packed, linears_.packers(), cuda_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out, ops::Launch& launch) const override {
    const int64_t width = problem_.intermediate;
    linears_.enqueue(cuda_stream(launch.stream), layer_, packed, rows, {row_data(x), problem_.hidden}, launch.workspace, [&](LinearLayer& linear, int64_t row) {
      linear.epilogue = Epilogue::kSiluUp;
      linear.eps = problem_.eps;
      linear.segments[0].out = row_data(out.data, row, width);
      linear.segments[0].stride = width;
    });
  }

 private:
  ops::MlpIn::Problem problem_;
  Linears linears_;
  TileLayer layer_;
};

}  // namespace

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_activation(problem.activation, problem.out); !verdict.accepted) return verdict;
  return TileLayer::accepts(spec_of(problem), traits);
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device, PromptShape shape) {
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  return std::unique_ptr<ops::MlpIn::Kernel>(std::make_unique<MlpInKernel>(problem, std::move(linears)));
}

}  // namespace quern::cuda::sm90
