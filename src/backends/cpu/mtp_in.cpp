#include "backends/cpu/norm_rows.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"

namespace quern::cpu::plain {

namespace {

/// Packed: fc, then the factors of both norms in f32.
class MtpInKernel final : public ops::MtpIn::Kernel {
 public:
  MtpInKernel(const ops::MtpIn::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), math_(vector_math(path)), fc_(problem.fc, 0, path), norms_at_(fc_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(max_rows_in_memory(path_, max_rows) * row_stride(2 * problem_.hidden));
  }
  void pack(const ops::MtpIn::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    fc_.pack(weights.fc, packed, pool_);
    auto* norms = reinterpret_cast<float*>(packed.address() + norms_at_);
    load_norm_1p(weights.norm_embedding, norms);
    load_norm_1p(weights.norm_hidden, norms + problem_.hidden);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& embedding, const ops::TensorView& hidden, const ops::Buffer& packed,
               const ops::TensorView& x, ops::Launch& launch) const override {
    const auto* norms = reinterpret_cast<const float*>(packed.address() + norms_at_);
    const int64_t width = problem_.hidden;
    for_each_row_tile(rows, path_, [&](int64_t first, int64_t n, LinearPath path) {
      Scratch scratch(launch.workspace);
      const int64_t stride = row_stride(2 * width);
      float* both = scratch.take<float>(rows_in_memory(path, n) * stride);
      norm_rows(pool_, math_, embedding, first, n, width, norms, problem_.eps, input_scale(path), both, stride);
      norm_rows(pool_, math_, hidden, first, n, width, norms + width, problem_.eps, input_scale(path), both + width, stride);
      prepare_inputs(pool_, math_, path, n, 2 * width, both, stride);
      linear(pool_, std::array{fc_.view(packed, path)}, both, n, [&](size_t, int64_t row, int64_t feature, int64_t features, const float* y) {
        math_.store(y, features, x.dtype, element_address(x, first + row, width, feature));
      });
    });
  }

 private:
  ops::MtpIn::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  PackedLinear fc_;
  size_t norms_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::MtpIn::Kernel>(std::make_unique<MtpInKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
