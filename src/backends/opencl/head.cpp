#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

class HeadKernel final : public ops::Head::Kernel {
 public:
  HeadKernel(const ops::Head::Problem& problem, const LinearLauncher& launcher) : problem_(problem), launcher_(launcher), lm_head_(problem.lm_head, 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return problem_.tied ? 0 : lm_head_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return kRowsLayout; }
  void pack(const ops::LinearSource& lm_head, ops::Buffer& packed, ops::Stream& stream) const override {
    CHECK(!problem_.tied);
    lm_head_.pack(lm_head, packed, opencl_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows,
               const ops::Buffer& packed, const ops::TensorView& hidden, const ops::TensorView& logits,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    Stream& stream = opencl_stream(launch.stream);
    launcher_.norm(stream, place_of(x), rows.num_rows, problem_.hidden, problem_.eps, place_of(norm), 1.0f, place_of(hidden), problem_.hidden);
    if (logit_rows.empty()) return;
    launcher_.multiply(stream, lm_head_, packed, place_of(hidden), logit_rows.shape[0], Epilogue::kStoreF32, place_of(logits), place_of(logit_rows));
  }

 private:
  ops::Head::Problem problem_;
  LinearLauncher launcher_;
  PackedLinear lm_head_;
};

}  // namespace

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const LinearLauncher launcher, LinearLauncher::create(opencl_device(device), problem.activation, {problem.lm_head}));
  return std::unique_ptr<ops::Head::Kernel>(std::make_unique<HeadKernel>(problem, launcher));
}

}  // namespace quern::opencl::plain
