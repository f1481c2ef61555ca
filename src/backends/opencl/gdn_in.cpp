#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

/// Packed: qkv, z, b, a, then the norm's factors in f32.
class GdnInKernel final : public ops::GdnIn::Kernel {
 public:
  GdnInKernel(const ops::GdnIn::Problem& problem, const LinearLauncher& launcher)
      : problem_(problem),
        launcher_(launcher),
        qkv_(problem.qkv, 0),
        z_(problem.z, qkv_.end_bytes()),
        b_(problem.b, z_.end_bytes()),
        a_(problem.a, b_.end_bytes()),
        norm_at_(a_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size(static_cast<size_t>(std::min(max_rows, kRowTile) * problem_.hidden) * dtype_size(problem_.activation));
  }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    qkv_.pack(weights.qkv, packed, opencl_stream(stream));
    z_.pack(weights.z, packed, opencl_stream(stream));
    b_.pack(weights.b, packed, opencl_stream(stream));
    a_.pack(weights.a, packed, opencl_stream(stream));
    launcher_.widen(opencl_stream(stream), weights.norm, place_in(packed, norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out,
               ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place normed = scratch.take(workspace_bytes(n));
      launcher_.norm(stream, row_place(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, place_in(packed, norm_at_), 0.0f, normed, problem_.hidden);
      const auto project = [&](const PackedLinear& weight, const ops::TensorView& to) {
        if (weight.shape().out_features == 0) return;
        launcher_.multiply(stream, weight, packed, normed, n, Epilogue::kStore, row_place(to, first, weight.shape().out_features));
      };
      project(qkv_, out.qkv);
      project(z_, out.z);
      project(b_, out.b);
      project(a_, out.a);
    }
  }

 private:
  ops::GdnIn::Problem problem_;
  LinearLauncher launcher_;
  PackedLinear qkv_, z_, b_, a_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const LinearLauncher launcher, LinearLauncher::create(opencl_device(device), problem.activation, {problem.qkv, problem.z, problem.b, problem.a}));
  return std::unique_ptr<ops::GdnIn::Kernel>(std::make_unique<GdnInKernel>(problem, launcher));
}

}  // namespace quern::opencl::plain
