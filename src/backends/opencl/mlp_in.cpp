#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

/// Packed: gate and up, then the norm's factors in f32.
template <class Linears>
class MlpInKernel final : public ops::MlpIn::Kernel {
 public:
  MlpInKernel(const ops::MlpIn::Problem& problem, const VectorLauncher& vectors, Linears linears)
      : problem_(problem), vectors_(vectors), linears_(std::move(linears)), norm_at_(linears_.end_bytes()) {}

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return norm_at_ + static_cast<size_t>(problem_.hidden) * sizeof(float); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return linears_.scratch_bytes(std::min(max_rows, kRowTile)); }
  void pack(const ops::MlpIn::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    linears_.pack(0, weights.gate, packed, opencl_stream(stream));
    linears_.pack(1, weights.up, packed, opencl_stream(stream));
    vectors_.widen(opencl_stream(stream), weights.norm, place_in(packed, norm_at_), 1.0f);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::Activation& out,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place to = row_place(out.data, first, problem_.intermediate);
      linears_.multiply(opencl_stream(launch.stream), packed, {row_place(x, first, problem_.hidden), {}, n, place_in(packed, norm_at_), problem_.eps}, segments_of(rows, first, n),
                        {&to, 1}, scratch);
    }
  }

 private:
  ops::MlpIn::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
  size_t norm_at_;
};

template <class Linears>
Result<std::unique_ptr<ops::MlpIn::Kernel>> make_on(const ops::MlpIn::Problem& problem, Device& device) {
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.gate, problem.up}, Epilogue::kPair, true}));
  return std::unique_ptr<ops::MlpIn::Kernel>(std::make_unique<MlpInKernel<Linears>>(problem, vectors, std::move(linears)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation, problem.out); }
Result<std::unique_ptr<ops::MlpIn::Kernel>> plain::make(const ops::MlpIn::Problem& problem, ops::Device& device) { return make_on<PlainLinears>(problem, opencl_device(device)); }

ops::Verdict dpas::accepts(const ops::MlpIn::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.gate.scheme != problem.up.scheme) return ops::refuse("gate and up differ in their scheme");
  const ops::Verdict verdict = accepts_linears(traits, problem.activation, {problem.gate, problem.up});
  return verdict.accepted ? accepts_activation(traits, problem.activation, problem.out) : verdict;
}
Result<std::unique_ptr<ops::MlpIn::Kernel>> dpas::make(const ops::MlpIn::Problem& problem, ops::Device& device) { return make_on<DpasLinears>(problem, opencl_device(device)); }

}  // namespace quern::opencl
