#include "backends/cuda/attention_args.h"
#include "backends/cuda/e4m3.h"
#include "backends/cuda/linears_e4m3.h"
#include "backends/cuda/linears_mma.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/rotate.h"
#include "ops/kv_dtype.h"

namespace quern::cuda::plain {

namespace {

/// Packed: q, k, v, then in f32 the factors of the input norm, then the tables of Rotate.
template <class Linears>
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, const Linears& linears, Rotate rotate)
      : problem_(problem),
        linears_(linears),
        rotate_(std::move(rotate)),
        q_(problem.q, 0),
        k_(problem.k, q_.end_bytes()),
        v_(problem.v, k_.end_bytes()),
        norm_at_(v_.end_bytes()),
        tables_at_(norm_at_ + static_cast<size_t>(problem.hidden) * sizeof(float)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return tables_at_ + rotate_.table_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, Linears::kRowTile);
    return bytes(rows * problem_.hidden) + bytes(rows * q_width()) + 2 * bytes(rows * kv_width()) + Linears::operand_bytes(rows, problem_.hidden);
  }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(q_, weights.q, packed, stream);
    linears_.pack(k_, weights.k, packed, stream);
    linears_.pack(v_, weights.v, packed, stream);
    const Rotate::Tables tables = rotate_.tables_at(packed, tables_at_);
    linears_.widen(cuda_stream(stream), weights.norm, norm_in(packed), 1.0f);
    linears_.widen(cuda_stream(stream), weights.q_norm, tables.q_norm, 1.0f);
    linears_.widen(cuda_stream(stream), weights.k_norm, tables.k_norm, 1.0f);
    rotate_.pack(packed, tables_at_, stream);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query,
               const ops::TensorView& gate, const ops::KvCacheView& kv, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    RotateArgs args = rotate_.arguments(rows, rotate_.tables_at(packed, tables_at_), query, gate, kv);
    const DType dtype = problem_.activation;
    for (int64_t first = 0; first < rows.num_rows; first += Linears::kRowTile) {
      const int64_t n = std::min<int64_t>(Linears::kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      std::byte* normed = scratch.take(bytes(n * problem_.hidden));
      std::byte* q = scratch.take(bytes(n * q_width()));
      std::byte* k = scratch.take(bytes(n * kv_width()));
      std::byte* v = scratch.take(bytes(n * kv_width()));
      linears_.norm(stream, dtype, row_address(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, norm_in(packed), 0.0f, normed, problem_.hidden);
      const auto operand = linears_.operand(stream, scratch, normed, nullptr, n, {&q_, &k_, &v_});
      linears_.multiply(stream, q_, packed, dtype, operand, n, Epilogue::kStore, q);
      linears_.multiply(stream, k_, packed, dtype, operand, n, Epilogue::kStore, k);
      linears_.multiply(stream, v_, packed, dtype, operand, n, Epilogue::kStore, v);
      args.first_row = static_cast<int32_t>(first);
      args.q = q;
      args.k = k;
      args.v = v;
      rotate_.launch(stream, args, n, false);
    }
  }

 private:
  [[nodiscard]] float* norm_in(const ops::Buffer& packed) const { return reinterpret_cast<float*>(packed.address() + norm_at_); }
  [[nodiscard]] size_t bytes(int64_t elements) const { return Scratch::size(static_cast<size_t>(elements) * dtype_size(problem_.activation)); }
  [[nodiscard]] int64_t q_width() const { return problem_.num_q_heads * 2 * problem_.head_dim; }
  [[nodiscard]] int64_t kv_width() const { return problem_.num_kv_heads * problem_.head_dim; }

  ops::AttnIn::Problem problem_;
  Linears linears_;
  Rotate rotate_;
  typename Linears::Packed q_, k_, v_;
  size_t norm_at_, tables_at_;
};

template <class Linears>
Result<std::unique_ptr<ops::AttnIn::Kernel>> make_on(const ops::AttnIn::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const Linears linears, Linears::create(device));
  ASSIGN_OR_RETURN(Rotate rotate, Rotate::create(problem, device));
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel<Linears>>(problem, linears, std::move(rotate)));
}

}  // namespace

KvCache kv_cache(const ops::KvCacheView& kv) {
  return {address_or_null<void>(kv.k), address_or_null<void>(kv.v), address_or_null<const float>(kv.k_scale), address_or_null<const float>(kv.v_scale), kv.k.dtype};
}

ops::Verdict accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = ops::accepts_kv(problem.kv, problem.activation); !verdict.accepted) return verdict;
  if (problem.head_dim > kMaxHeadDim) return ops::refuse("heads of {} elements; up to {} are supported", problem.head_dim, kMaxHeadDim);
  return accepts_activation(traits, problem.activation);
}

Result<std::unique_ptr<ops::AttnIn::Kernel>> make(const ops::AttnIn::Problem& problem, ops::Device& device) { return make_on<LinearLauncher>(problem, cuda_device(device)); }

}  // namespace quern::cuda::plain

namespace quern::cuda::mma {

ops::Verdict accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  return TiledLinears::accepts(problem.activation, {problem.q, problem.k, problem.v});
}

Result<std::unique_ptr<ops::AttnIn::Kernel>> make(const ops::AttnIn::Problem& problem, ops::Device& device) { return plain::make_on<TiledLinears>(problem, cuda_device(device)); }

}  // namespace quern::cuda::mma

namespace quern::cuda::e4m3 {

ops::Verdict accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = mma::accepts(problem, traits); !verdict.accepted) return verdict;
  return E4M3Linears::accepts(traits, {problem.q, problem.k, problem.v});
}

Result<std::unique_ptr<ops::AttnIn::Kernel>> make(const ops::AttnIn::Problem& problem, ops::Device& device) { return plain::make_on<E4M3Linears>(problem, cuda_device(device)); }

}  // namespace quern::cuda::e4m3
