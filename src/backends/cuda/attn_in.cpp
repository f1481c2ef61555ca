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

/// Packed: q, k, v, then in f32 the factors of the input norm, of q_norm and of k_norm, the frequencies and, i32, the axis of each.
template <class Linears>
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, const Linears& linears, Rotate rotate)
      : problem_(problem),
        linears_(linears),
        rotate_(rotate),
        q_(problem.q, 0),
        k_(problem.k, q_.end_bytes()),
        v_(problem.v, k_.end_bytes()),
        norms_at_(v_.end_bytes()) {
    // Which of the positions (t, h, w) each frequency turns with (interleaved mrope).
    for (size_t i = 0; i < problem.inv_freq.size(); ++i) {
      int32_t axis = 0;
      for (int32_t candidate = 1; candidate <= 2; ++candidate)
        if (i % 3 == static_cast<size_t>(candidate) &&
            static_cast<int64_t>(i) < 3 * int64_t{problem.mrope_section[static_cast<size_t>(candidate)]})
          axis = candidate;
      axis_.push_back(axis);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override {
    return norms_at_ + static_cast<size_t>(problem_.hidden + 2 * problem_.head_dim + 2 * num_frequencies()) * sizeof(float);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, Linears::kRowTile);
    return bytes(rows * problem_.hidden) + bytes(rows * q_width()) + 2 * bytes(rows * kv_width()) + Linears::operand_bytes(rows, problem_.hidden);
  }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(q_, weights.q, packed, stream);
    linears_.pack(k_, weights.k, packed, stream);
    linears_.pack(v_, weights.v, packed, stream);
    const Norms norms = norms_in(packed);
    linears_.widen(cuda_stream(stream), weights.norm, norms.input, 1.0f);
    linears_.widen(cuda_stream(stream), weights.q_norm, norms.q, 1.0f);
    linears_.widen(cuda_stream(stream), weights.k_norm, norms.k, 1.0f);
    if (num_frequencies() == 0) return;
    const auto offset = [&](const void* place) { return static_cast<size_t>(static_cast<const std::byte*>(place) - packed.address()); };
    stream.copy_to_device(problem_.inv_freq.data(), {&packed, offset(norms.inv_freq), DType::kF32, Shape{num_frequencies()}});
    stream.copy_to_device(axis_.data(), {&packed, offset(norms.axis), DType::kI32, Shape{num_frequencies()}});
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query,
               const ops::TensorView& gate, const ops::KvCacheView& kv, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    const Norms norms = norms_in(packed);
    const DType dtype = problem_.activation;
    for (int64_t first = 0; first < rows.num_rows; first += Linears::kRowTile) {
      const int64_t n = std::min<int64_t>(Linears::kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      std::byte* normed = scratch.take(bytes(n * problem_.hidden));
      std::byte* q = scratch.take(bytes(n * q_width()));
      std::byte* k = scratch.take(bytes(n * kv_width()));
      std::byte* v = scratch.take(bytes(n * kv_width()));
      linears_.norm(stream, dtype, row_address(x, first, problem_.hidden), n, problem_.hidden, problem_.eps, norms.input, 0.0f, normed, problem_.hidden);
      const auto operand = linears_.operand(stream, scratch, normed, nullptr, n, {&q_, &k_, &v_});
      linears_.multiply(stream, q_, packed, dtype, operand, n, Epilogue::kStore, q);
      linears_.multiply(stream, k_, packed, dtype, operand, n, Epilogue::kStore, k);
      linears_.multiply(stream, v_, packed, dtype, operand, n, Epilogue::kStore, v);
      RotateArgs args{};
      args.step = step_tables(rows);
      args.first_row = static_cast<int32_t>(first);
      args.num_q_heads = static_cast<int32_t>(problem_.num_q_heads);
      args.num_kv_heads = static_cast<int32_t>(problem_.num_kv_heads);
      args.head_dim = static_cast<int32_t>(problem_.head_dim);
      args.num_frequencies = static_cast<int32_t>(num_frequencies());
      args.activation = dtype;
      args.eps = problem_.eps;
      args.rope_scale = problem_.rope_scale;
      args.q = q;
      args.k = k;
      args.v = v;
      args.q_norm = norms.q;
      args.k_norm = norms.k;
      args.inv_freq = norms.inv_freq;
      args.axis = norms.axis;
      args.query = address_or_null<void>(query);
      args.gate = address_or_null<void>(gate);
      args.kv = kv_cache(kv);
      rotate_.launch(stream, args, n, false);
    }
  }

 private:
  struct Norms {
    float *input, *q, *k, *inv_freq;
    int32_t* axis;
  };
  [[nodiscard]] Norms norms_in(const ops::Buffer& packed) const {
    auto* input = reinterpret_cast<float*>(packed.address() + norms_at_);
    float* q = input + problem_.hidden;
    float* k = q + problem_.head_dim;
    float* inv_freq = k + problem_.head_dim;
    return {input, q, k, inv_freq, reinterpret_cast<int32_t*>(inv_freq + num_frequencies())};
  }
  [[nodiscard]] size_t bytes(int64_t elements) const { return Scratch::size(static_cast<size_t>(elements) * dtype_size(problem_.activation)); }
  [[nodiscard]] int64_t q_width() const { return problem_.num_q_heads * 2 * problem_.head_dim; }
  [[nodiscard]] int64_t kv_width() const { return problem_.num_kv_heads * problem_.head_dim; }
  [[nodiscard]] int64_t num_frequencies() const { return std::ssize(problem_.inv_freq); }

  ops::AttnIn::Problem problem_;
  Linears linears_;
  Rotate rotate_;
  typename Linears::Packed q_, k_, v_;
  size_t norms_at_;
  std::vector<int32_t> axis_;
};

template <class Linears>
Result<std::unique_ptr<ops::AttnIn::Kernel>> make_on(const ops::AttnIn::Problem& problem, Device& device) {
  CHECK(2 * std::ssize(problem.inv_freq) <= problem.head_dim);
  ASSIGN_OR_RETURN(const Linears linears, Linears::create(device));
  ASSIGN_OR_RETURN(const Rotate rotate, Rotate::create(problem, device));
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel<Linears>>(problem, linears, rotate));
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
