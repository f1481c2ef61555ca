#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

template <class Linears>
class HeadKernel final : public ops::Head::Kernel {
 public:
  HeadKernel(const ops::Head::Problem& problem, const VectorLauncher& vectors, Linears linears)
      : problem_(problem), vectors_(vectors), linears_(std::move(linears)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return problem_.tied ? 0 : linears_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.scratch_bytes(std::min(max_rows, kRowTile)); }
  [[nodiscard]] std::string_view table_layout() const override { return kRowsLayout; }
  void pack(const ops::LinearSource& lm_head, ops::Buffer& packed, ops::Stream& stream) const override {
    CHECK(!problem_.tied);
    linears_.pack(0, lm_head, packed, opencl_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows, const ops::Buffer& packed,
               const ops::TensorView& hidden, const ops::TensorView& logits, ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    Stream& stream = opencl_stream(launch.stream);
    vectors_.norm(stream, place_of(x), rows.num_rows, problem_.hidden, problem_.eps, place_of(norm), 1.0f, place_of(hidden), problem_.hidden);
    const int64_t num_logits = logit_rows.empty() ? 0 : logit_rows.shape[0];
    for (int64_t first = 0; first < num_logits; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, num_logits - first);
      Scratch scratch(launch.workspace);
      const RowSegment all{0, n, ops::RowKind::kDecode};
      const Place to = row_place(logits, first, problem_.vocab_size);
      linears_.multiply(stream, packed, {place_of(hidden), row_place(logit_rows, first, 1), n, {}, 0.0f}, {&all, 1}, {&to, 1}, scratch);
    }
  }

 private:
  ops::Head::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
};

template <class Linears>
Result<std::unique_ptr<ops::Head::Kernel>> make_on(const ops::Head::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.lm_head}, Epilogue::kStoreF32}));
  return std::unique_ptr<ops::Head::Kernel>(std::make_unique<HeadKernel<Linears>>(problem, vectors, std::move(linears)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }
Result<std::unique_ptr<ops::Head::Kernel>> plain::make(const ops::Head::Problem& problem, ops::Device& device) { return make_on<PlainLinears>(problem, opencl_device(device)); }

ops::Verdict dpas::accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.tied) return ops::refuse("a tied head reads the embedding's rows, which are not in tiles");
  return accepts_linears(traits, problem.activation, {problem.lm_head});
}
Result<std::unique_ptr<ops::Head::Kernel>> dpas::make(const ops::Head::Problem& problem, ops::Device& device) { return make_on<DpasLinears>(problem, opencl_device(device)); }

}  // namespace quern::opencl
