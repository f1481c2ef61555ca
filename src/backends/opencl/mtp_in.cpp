#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

/// Packed: fc, then the factors of both norms in f32.
class MtpInKernel final : public ops::MtpIn::Kernel {
 public:
  MtpInKernel(const ops::MtpIn::Problem& problem, const LinearLauncher& launcher)
      : problem_(problem), launcher_(launcher), fc_(problem.fc, 0), norms_at_(fc_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size(static_cast<size_t>(std::min(max_rows, kRowTile) * 2 * problem_.hidden) * dtype_size(problem_.activation));
  }
  void pack(const ops::MtpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    fc_.pack(weights.fc, packed, opencl_stream(stream));
    launcher_.widen(opencl_stream(stream), weights.norm_embedding, norm_in(packed, 0), 1.0f);
    launcher_.widen(opencl_stream(stream), weights.norm_hidden, norm_in(packed, 1), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& embedding, const ops::TensorView& hidden, const ops::Buffer& packed,
               const ops::TensorView& x, ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    const int64_t width = problem_.hidden;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place both = scratch.take(workspace_bytes(n));
      launcher_.norm(stream, row_place(embedding, first, width), n, width, problem_.eps, norm_in(packed, 0), 0.0f, both, 2 * width);
      const Place second{both.buffer, both.offset_bytes + static_cast<size_t>(width) * dtype_size(problem_.activation)};
      launcher_.norm(stream, row_place(hidden, first, width), n, width, problem_.eps, norm_in(packed, 1), 0.0f, second, 2 * width);
      launcher_.multiply(stream, fc_, packed, both, n, Epilogue::kStore, row_place(x, first, width));
    }
  }

 private:
  [[nodiscard]] Place norm_in(const ops::Buffer& packed, size_t which) const {
    return place_in(packed, norms_at_ + which * static_cast<size_t>(problem_.hidden) * sizeof(float));
  }

  ops::MtpIn::Problem problem_;
  LinearLauncher launcher_;
  PackedLinear fc_;
  size_t norms_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const LinearLauncher launcher, LinearLauncher::create(opencl_device(device), problem.activation, {problem.fc}));
  return std::unique_ptr<ops::MtpIn::Kernel>(std::make_unique<MtpInKernel>(problem, launcher));
}

}  // namespace quern::opencl::plain
