#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

/// Packed: qkv, z, b, a, then the norm's factors in f32.
template <class Linears>
class GdnInKernel final : public ops::GdnIn::Kernel {
 public:
  GdnInKernel(const ops::GdnIn::Problem& problem, const Linears& linears)
      : problem_(problem),
        linears_(linears),
        qkv_(problem.qkv, 0),
        z_(problem.z, qkv_.end_bytes()),
        b_(problem.b, z_.end_bytes()),
        a_(problem.a, b_.end_bytes()),
        norm_at_(a_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, Linears::kRowTile);
    return normed_bytes(rows) + Linears::operand_bytes(rows, problem_.hidden);
  }
  void pack(const ops::GdnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(qkv_, weights.qkv, packed, stream);
    linears_.pack(z_, weights.z, packed, stream);
    linears_.pack(b_, weights.b, packed, stream);
    linears_.pack(a_, weights.a, packed, stream);
    linears_.widen(cuda_stream(stream), weights.norm, reinterpret_cast<float*>(packed.address() + norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::GdnInputs& out,
               ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norm_at_);
    for (int64_t first = 0; first < rows.num_rows; first += Linears::kRowTile) {
      const int64_t n = std::min<int64_t>(Linears::kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      std::byte* normed = scratch.take(normed_bytes(n));
      linears_.norm(stream, problem_.activation, row_address(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, norm, 0.0f, normed, problem_.hidden);
      const auto operand = linears_.operand(stream, scratch, normed, nullptr, n, {&qkv_, &z_, &b_, &a_});
      const auto project = [&](const typename Linears::Packed& weight, const ops::TensorView& to) {
        if (weight.shape().out_features == 0) return;
        linears_.multiply(stream, weight, packed, problem_.activation, operand, n, Epilogue::kStore, row_address(to, first, weight.shape().out_features));
      };
      project(qkv_, out.qkv);
      project(z_, out.z);
      project(b_, out.b);
      project(a_, out.a);
    }
  }

 private:
  [[nodiscard]] size_t normed_bytes(int64_t rows) const { return Scratch::size(static_cast<size_t>(rows * problem_.hidden) * dtype_size(problem_.activation)); }

  ops::GdnIn::Problem problem_;
  Linears linears_;
  typename Linears::Packed qkv_, z_, b_, a_;
  size_t norm_at_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device) { return make_on<ops::GdnIn, GdnInKernel, LinearLauncher>(problem, device); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  return TiledLinears::accepts(problem.activation, {problem.qkv, problem.z, problem.b, problem.a});
}

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device) { return make_on<ops::GdnIn, plain::GdnInKernel, TiledLinears>(problem, device); }

}  // namespace quern::cuda::mma

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::GdnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.qkv, problem.z, problem.b, problem.a});
}

Result<std::unique_ptr<ops::GdnIn::Kernel>> make(const ops::GdnIn::Problem& problem, ops::Device& device) { return make_on<ops::GdnIn, plain::GdnInKernel, E4M3Linears>(problem, device); }

}  // namespace quern::cuda::e4m3
