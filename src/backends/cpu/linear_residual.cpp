#include "backends/cpu/norm_rows.h"
#include "backends/cpu/numeric.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "backends/cpu/vector_math.h"

namespace quern::cpu::plain {

namespace {

class LinearResidualKernel final : public ops::LinearResidual::Kernel {
 public:
  LinearResidualKernel(const ops::LinearResidual::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), math_(vector_math(path)), weight_(problem.linear, 0, path) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return weight_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(max_rows_in_memory(path_, max_rows) * row_stride(problem_.linear.in_features));
  }
  void pack(const ops::LinearSource& weight, ops::Buffer& packed, ops::Stream&) const override { weight_.pack(weight, packed, pool_); }

  void enqueue(const ops::Rows& rows, const ops::Activation& in, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    const int64_t in_features = problem_.linear.in_features, out_features = problem_.linear.out_features;
    for_each_row_tile(rows, path_, [&](int64_t first, int64_t n, LinearPath path) {
      Scratch scratch(launch.workspace);
      const int64_t stride = row_stride(in_features);
      float* values = scratch.take<float>(rows_in_memory(path, n) * stride);
      pool_.parallel_for(n, in_features / 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
          if (in_features > 0) math_.load(row_address(in.data, first + row, in_features), in.data.dtype, in_features, values + row * stride);
          math_.round(DType::kF32, input_scale(path), values + row * stride, in_features);
        }
      });
      prepare_inputs(pool_, math_, path, n, in_features, values, stride);
      linear(pool_, std::array{weight_.view(packed, path)}, values, n, [&](size_t, int64_t row, int64_t feature, int64_t features, float* y) {
        std::byte* place = element_address(x, first + row, out_features, feature);
        math_.round(x.dtype, 1.0f, y, features);
        if (problem_.add_residual) {
          float residual[kFeatureTile];
          math_.load(place, x.dtype, features, residual);
          for (int64_t i = 0; i < features; ++i) y[i] += residual[i];
        }
        math_.store(y, features, x.dtype, place);
      });
    });
  }

 private:
  ops::LinearResidual::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
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
