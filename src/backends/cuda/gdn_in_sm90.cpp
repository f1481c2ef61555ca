#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

TileLayer::Spec spec_of(const ops::GdnIn::Problem& problem) {
  return {.parts = {problem.qkv, problem.z}, .norm_width = problem.hidden, .side = {problem.b, problem.a}};
}

class GdnInKernel final : public ops::GdnIn::Kernel {
 public:
  GdnInKernel(const ops::GdnIn::Problem& problem, Linears linears) : problem_(problem), linears_(std::move(linears)), layer_(spec_of(problem), 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return layer_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_); }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weights.qkv, &weights.z}, .norm = weights.norm, .side = {&weights.b, &weights.a}}, packed, linears_.packers(), cuda_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out, ops::Launch& launch) const override {
    const int64_t qkv = problem_.qkv.out_features, z = problem_.z.out_features, b = problem_.b.out_features, a = problem_.a.out_features;
    linears_.enqueue(
        cuda_stream(launch.stream), layer_, packed, rows, {row_data(x), problem_.hidden}, launch.workspace,
        [&](LinearLayer& linear, int64_t row) {
          linear.eps = problem_.eps;
          linear.segments[0].out = row_data(out.qkv, row, qkv);
          linear.segments[0].stride = qkv;
          linear.segments[1].out = row_data(out.z, row, z);
          linear.segments[1].stride = z;
          linear.side.b = row_data(out.b, row, b);
          linear.side.a = row_data(out.a, row, a);
        });
  }

 private:
  ops::GdnIn::Problem problem_;
  Linears linears_;
  TileLayer layer_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_activation(problem.activation); !verdict.accepted) return verdict;
  return TileLayer::accepts(spec_of(problem), traits);
}

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device, PromptShape shape) {
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape, TileLayer(spec_of(problem), 0).num_side_units()));
  return std::unique_ptr<ops::GdnIn::Kernel>(std::make_unique<GdnInKernel>(problem, std::move(linears)));
}

}  // namespace quern::cuda::sm90
