#include "backends/cpu/norm_rows.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"

namespace quern::cpu::plain {

namespace {

/// Packed: gate, up, then the norm's factors in f32.
class MlpInKernel final : public ops::MlpIn::Kernel {
 public:
  MlpInKernel(const ops::MlpIn::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), gate_(problem.gate, 0, path), up_(problem.up, gate_.end_bytes(), path), norm_at_(up_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, kRowTile);
    return Scratch::size<float>(rows * problem_.hidden) + Scratch::size<float>(rows * problem_.intermediate);
  }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    gate_.pack(weights.gate, packed, pool_);
    up_.pack(weights.up, packed, pool_);
    load_norm_1p(weights.norm, reinterpret_cast<float*>(packed.address() + norm_at_));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out,
               ops::Launch& launch) const override {
    const LinearView gate = gate_.view(packed), up = up_.view(packed);
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norm_at_);
    const DType dtype = problem_.activation;
    const int64_t width = problem_.intermediate;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      float* normed = scratch.take<float>(n * problem_.hidden);
      float* gated = scratch.take<float>(n * width);
      norm_rows(pool_, x, first, n, problem_.hidden, norm, problem_.eps, normed, problem_.hidden);
      linear(pool_, gate, normed, n,
             [&](int64_t row, int64_t feature, float y) { gated[row * width + feature] = round_to(dtype, silu(round_to(dtype, y))); });
      linear(pool_, up, normed, n, [&](int64_t row, int64_t feature, float y) {
        y = gated[row * width + feature] * round_to(dtype, y);
        store_f32(&y, 1, dtype, row_address(out.data, first + row, width) + static_cast<size_t>(feature) * dtype_size(dtype));
      });
    }
  }

 private:
  ops::MlpIn::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  PackedLinear gate_, up_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits&) {
  return accepts_activation(problem.activation, problem.out);
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::MlpIn::Kernel>(std::make_unique<MlpInKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
