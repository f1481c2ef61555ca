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
      : problem_(problem), vectors_(vectors), linears_(std::move(linears)), norm_at_(linears_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.scratch_bytes(std::min(max_rows, kRowTile)); }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream& ops_stream) const override {
    Stream& stream = opencl_stream(ops_stream);
    linears_.pack(0, weights.qkv, packed, stream);
    linears_.pack(1, weights.z, packed, stream);
    linears_.pack(2, weights.b, packed, stream);
    linears_.pack(3, weights.a, packed, stream);
    vectors_.widen(stream, weights.norm, place_in(packed, norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out, ops::Launch& launch) const override {
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const auto to = [&](const ops::TensorView& view, const ops::LinearShape& shape) { return row_place(view, first, shape.out_features); };
      const Place outs[] = {to(out.qkv, problem_.qkv), to(out.z, problem_.z), to(out.b, problem_.b), to(out.a, problem_.a)};
      linears_.multiply(opencl_stream(launch.stream), packed, {row_place(x, first, problem_.hidden), {}, n, place_in(packed, norm_at_), problem_.eps}, segments_of(rows, first, n),
                        outs, scratch);
    }
  }

 private:
  ops::GdnIn::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
  size_t norm_at_;
};

template <class Linears>
Result<std::unique_ptr<ops::GdnIn::Kernel>> make_on(const ops::GdnIn::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.qkv, problem.z, problem.b, problem.a}, Epilogue::kStore, true}));
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
