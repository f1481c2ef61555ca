#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

/// Packed: qkv, z, b, a, then the norm's factors in f32.
template <class Linears>
class GdnInKernel final : public ops::GdnIn::Kernel {
 public:
  GdnInKernel(const ops::GdnIn::Problem& problem, const VectorLauncher& vectors, Linears linears)
      : problem_(problem),
        vectors_(vectors),
        linears_(std::move(linears)),
        qkv_(problem.qkv, 0),
        z_(problem.z, qkv_.end_bytes()),
        b_(problem.b, z_.end_bytes()),
        a_(problem.a, b_.end_bytes()),
        norm_at_(a_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, kRowTile);
    return normed_bytes(rows) + linears_.input_bytes(rows, problem_.hidden);
  }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream& ops_stream) const override {
    Stream& stream = opencl_stream(ops_stream);
    linears_.pack(qkv_, weights.qkv, packed, stream);
    linears_.pack(z_, weights.z, packed, stream);
    linears_.pack(b_, weights.b, packed, stream);
    linears_.pack(a_, weights.a, packed, stream);
    vectors_.widen(stream, weights.norm, place_in(packed, norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out, ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place normed = scratch.take(normed_bytes(n));
      vectors_.norm(stream, row_place(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, place_in(packed, norm_at_), 0.0f, normed, problem_.hidden);
      const auto input = linears_.input(stream, normed, n, problem_.hidden, scratch);
      const std::vector<RowSegment> segments = segments_of(rows, first, n);
      const auto project = [&](const typename Linears::Packed& weight, const ops::TensorView& to) {
        if (weight.shape().out_features == 0) return;
        linears_.multiply(stream, weight, packed, input, segments, Epilogue::kStore, row_place(to, first, weight.shape().out_features));
      };
      project(qkv_, out.qkv);
      project(z_, out.z);
      project(b_, out.b);
      project(a_, out.a);
    }
  }

 private:
  [[nodiscard]] size_t normed_bytes(int64_t rows) const { return Scratch::size(static_cast<size_t>(rows * problem_.hidden) * dtype_size(problem_.activation)); }

  ops::GdnIn::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
  typename Linears::Packed qkv_, z_, b_, a_;
  size_t norm_at_;
};

template <class Linears>
Result<std::unique_ptr<ops::GdnIn::Kernel>> make_on(const ops::GdnIn::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.qkv}, {problem.z}, {problem.b}, {problem.a}}));
  return std::unique_ptr<ops::GdnIn::Kernel>(std::make_unique<GdnInKernel<Linears>>(problem, vectors, std::move(linears)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }
Result<std::unique_ptr<ops::GdnIn::Kernel>> plain::make(const ops::GdnIn::Problem& problem, ops::Device& device) { return make_on<PlainLinears>(problem, opencl_device(device)); }

ops::Verdict dpas::accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_linears(traits, problem.activation, {problem.qkv, problem.z, problem.b, problem.a});
}
Result<std::unique_ptr<ops::GdnIn::Kernel>> dpas::make(const ops::GdnIn::Problem& problem, ops::Device& device) { return make_on<DpasLinears>(problem, opencl_device(device)); }

}  // namespace quern::opencl
