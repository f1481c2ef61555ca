#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

/// Packed: fc, then the factors of both norms in f32.
template <class Linears>
class MtpInKernel final : public ops::MtpIn::Kernel {
 public:
  MtpInKernel(const ops::MtpIn::Problem& problem, const Linears& linears)
      : problem_(problem), linears_(linears), fc_(problem.fc, 0), norms_at_(fc_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, Linears::kRowTile);
    return normed_bytes(rows) + Linears::operand_bytes(rows, 2 * problem_.hidden);
  }
  void pack(const ops::MtpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(fc_, weights.fc, packed, stream);
    auto* norms = reinterpret_cast<float*>(packed.address() + norms_at_);
    linears_.widen(cuda_stream(stream), weights.norm_embedding, norms, 1.0f);
    linears_.widen(cuda_stream(stream), weights.norm_hidden, norms + problem_.hidden, 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& embedding, const ops::TensorView& hidden, const ops::Buffer& packed,
               const ops::TensorView& x, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    const auto* norms = reinterpret_cast<const float*>(packed.address() + norms_at_);
    const DType dtype = problem_.activation;
    const int64_t width = problem_.hidden;
    for (int64_t first = 0; first < rows.num_rows; first += Linears::kRowTile) {
      const int64_t n = std::min<int64_t>(Linears::kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      std::byte* both = scratch.take(normed_bytes(n));
      linears_.norm(stream, dtype, row_address(embedding, first, width), n, width, problem_.eps, norms, 0.0f, both, 2 * width);
      linears_.norm(stream, dtype, row_address(hidden, first, width), n, width, problem_.eps, norms + width, 0.0f,
                     both + static_cast<size_t>(width) * dtype_size(dtype), 2 * width);
      const auto operand = linears_.operand(stream, scratch, both, nullptr, n, {&fc_});
      linears_.multiply(stream, fc_, packed, dtype, operand, n, Epilogue::kStore, row_address(x, first, width));
    }
  }

 private:
  [[nodiscard]] size_t normed_bytes(int64_t rows) const { return Scratch::size(static_cast<size_t>(rows * 2 * problem_.hidden) * dtype_size(problem_.activation)); }

  ops::MtpIn::Problem problem_;
  Linears linears_;
  typename Linears::Packed fc_;
  size_t norms_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device) { return make_on<ops::MtpIn, MtpInKernel, LinearLauncher>(problem, device); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  return TiledLinears::accepts(problem.activation, {problem.fc});
}

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device) { return make_on<ops::MtpIn, plain::MtpInKernel, TiledLinears>(problem, device); }

}  // namespace quern::cuda::mma

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::MtpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.fc});
}

Result<std::unique_ptr<ops::MtpIn::Kernel>> make(const ops::MtpIn::Problem& problem, ops::Device& device) { return make_on<ops::MtpIn, plain::MtpInKernel, E4M3Linears>(problem, device); }

}  // namespace quern::cuda::e4m3
