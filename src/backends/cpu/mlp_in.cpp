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
      : problem_(problem), pool_(pool), path_(path), math_(vector_math(path)), gate_(problem.gate, 0, path), up_(problem.up, gate_.end_bytes(), path), norm_at_(up_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(max_rows_in_memory(path_, max_rows) * row_stride(problem_.hidden));
  }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    gate_.pack(weights.gate, packed, pool_);
    up_.pack(weights.up, packed, pool_);
    load_norm_1p(weights.norm, reinterpret_cast<float*>(packed.address() + norm_at_));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out,
               ops::Launch& launch) const override {
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norm_at_);
    const DType dtype = problem_.activation;
    const int64_t width = problem_.intermediate;
    for_each_row_tile(rows, path_, [&](int64_t first, int64_t n, LinearPath path) {
      const LinearView gate = gate_.view(packed, path), up = up_.view(packed, path);
      Scratch scratch(launch.workspace);
      const int64_t stride = row_stride(problem_.hidden);
      float* normed = scratch.take<float>(rows_in_memory(path, n) * stride);
      norm_rows(pool_, math_, x, first, n, problem_.hidden, norm, problem_.eps, input_scale(path), normed, stride);
      prepare_inputs(pool_, math_, path, n, problem_.hidden, normed, stride);
      const int64_t tile_cost = 2 * kFeatureTile * problem_.hidden * (n + 2);
      pool_.parallel_for(ceil_div(width, kFeatureTile), tile_cost, [&](int64_t begin, int64_t end, int) {
        alignas(64) float gates[kMaxRowTile * kFeatureTile], values[kMaxRowTile * kFeatureTile];
        for (int64_t feature = begin * kFeatureTile; feature < std::min(end * kFeatureTile, width); feature += kFeatureTile) {
          const int64_t features = std::min(kFeatureTile, width - feature);
          multiply_tile(gate, normed, n, feature, features, gates);
          multiply_tile(up, normed, n, feature, features, values);
          for (int64_t row = 0; row < n; ++row) {
            float* y = values + row * kFeatureTile;
            math_.round(dtype, 1.0f, y, features);
            math_.round(dtype, 1.0f, gates + row * kFeatureTile, features);
            math_.multiply_silu(dtype, y, gates + row * kFeatureTile, features);
            math_.store(y, features, dtype, element_address(out.data, first + row, width, feature));
          }
        }
      });
    });
  }

 private:
  ops::MlpIn::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
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
