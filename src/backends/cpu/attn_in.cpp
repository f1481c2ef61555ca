#include "backends/cpu/norm_rows.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "ops/kv_dtype.h"

namespace quern::cpu::plain {

namespace {

/// Packed: q, k, v, then in f32 the factors of the input norm, of q_norm and of k_norm.
class AttnInKernel final : public ops::AttnIn::Kernel {
 public:
  AttnInKernel(const ops::AttnIn::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem),
        pool_(pool),
        path_(path), math_(vector_math(path)),
        q_(problem.q, 0, path),
        k_(problem.k, q_.end_bytes(), path),
        v_(problem.v, k_.end_bytes(), path),
        norms_at_(v_.end_bytes()) {
    // Which of the positions (t, h, w) each frequency turns with (interleaved mrope).
    for (size_t i = 0; i < problem.inv_freq.size(); ++i) {
      int axis = 0;
      for (int candidate = 1; candidate <= 2; ++candidate)
        if (i % 3 == static_cast<size_t>(candidate) &&
            static_cast<int64_t>(i) < 3 * int64_t{problem.mrope_section[static_cast<size_t>(candidate)]})
          axis = candidate;
      axis_.push_back(axis);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override {
    return norms_at_ + static_cast<size_t>(problem_.hidden + 2 * problem_.head_dim) * sizeof(float);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = max_rows_in_memory(path_, max_rows);
    return Scratch::size<float>(rows * row_stride(problem_.hidden)) + Scratch::size<float>(rows * 2 * num_frequencies()) +
           Scratch::size<float>(rows * q_width()) + 2 * Scratch::size<float>(rows * kv_width()) + Scratch::size<const int32_t*>(rows);
  }
  void pack(const ops::AttnIn::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    q_.pack(weights.q, packed, pool_);
    k_.pack(weights.k, packed, pool_);
    v_.pack(weights.v, packed, pool_);
    auto* norms = reinterpret_cast<float*>(packed.address() + norms_at_);
    load_norm_1p(weights.norm, norms);
    load_norm_1p(weights.q_norm, norms + problem_.hidden);
    load_norm_1p(weights.k_norm, norms + problem_.hidden + problem_.head_dim);
  }

  void enqueue(const ops::Rows& rows, const ops::TensorView& x, const ops::Buffer& packed, const ops::TensorView& query,
               const ops::TensorView& gate, const ops::KvCacheView& kv, ops::Launch& launch) const override {
    const auto* norm = reinterpret_cast<const float*>(packed.address() + norms_at_);
    const float* q_norm = norm + problem_.hidden;
    const float* k_norm = q_norm + problem_.head_dim;
    for_each_row_tile(rows, path_, [&](int64_t first, int64_t n, LinearPath path) {
      Scratch scratch(launch.workspace);
      const int64_t stride = row_stride(problem_.hidden);
      float* normed = scratch.take<float>(rows_in_memory(path, n) * stride);
      float* turns = scratch.take<float>(n * 2 * num_frequencies());
      float* q = scratch.take<float>(n * q_width());
      float* k = scratch.take<float>(n * kv_width());
      float* v = scratch.take<float>(n * kv_width());
      const int32_t** block_tables = scratch.take<const int32_t*>(n);
      find_block_tables(rows, first, n, block_tables);
      norm_rows(pool_, math_, x, first, n, problem_.hidden, norm, problem_.eps, input_scale(path), normed, stride);
      prepare_inputs(pool_, math_, path, n, problem_.hidden, normed, stride);
      const std::array weights{q_.view(packed, path), k_.view(packed, path), v_.view(packed, path)};
      const std::array outputs{q, k, v};
      linear(pool_, weights, normed, n, [&](size_t w, int64_t row, int64_t feature, int64_t features, float* y) {
        math_.round(problem_.activation, 1.0f, y, features);
        std::copy_n(y, features, outputs[w] + row * weights[w].out_features + feature);
      });
      for (int64_t row = 0; row < n; ++row)
        compute_turns(rows.positions.data<int32_t>() + (first + row) * 3, turns + row * 2 * num_frequencies());

      const int64_t d = problem_.head_dim, heads = problem_.num_q_heads + problem_.num_kv_heads;
      pool_.parallel_for(n * heads, 8 * d, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t row = item / heads, head = item % heads;
          const float* turn = turns + row * 2 * num_frequencies();
          if (head < problem_.num_q_heads) {
            float* values = q + row * q_width() + head * 2 * d;
            norm_and_rotate(values, q_norm, turn);
            const int64_t out = (first + row) * problem_.num_q_heads + head;
            math_.store(values, d, query.dtype, row_address(query, out, d));
            math_.store(values + d, d, gate.dtype, row_address(gate, out, d));
          } else {
            const int64_t kv_head = head - problem_.num_q_heads;
            float* key = k + row * kv_width() + kv_head * d;
            norm_and_rotate(key, k_norm, turn);
            const int32_t index = rows.indices.data<int32_t>()[first + row];
            if (index < 0) continue;  // padding
            const int64_t place =
                (int64_t{block_tables[row][index / ops::kGrid]} * problem_.num_kv_heads + kv_head) * ops::kGrid + index % ops::kGrid;
            write_kv(key, kv.k, kv.k_scale, kv_head, place);
            write_kv(v + row * kv_width() + kv_head * d, kv.v, kv.v_scale, kv_head, place);
          }
        }
      });
    });
  }

