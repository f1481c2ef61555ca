#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, const LinearLauncher& launcher)
      : problem_(problem), launcher_(launcher), weight_(problem.linear, 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return weight_.end_bytes(); }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream& stream) const override { weight_.pack(weight, packed, opencl_stream(stream)); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || x.empty()) return;
    launcher_.multiply(opencl_stream(launch.stream), weight_, packed, place_of(in.data), rows.num_rows,
                       problem_.add_residual ? Epilogue::kAddResidual : Epilogue::kStore, place_of(x));
  }

 private:
  ops::LinearResidual::Problem problem_;
  LinearLauncher launcher_;
  PackedLinear weight_;
};

}  // namespace

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_activation(traits, problem.activation, problem.in);
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const LinearLauncher launcher, LinearLauncher::create(opencl_device(device), problem.activation, {problem.linear}));
  return std::unique_ptr<ops::LinearResidual::Kernel>(std::make_unique<LinearResidualKernel>(problem, launcher));
}

}  // namespace quern::opencl::plain
