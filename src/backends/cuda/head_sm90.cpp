#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

class HeadKernel final : public ops::Head::Kernel {
 public:
  HeadKernel(const ops::Head::Problem& problem, Linears linears) : problem_(problem), linears_(std::move(linears)), layer_({.parts = {problem.lm_head}}, 0) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return layer_.end_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(std::min<int64_t>(max_rows, kMaxDecodeRows), layer_); }
  [[nodiscard]] std::string_view table_layout() const override { return "cuda.sm90.tiles"; }
  void pack(const ops::LinearSource& lm_head, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&lm_head}}, packed, linears_.packers(), cuda_stream(stream));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows, const ops::Buffer& packed,
               const ops::TensorView& hidden, const ops::TensorView& logits, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    QuantiseArgs all;
    all.in = row_data(x);
    all.in_stride = problem_.hidden;
    all.norm = norm.data<float>();
    all.norm_offset = 1;
    all.eps = problem_.eps;
    all.k_blocks = static_cast<int32_t>(problem_.hidden / 128);
    all.rows = rows.num_rows;
    all.out = row_data(hidden);
    if (logit_rows.empty() && rows.num_rows > 0) linears_.quantise(stream, all);
    // One arithmetic for the rows of both kinds: that of decode rows.
    RowSplit split;
    split.decode = logit_rows.empty() ? 0 : logit_rows.shape[0];
    linears_.enqueue_filled(
        stream, layer_, packed, split, launch.workspace,
        [&](const QuantiseArgs& places, int64_t row, Stream&) {
          QuantiseArgs named = all;
          named.rows_of = logit_rows.data<int32_t>() + row;
          named.rows = places.rows;
          named.x_rows = places.x_rows;
          named.x8 = places.x8;
          named.x_scale = places.x_scale;
          named.x16 = places.x16;
          named.out = nullptr;
          if (row == 0) linears_.norm_pair(stream, all, named);
          else linears_.quantise(stream, named);
        },
        [&](LinearLayer& linear, int64_t row) {
          linear.epilogue = Epilogue::kLogits;
          linear.segments[0].out = logits.data<float>() + row * problem_.vocab_size;
          linear.segments[0].stride = problem_.vocab_size;
        });
  }

 private:
  ops::Head::Problem problem_;
  Linears linears_;
  TileLayer layer_;
};

}  // namespace

ops::Verdict accepts(const ops::Head::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_activation(problem.activation); !verdict.accepted) return verdict;
  if (problem.tied) return ops::refuse("a tied table stays in rows, as embed reads it");
  if (problem.hidden > kMaxNormWidth) return ops::refuse("rows of {} are normed up to {}", problem.hidden, kMaxNormWidth);
  return TileLayer::accepts({.parts = {problem.lm_head}}, traits);
}

Result<std::unique_ptr<ops::Head::Kernel>> make(const ops::Head::Problem& problem, ops::Device& device, PromptShape shape) {
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  return std::unique_ptr<ops::Head::Kernel>(std::make_unique<HeadKernel>(problem, std::move(linears)));
}

}  // namespace quern::cuda::sm90