 private:
  [[nodiscard]] int64_t q_width() const { return problem_.num_q_heads * 2 * problem_.head_dim; }
  [[nodiscard]] int64_t kv_width() const { return problem_.num_kv_heads * problem_.head_dim; }
  [[nodiscard]] int64_t num_frequencies() const { return std::ssize(problem_.inv_freq); }

  /// The block table of the sequence of each row in [first, first + n).
  static void find_block_tables(const ops::Rows& rows, int64_t first, int64_t n, const int32_t** tables) {
    for (const ops::RowRun& run : rows.runs)
      for (int64_t row = std::max<int64_t>(first, run.first_row); row < std::min<int64_t>(first + n, run.first_row + run.num_rows); ++row)
        tables[row - first] = rows.slots.block_tables.data<int32_t>() + run.slot * rows.slots.block_tables.shape[1];
  }

  /// cos of every frequency, then sin, as the activation dtype holds them.
  void compute_turns(const int32_t* position, float* turns) const {
    for (int64_t i = 0; i < num_frequencies(); ++i) {
      const float angle = static_cast<float>(position[axis_[static_cast<size_t>(i)]]) * problem_.inv_freq[static_cast<size_t>(i)];
      turns[i] = round_to(problem_.activation, std::cos(angle) * problem_.rope_scale);
      turns[num_frequencies() + i] = round_to(problem_.activation, std::sin(angle) * problem_.rope_scale);
    }
  }

  void norm_and_rotate(float* x, const float* factors, const float* turns) const {
    const int64_t half = num_frequencies();
    math_.rms_norm(x, factors, problem_.head_dim, problem_.eps, x);
    math_.round(problem_.activation, 1.0f, x, problem_.head_dim);
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half], cosine = turns[i], sine = turns[half + i];
      x[i] = round_to(problem_.activation, a * cosine - b * sine);
      x[i + half] = round_to(problem_.activation, b * cosine + a * sine);
    }
  }

  void write_kv(const float* values, const ops::TensorView& cache, const ops::TensorView& scales, int64_t head, int64_t place) const {
    const int64_t d = problem_.head_dim;
    std::byte* out = row_address(cache, place, d);
    if (cache.dtype != DType::kE4M3) return math_.store(values, d, cache.dtype, out);
    const float scale = scales.empty() ? 1.0f : scales.data<float>()[head];
    for (int64_t i = 0; i < d; ++i) out[i] = std::byte{e4m3_encode(values[i] / scale)};
  }

  ops::AttnIn::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  PackedLinear q_, k_, v_;
  size_t norms_at_;
  std::vector<int> axis_;
};

}  // namespace

ops::Verdict accepts(const ops::AttnIn::Problem& problem, const ops::DeviceTraits&) {
  if (ops::Verdict verdict = ops::accepts_kv(problem.kv, problem.activation); !verdict.accepted) return verdict;
  return accepts_activation(problem.activation);
}

Result<std::unique_ptr<ops::AttnIn::Kernel>> make(const ops::AttnIn::Problem& problem, ops::Device& device, LinearPath path) {
  CHECK(2 * std::ssize(problem.inv_freq) <= problem.head_dim);
  return std::unique_ptr<ops::AttnIn::Kernel>(std::make_unique<AttnInKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
