#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

/// Packed: gate, up, then the norm's factors in f32.
class MlpInKernel final : public ops::MlpIn::Kernel {
 public:
  MlpInKernel(const ops::MlpIn::Problem& problem, const LinearLauncher& launcher)
      : problem_(problem), launcher_(launcher), gate_(problem.gate, 0), up_(problem.up, gate_.end_bytes()), norm_at_(up_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size(static_cast<size_t>(std::min(max_rows, kRowTile) * problem_.hidden) * dtype_size(problem_.activation));
  }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    gate_.pack(weights.gate, packed, opencl_stream(stream));
    up_.pack(weights.up, packed, opencl_stream(stream));
    launcher_.widen(opencl_stream(stream), weights.norm, place_in(packed, norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    Stream& stream = opencl_stream(launch.stream);
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place normed = scratch.take(workspace_bytes(n));
      const Place to = row_place(out.data, first, problem_.intermediate);
      launcher_.norm(stream, row_place(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, place_in(packed, norm_at_), 0.0f, normed, problem_.hidden);
      launcher_.multiply(stream, gate_, packed, normed, n, Epilogue::kSilu, to);
      launcher_.multiply(stream, up_, packed, normed, n, Epilogue::kMultiply, to);
    }
  }

 private:
  ops::MlpIn::Problem problem_;
  LinearLauncher launcher_;
  PackedLinear gate_, up_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_activation(traits, problem.activation, problem.out);
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const LinearLauncher launcher, LinearLauncher::create(opencl_device(device), problem.activation, {problem.gate, problem.up}));
  return std::unique_ptr<ops::MlpIn::Kernel>(std::make_unique<MlpInKernel>(problem, launcher));
}

}  // namespace quern::opencl::plain
