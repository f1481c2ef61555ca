#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

/// Packed: fc, then the factors of both norms in f32.
template <class Linears>
class MtpInKernel final : public ops::MtpIn::Kernel {
 public:
  MtpInKernel(const ops::MtpIn::Problem& problem, const VectorLauncher& vectors, Linears linears)
      : problem_(problem), vectors_(vectors), linears_(std::move(linears)), norms_at_(linears_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, kRowTile);
    return both_bytes(rows) + linears_.scratch_bytes(rows);
  }
  void pack(const ops::MtpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(0, weights.fc, packed, opencl_stream(stream));
    vectors_.widen(opencl_stream(stream), weights.norm_embedding, norm_in(packed, 0), 1.0f);
    vectors_.widen(opencl_stream(stream), weights.norm_hidden, norm_in(packed, 1), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& embedding, const ops::TensorView& hidden, const ops::Buffer& packed,
               const ops::TensorView& x, ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    const int64_t width = problem_.hidden;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place both = scratch.take(both_bytes(n));
      vectors_.norm(stream, row_place(embedding, first, width), n, width, problem_.eps, norm_in(packed, 0), 0.0f, both, 2 * width);
      const Place second{both.buffer, both.offset_bytes + static_cast<size_t>(width) * dtype_size(problem_.activation)};
      vectors_.norm(stream, row_place(hidden, first, width), n, width, problem_.eps, norm_in(packed, 1), 0.0f, second, 2 * width);
      const Place to = row_place(x, first, width);
      linears_.multiply(stream, packed, {both, {}, n, {}, 0.0f}, segments_of(rows, first, n), {&to, 1}, scratch);
    }
  }

 private:
  [[nodiscard]] size_t both_bytes(int64_t rows) const { return Scratch::size(static_cast<size_t>(rows * 2 * problem_.hidden) * dtype_size(problem_.activation)); }
  [[nodiscard]] Place norm_in(const ops::Buffer& packed, size_t which) const {
    return place_in(packed, norms_at_ + which * static_cast<size_t>(problem_.hidden) * sizeof(float));
  }

  ops::MtpIn::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
  size_t norms_at_;
};

template <class Linears>
Result<std::unique_ptr<ops::MtpIn::Kernel>> make_on(const ops::MtpIn::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.fc}, Epilogue::kStore}));
  return std::unique_ptr<ops::MtpIn::Kernel>(std::make_unique<MtpInKernel<Linears>>(problem, vectors, std::move(linears)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }
Result<std::unique_ptr<ops::MtpIn::Kernel>> plain::make(const ops::MtpIn::Problem& problem, ops::Device& device) { return make_on<PlainLinears>(problem, opencl_device(device)); }

ops::Verdict dpas::accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_linears(traits, problem.activation, {problem.fc}); }
Result<std::unique_ptr<ops::MtpIn::Kernel>> dpas::make(const ops::MtpIn::Problem& problem, ops::Device& device) { return make_on<DpasLinears>(problem, opencl_device(device)); }

}  // namespace quern::opencl
