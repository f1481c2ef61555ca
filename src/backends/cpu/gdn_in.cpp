#include "backends/cpu/norm_rows.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"

namespace quern::cpu::plain {

namespace {

/// Packed: qkv, z, b, a, then the norm's factors in f32.
class GdnInKernel final : public ops::GdnIn::Kernel {
 public:
  GdnInKernel(const ops::GdnIn::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem),
        pool_(pool),
        path_(path), math_(vector_math(path)),
        qkv_(problem.qkv, 0, path),
        z_(problem.z, qkv_.end_bytes(), path),
        b_(problem.b, z_.end_bytes(), path),
        a_(problem.a, b_.end_bytes(), path),
        norm_at_(a_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(max_rows_in_memory(path_, max_rows) * row_stride(problem_.hidden));
  }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    qkv_.pack(weights.qkv, packed, pool_);
    z_.pack(weights.z, packed, pool_);
    b_.pack(weights.b, packed, pool_);
    a_.pack(weights.a, packed, pool_);
    load_norm_1p(weights.norm, reinterpret_cast<float*>(packed.address() + norm_at_));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out,
               ops::Launch& launch) const override {
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norm_at_);
    for_each_row_tile(rows, path_, [&](int64_t first, int64_t n, LinearPath path) {
      Scratch scratch(launch.workspace);
      const int64_t stride = row_stride(problem_.hidden);
      float* normed = scratch.take<float>(rows_in_memory(path, n) * stride);
      norm_rows(pool_, math_, x, first, n, problem_.hidden, norm, problem_.eps, input_scale(path), normed, stride);
      prepare_inputs(pool_, math_, path, n, problem_.hidden, normed, stride);
      const std::array weights{qkv_.view(packed, path), z_.view(packed, path), b_.view(packed, path), a_.view(packed, path)};
      const std::array outputs{&out.qkv, &out.z, &out.b, &out.a};
      linear(pool_, weights, normed, n, [&](size_t w, int64_t row, int64_t feature, int64_t features, const float* y) {
        math_.store(y, features, outputs[w]->dtype, element_address(*outputs[w], first + row, weights[w].out_features, feature));
      });
    });
  }

 private:
  ops::GdnIn::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  PackedLinear qkv_, z_, b_, a_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::GdnIn::Kernel>(std::make_unique<GdnInKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
