#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

/// Packed: fc, then the factors of both norms in f32.
class MtpInKernel final : public ops::MtpIn::Kernel {
 public:
  MtpInKernel(const ops::MtpIn::Problem& problem, Linears linears)
      : problem_(problem), linears_(std::move(linears)), layer_({.parts = {problem.fc}}, 0), norms_at_(layer_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_); }
  void pack(const ops::MtpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weights.fc}}, packed, linears_.packers(), cuda_stream(stream));
    linears_.packers().pack_norm(cuda_stream(stream), weights.norm_embedding, norms(packed));
    linears_.packers().pack_norm(cuda_stream(stream), weights.norm_hidden, norms(packed) + problem_.hidden);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& embedding, const ops::TensorView& hidden, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    const int64_t width = problem_.hidden;
    linears_.enqueue_filled(
        cuda_stream(launch.stream), layer_, packed, RowSplit(rows), launch.workspace,
        [&](QuantiseArgs args, int64_t row, Stream& stream) {
          args.eps = problem_.eps;
          args.in_stride = width;
          args.k_blocks = static_cast<int32_t>(width / 128);
          for (int i = 0; i < 2; ++i) {
            args.in = row_data(i == 0 ? embedding : hidden, row, width);
            args.norm = norms(packed) + i * width;
            args.first_block = i * args.k_blocks;
            linears_.quantise(stream, args);
          }
        },
        [&](LinearLayer& linear, int64_t row) {
          linear.segments[0].out = row_data(x, row, width);
          linear.segments[0].stride = width;
        });
  }

 private:
  [[nodiscard]] float* norms(const ops::Buffer& packed) const { return reinterpret_cast<float*>(packed.address() + norms_at_); }

  ops::MtpIn::Problem problem_;
  Linears linears_;
  TileLayer layer_;
  size_t norms_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_activation(problem.activation); !verdict.accepted) return verdict;
  if (problem.hidden % ops::kScaleBlock != 0 || problem.hidden > kMaxNormWidth)
    return ops::refuse("rows of {} are not normed; multiples of {} up to {} are", problem.hidden, ops::kScaleBlock, kMaxNormWidth);
  return TileLayer::accepts({.parts = {problem.fc}}, traits);
}

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device, PromptShape shape) {
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  return std::unique_ptr<ops::MtpIn::Kernel>(std::make_unique<MtpInKernel>(problem, std::move(linears)));
}

}  // namespace quern::cuda::sm90
