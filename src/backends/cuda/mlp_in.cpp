#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

/// Packed: gate, up, then the norm's factors in f32.
template <class Linears>
class MlpInKernel final : public ops::MlpIn::Kernel {
 public:
  MlpInKernel(const ops::MlpIn::Problem& problem, const Linears& linears)
      : problem_(problem), linears_(linears), gate_(problem.gate, 0), up_(problem.up, gate_.end_bytes()), norm_at_(up_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, Linears::kRowTile);
    return normed_bytes(rows) + Linears::operand_bytes(rows, problem_.hidden);
  }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(gate_, weights.gate, packed, stream);
    linears_.pack(up_, weights.up, packed, stream);
    linears_.widen(cuda_stream(stream), weights.norm, reinterpret_cast<float*>(packed.address() + norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    Stream& stream = cuda_stream(launch.stream);
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norm_at_);
    const DType dtype = problem_.activation;
    for (int64_t first = 0; first < rows.num_rows; first += Linears::kRowTile) {
      const int64_t n = std::min<int64_t>(Linears::kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      std::byte* normed = scratch.take(normed_bytes(n));
      std::byte* to = row_address(out.data, first, problem_.intermediate);
      linears_.norm(stream, dtype, row_address(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, norm, 0.0f, normed, problem_.hidden);
      const auto operand = linears_.operand(stream, scratch, normed, nullptr, n, {&gate_, &up_});
      linears_.multiply(stream, gate_, packed, dtype, operand, n, Epilogue::kSilu, to);
      linears_.multiply(stream, up_, packed, dtype, operand, n, Epilogue::kMultiply, to);
    }
  }

 private:
  [[nodiscard]] size_t normed_bytes(int64_t rows) const { return Scratch::size(static_cast<size_t>(rows * problem_.hidden) * dtype_size(problem_.activation)); }

  ops::MlpIn::Problem problem_;
  Linears linears_;
  typename Linears::Packed gate_, up_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_activation(traits, problem.activation, problem.out);
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device) { return make_on<ops::MlpIn, MlpInKernel, LinearLauncher>(problem, device); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  return TiledLinears::accepts(problem.activation, {problem.gate, problem.up});
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device) { return make_on<ops::MlpIn, plain::MlpInKernel, TiledLinears>(problem, device); }

}  // namespace quern::cuda::mma

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.gate, problem.up});
}

Result<std::unique_ptr<ops::MlpIn::Kernel>> make(const ops::MlpIn::Problem& problem, ops::Device& device) { return make_on<ops::MlpIn, plain::MlpInKernel, E4M3Linears>(problem, device); }

}  // namespace quern::cuda::e4m3
