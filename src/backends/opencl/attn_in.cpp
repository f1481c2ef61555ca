#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"

namespace quern::opencl {

using namespace plain;

namespace {

/// Packed: q, k, v, then in f32 the factors of the input norm, of q_norm and of k_norm, the frequencies and, i32, the axis of each.
template <class Linears>
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, const VectorLauncher& vectors, Linears linears, Function rotate)
      : problem_(problem), vectors_(vectors), linears_(std::move(linears)), rotate_(rotate), norms_at_(linears_.end_bytes()) {
    // Which of the positions (t, h, w) each frequency turns with (interleaved mrope).
    for (size_t i = 0; i < problem.inv_freq.size(); ++i) {
      int32_t axis = 0;
      for (int32_t candidate = 1; candidate <= 2; ++candidate)
        if (i % 3 == static_cast<size_t>(candidate) && static_cast<int64_t>(i) < 3 * int64_t{problem.mrope_section[static_cast<size_t>(candidate)]}) axis = candidate;
      axis_.push_back(axis);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return Linears::arithmetic(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override {
    return norms_at_ + static_cast<size_t>(problem_.hidden + 2 * problem_.head_dim + 2 * num_frequencies()) * sizeof(float);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, kRowTile);
    return bytes(rows * q_width()) + 2 * bytes(rows * kv_width()) + linears_.scratch_bytes(rows);
  }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream& ops_stream) const override {
    Stream& stream = opencl_stream(ops_stream);
    linears_.pack(0, weights.q, packed, stream);
    linears_.pack(1, weights.k, packed, stream);
    linears_.pack(2, weights.v, packed, stream);
    vectors_.widen(stream, weights.norm, vector_in(packed, 0), 1.0f);
    vectors_.widen(stream, weights.q_norm, vector_in(packed, q_norm_at()), 1.0f);
    vectors_.widen(stream, weights.k_norm, vector_in(packed, k_norm_at()), 1.0f);
    if (num_frequencies() == 0) return;
    const auto view = [&](int64_t at, DType dtype) { return ops::TensorView{&packed, norms_at_ + static_cast<size_t>(at) * sizeof(float), dtype, Shape{num_frequencies()}}; };
    stream.copy_to_device(problem_.inv_freq.data(), view(inv_freq_at(), DType::kF32));
    stream.copy_to_device(axis_.data(), view(axis_at(), DType::kI32));
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query, const ops::TensorView& gate,
               const ops::KvCacheView& kv, ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    for (int64_t first = 0; first < rows.num_rows; first += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, rows.num_rows - first);
      Scratch scratch(launch.workspace);
      const Place q = scratch.take(bytes(n * q_width())), k = scratch.take(bytes(n * kv_width())), v = scratch.take(bytes(n * kv_width())), outs[] = {q, k, v};
      linears_.multiply(stream, packed, {row_place(x, first, problem_.hidden), {}, n, vector_in(packed, 0), problem_.eps}, segments_of(rows, first, n), outs, scratch);
      stream.launch(rotate_, {{static_cast<size_t>(n), static_cast<size_t>(problem_.num_q_heads + problem_.num_kv_heads), 1}, {kItems, 1, 1}}, static_cast<int32_t>(first),
                    static_cast<int32_t>(problem_.num_q_heads), static_cast<int32_t>(problem_.num_kv_heads), static_cast<int32_t>(problem_.head_dim),
                    static_cast<int32_t>(num_frequencies()), problem_.eps, problem_.rope_scale, q, k, v, vector_in(packed, q_norm_at()), vector_in(packed, k_norm_at()),
                    vector_in(packed, inv_freq_at()), vector_in(packed, axis_at()), query, gate, rows.run_table, rows.row_runs, rows.indices, rows.positions,
                    rows.slots.block_tables, row_stride(rows.slots.block_tables), kv.k, kv.v, kv.k_scale, kv.v_scale);
    }
  }

 private:
  // Elements before each vector behind the weights.
  [[nodiscard]] int64_t q_norm_at() const { return problem_.hidden; }
  [[nodiscard]] int64_t k_norm_at() const { return q_norm_at() + problem_.head_dim; }
  [[nodiscard]] int64_t inv_freq_at() const { return k_norm_at() + problem_.head_dim; }
  [[nodiscard]] int64_t axis_at() const { return inv_freq_at() + num_frequencies(); }
  [[nodiscard]] Place vector_in(const ops::Buffer& packed, int64_t at) const { return place_in(packed, norms_at_ + static_cast<size_t>(at) * sizeof(float)); }
  [[nodiscard]] size_t bytes(int64_t elements) const { return Scratch::size(static_cast<size_t>(elements) * dtype_size(problem_.activation)); }
  [[nodiscard]] int64_t q_width() const { return problem_.num_q_heads * 2 * problem_.head_dim; }
  [[nodiscard]] int64_t kv_width() const { return problem_.num_kv_heads * problem_.head_dim; }
  [[nodiscard]] int64_t num_frequencies() const { return std::ssize(problem_.inv_freq); }

  ops::AttnIn::Problem problem_;
  VectorLauncher vectors_;
  Linears linears_;
  Function rotate_;
  size_t norms_at_;
  std::vector<int32_t> axis_;
};

template <class Linears>
Result<std::unique_ptr<ops::AttnIn::Kernel>> make_on(const ops::AttnIn::Problem& problem, Device& device) {
  CHECK(2 * std::ssize(problem.inv_freq) <= problem.head_dim);
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(device, problem.activation));
  ASSIGN_OR_RETURN(Linears linears, Linears::create(device, problem.activation, {{problem.q, problem.k, problem.v}, Epilogue::kStore, true}));
  ASSIGN_OR_RETURN(const Function rotate, device.function("attention", "rotate_rows", kv_definitions(problem.activation, problem.kv)));
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel<Linears>>(problem, vectors, std::move(linears), rotate));
}

}  // namespace

ops::Verdict plain::accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_kv(traits, problem.activation, problem.kv, problem.head_dim);
}
Result<std::unique_ptr<ops::AttnIn::Kernel>> plain::make(const ops::AttnIn::Problem& problem, ops::Device& device) { return make_on<PlainLinears>(problem, opencl_device(device)); }

ops::Verdict dpas::accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits& traits) {
  const ops::Verdict verdict = accepts_linears(traits, problem.activation, {problem.q, problem.k, problem.v});
  return verdict.accepted ? accepts_kv(traits, problem.activation, problem.kv, problem.head_dim) : verdict;
}
Result<std::unique_ptr<ops::AttnIn::Kernel>> dpas::make(const ops::AttnIn::Problem& problem, ops::Device& device) { return make_on<DpasLinears>(problem, opencl_device(device)); }

}  // namespace quern::opencl
