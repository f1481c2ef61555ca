#include "backends/cpu/numeric.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"

namespace quern::cpu::plain {

namespace {

class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), weight_(problem.linear, 0, path) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return weight_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(std::min(max_rows, kRowTile) * problem_.linear.in_features);
  }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream&) const override { weight_.pack(weight, packed, pool_); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    const LinearView weight = weight_.view(packed);
    const int64_t in_features = weight.in_features, out_features = weight.out_features;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      float* values = scratch.take<float>(n * in_features);
      if (in_features > 0) load_f32(row_address(in.data, first, in_features), in.data.dtype, n * in_features, values);
      linear(pool_, weight, values, n, [&](int64_t row, int64_t feature, float y) {
        std::byte* element = row_address(x, first + row, out_features) + static_cast<size_t>(feature) * dtype_size(x.dtype);
        y = round_to(x.dtype, y);
        if (problem_.add_residual) {
          float residual = 0;
          load_f32(element, x.dtype, 1, &residual);
          y += residual;
        }
        store_f32(&y, 1, x.dtype, element);
      });
    }
  }

 private:
  ops::LinearResidual::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  PackedLinear weight_;
};

}  // namespace

ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits&) {
  return accepts_activation(problem.activation, problem.in);
}

Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::LinearResidual::Kernel>(std::make_unique<LinearResidualKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
