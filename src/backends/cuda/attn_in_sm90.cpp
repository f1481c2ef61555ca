#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/rotate.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

TileLayer::Spec spec_of(const ops::AttnIn::Problem& problem) { return {.parts = {problem.q, problem.k, problem.v}, .norm_width = problem.hidden}; }
int64_t projected_width(const ops::AttnIn::Problem& problem) { return problem.q.out_features + problem.k.out_features + problem.v.out_features; }

/// Projects into the workspace; rotation, which is cuda.plain's, does the rest. Packed: the layer, then in f32 the factors of q_norm and k_norm, the frequencies
/// and, i32, the axis of each.
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, Linears linears, Rotate rotate)
      : problem_(problem), linears_(std::move(linears)), rotate_(rotate), layer_(spec_of(problem), 0), norms_at_(layer_.end_bytes()) {
    // Which of the positions (t, h, w) each frequency turns with (interleaved mrope).
    for (size_t i = 0; i < problem.inv_freq.size(); ++i) {
      const size_t candidate = i % 3;
      axis_.push_back(candidate > 0 && static_cast<int64_t>(i) < 3 * int64_t{problem.mrope_section[candidate]} ? static_cast<int32_t>(candidate) : 0);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return norms_at_ + static_cast<size_t>(2 * problem_.head_dim + 2 * num_frequencies()) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_, projected_width(problem_)); }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weights.q, &weights.k, &weights.v}, .norm = weights.norm}, packed, linears_.packers(), cuda_stream(stream));
    const Norms norms = norms_in(packed);
    linears_.packers().pack_norm(cuda_stream(stream), weights.q_norm, norms.q);
    linears_.packers().pack_norm(cuda_stream(stream), weights.k_norm, norms.k);
    if (num_frequencies() == 0) return;
    const auto place = [&](const void* at, DType dtype) {
      return ops::TensorView{&packed, static_cast<size_t>(static_cast<const std::byte*>(at) - packed.address()), dtype, Shape{num_frequencies()}};
    };
    stream.copy_to_device(problem_.inv_freq.data(), place(norms.inv_freq, DType::kF32));
    stream.copy_to_device(axis_.data(), place(norms.axis, DType::kI32));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query, const ops::TensorView& gate,
               const ops::KvCacheView& kv, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    const Norms norms = norms_in(packed);
    RotateArgs args{};
    args.step = plain::step_tables(rows);
    args.num_q_heads = static_cast<int32_t>(problem_.num_q_heads);
    args.num_kv_heads = static_cast<int32_t>(problem_.num_kv_heads);
    args.head_dim = static_cast<int32_t>(problem_.head_dim);
    args.num_frequencies = static_cast<int32_t>(num_frequencies());
    args.activation = problem_.activation;
    args.eps = problem_.eps;
    args.rope_scale = problem_.rope_scale;
    args.q_norm = norms.q;
    args.k_norm = norms.k;
    args.inv_freq = norms.inv_freq;
    args.axis = norms.axis;
    args.query = plain::address_or_null<void>(query);
    args.gate = plain::address_or_null<void>(gate);
    args.kv = plain::kv_cache(kv);
    const int64_t widths[] = {problem_.q.out_features, problem_.k.out_features, problem_.v.out_features};
    linears_.enqueue(
        stream, layer_, packed, rows, {row_data(x), problem_.hidden}, launch.workspace,
        [&](LinearLayer& linear, const Linears::Piece& piece) {
          linear.eps = problem_.eps;
          std::byte* to = piece.spare;
          for (size_t i = 0; i < 3; ++i) {
            linear.segments[i].out = to;
            linear.segments[i].stride = widths[i];
            to += piece.rows * widths[i] * 2;
          }
        },
        projected_width(problem_),
        [&](const Linears::Piece& piece) {
          args.first_row = static_cast<int32_t>(piece.first_row);
          args.q = piece.spare;
          args.k = piece.spare + piece.rows * widths[0] * 2;
          args.v = piece.spare + piece.rows * (widths[0] + widths[1]) * 2;
          rotate_.launch(stream, args, piece.rows, true);
        });
  }

 private:
  struct Norms {
    float *q, *k, *inv_freq;
    int32_t* axis;
  };
  [[nodiscard]] Norms norms_in(const ops::Buffer& packed) const {
    auto* q = reinterpret_cast<float*>(packed.address() + norms_at_);
    float* inv_freq = q + 2 * problem_.head_dim;
    return {q, q + problem_.head_dim, inv_freq, reinterpret_cast<int32_t*>(inv_freq + num_frequencies())};
  }
  [[nodiscard]] int64_t num_frequencies() const { return std::ssize(problem_.inv_freq); }

  ops::AttnIn::Problem problem_;
  Linears linears_;
  Rotate rotate_;
  TileLayer layer_;
  size_t norms_at_;
  std::vector<int32_t> axis_;
};

}  // namespace

ops::Verdict accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::accepts(problem, traits); !verdict.accepted) return verdict;
  if (ops::Verdict verdict = accepts_activation(problem.activation); !verdict.accepted) return verdict;
  if (projected_width(problem) * 2 > DecodePlaces::kSpareBytes)
    return ops::refuse("{} projected features; up to {} are supported", projected_width(problem), DecodePlaces::kSpareBytes / 2);
  return TileLayer::accepts(spec_of(problem), traits);
}

Result<std::unique_ptr<ops::AttnIn::Kernel>> make(const ops::AttnIn::Problem& problem, ops::Device& device, PromptShape shape) {
  CHECK(2 * std::ssize(problem.inv_freq) <= problem.head_dim);
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  ASSIGN_OR_RETURN(const Rotate rotate, Rotate::create(problem, cuda_device(device)));
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel>(problem, std::move(linears), rotate));
}

}  // namespace quern::cuda::sm90
