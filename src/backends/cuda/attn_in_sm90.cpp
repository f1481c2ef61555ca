#include "backends/cuda/linears_sm90.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/rotate.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

namespace {

TileLayer::Spec spec_of(const ops::AttnIn::Problem& problem) { return {.parts = {problem.q, problem.k, problem.v}, .norm_width = problem.hidden}; }
int64_t projected_width(const ops::AttnIn::Problem& problem) { return problem.q.out_features + problem.k.out_features + problem.v.out_features; }

/// Projects into the workspace; rotation, which is cuda.plain's, does the rest. Packed: the layer, then the tables of Rotate.
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, Linears linears, Rotate rotate)
      : problem_(problem), linears_(std::move(linears)), rotate_(std::move(rotate)), layer_(spec_of(problem), 0), tables_at_(layer_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(layer_); }
  [[nodiscard]] size_t packed_bytes() const override { return tables_at_ + rotate_.table_bytes(); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.workspace_bytes(max_rows, layer_, projected_width(problem_)); }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    layer_.pack({.parts = {&weights.q, &weights.k, &weights.v}, .norm = weights.norm}, packed, linears_.packers(), cuda_stream(stream));
    const Rotate::Tables tables = rotate_.tables_at(packed, tables_at_);
    linears_.packers().pack_norm(cuda_stream(stream), weights.q_norm, tables.q_norm);
    linears_.packers().pack_norm(cuda_stream(stream), weights.k_norm, tables.k_norm);
    rotate_.pack(packed, tables_at_, stream);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query, const ops::TensorView& gate,
               const ops::KvCacheView& kv, ops::Launch& launch) const override {
    Stream& stream = cuda_stream(launch.stream);
    RotateArgs args = rotate_.arguments(rows, rotate_.tables_at(packed, tables_at_), query, gate, kv);
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
  ops::AttnIn::Problem problem_;
  Linears linears_;
  Rotate rotate_;
  TileLayer layer_;
  size_t tables_at_;
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
  ASSIGN_OR_RETURN(Linears linears, Linears::load(cuda_device(device), shape));
  ASSIGN_OR_RETURN(Rotate rotate, Rotate::create(problem, cuda_device(device)));
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel>(problem, std::move(linears), std::move(rotate)));
}

}  // namespace quern::cuda::sm90
