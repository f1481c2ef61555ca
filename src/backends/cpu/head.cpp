#include "backends/cpu/norm_rows.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"

namespace quern::cpu::plain {

namespace {

class HeadKernel final : public ops::Head::Kernel {
 public:
  HeadKernel(const ops::Head::Problem& problem, ThreadPool& pool, LinearPath path) : problem_(problem), pool_(pool), path_(path), math_(vector_math(path)), lm_head_(problem.lm_head, 0, path) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return problem_.tied ? 0 : lm_head_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    return Scratch::size<float>(problem_.hidden) + Scratch::size<float>(max_rows_in_memory(path_, max_rows) * row_stride(problem_.hidden));
  }
  [[nodiscard]] std::string_view table_layout() const override { return cpu::table_layout(path_); }
  void pack(const ops::LinearSource& lm_head, ops::Buffer& packed, ops::Stream&) const override {
    CHECK(!problem_.tied);
    lm_head_.pack(lm_head, packed, pool_);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows,
               const ops::Buffer& packed, const ops::TensorView& hidden, const ops::TensorView& logits,
               ops::Launch& launch) const override {
    const LinearView lm_head = lm_head_.view(packed);
    const int64_t width = problem_.hidden, stride = row_stride(width);
    Scratch scratch(launch.workspace);
    float* factors = scratch.take<float>(width);
    float* values = scratch.take<float>(max_rows_in_memory(path_, std::max<int64_t>(rows.num_rows, logit_rows.shape[0])) * stride);
    load_norm_1p(norm, factors);
    for (int64_t first = 0; first < rows.num_rows; first += row_tile(path_)) {
      const int64_t n = std::min(row_tile(path_), rows.num_rows - first);
      norm_rows(pool_, math_, x, first, n, width, factors, problem_.eps, 1.0f, values, stride);
      for (int64_t row = 0; row < n; ++row) math_.store(values + row * stride, width, hidden.dtype, row_address(hidden, first + row, width));
    }
    for (int64_t first = 0; first < logit_rows.shape[0]; first += row_tile(path_)) {
      const int64_t n = std::min(row_tile(path_), logit_rows.shape[0] - first);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t row = logit_rows.data<int32_t>()[first + i];
        float* input = values + i * stride;
        if (row < 0) {
          std::fill_n(input, width, 0.0f);
        } else {
          math_.load(row_address(hidden, row, width), hidden.dtype, width, input);
          math_.round(DType::kF32, input_scale(path_), input, width);
        }
      }
      prepare_inputs(pool_, math_, path_, n, width, values, stride);
      auto* out = logits.data<float>() + first * problem_.vocab_size;
      linear(pool_, std::array{lm_head}, values, n, [&](size_t, int64_t row, int64_t feature, int64_t features, const float* y) {
        std::copy_n(y, features, out + row * problem_.vocab_size + feature);
      });
    }
  }

 private:
  ops::Head::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  PackedLinear lm_head_;
};

}  // namespace

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::Head::Kernel>(std::make_unique<HeadKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
