#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

template <class Linears>
class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, Linears linears) : problem_(problem), linears_(std::move(linears)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return linears_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.scratch_bytes(std::min(max_rows, kRowTile)); }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream& stream) const override { linears_.pack(0, weight, packed, opencl_stream(stream)); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (rows.num_rows == 0 || x.empty()) return;
    Stream& stream = opencl_stream(launch.stream);
    const ops::LinearShape& shape = problem_.linear;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place to = row_place(x, first, shape.out_features);
      linears_.multiply(stream, packed, {row_place(in.data, first, shape.in_features), {}, n, {}, 0.0f}, segments_of(rows, first, n), {&to, 1}, scratch);
    }
  }

 private:
  ops::LinearResidual::Problem problem_;
  Linears linears_;
};

template <class Linears>
Result<std::unique_ptr<ops::LinearResidual::Kernel>> make_on(const ops::LinearResidual::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.linear}, problem.add_residual ? Epilogue::kAddResidual : Epilogue::kStore}));
  return std::unique_ptr<ops::LinearResidual::Kernel>(std::make_unique<LinearResidualKernel<Linears>>(problem, std::move(linears)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_activation(traits, problem.activation, problem.in);
}
Result<std::unique_ptr<ops::LinearResidual::Kernel>> plain::make(const ops::LinearResidual::Problem& problem, ops::Device& device) {
  return make_on<PlainLinears>(problem, opencl_device(device));
}

ops::Verdict dpas::accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  const ops::Verdict verdict = accepts_linears(traits, problem.activation, {problem.linear});
  return verdict.accepted ? accepts_activation(traits, problem.activation, problem.in) : verdict;
}
Result<std::unique_ptr<ops::LinearResidual::Kernel>> dpas::make(const ops::LinearResidual::Problem& problem, ops::Device& device) {
  return make_on<DpasLinears>(problem, opencl_device(device));
}

}  // namespace quern::opencl
