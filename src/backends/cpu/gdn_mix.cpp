#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "backends/cpu/vector_math.h"

namespace quern::cpu::plain {

namespace {

using ops::kGrid;

constexpr int64_t kRowGroup = 8;  // rows that share a pass over the state

/// Sequence index `index` of a run: in the step's rows, in the window, or before the sequence's start.
struct Run {
  int64_t slot = 0, first_row = 0, cursor = 0, end = 0;  // rows stand at [cursor, end)
  bool committed = true;
  [[nodiscard]] int64_t row(int64_t index) const { return first_row + index - cursor; }
};

/// Weights as packed, all f32.
struct PackedWeights {
  float* conv;     // [4, channels]: tap 3 multiplies the current token
  float* decay;    // [num_v_heads]: -exp(A_log)
  float* dt_bias;  // [num_v_heads]
  float* norm;     // [d_v]
};

/// Values of the rows of one segment (between two boundaries) and the chunk they stand in. Chunk position i is index boundary + i.
struct Segment {
  int64_t boundary = 0, begin = 0, end = 0;  // indices; rows are [begin, end)
  const float* state = nullptr;              // [num_v_heads, d_v, d_k] at `boundary`
  float* q = nullptr;                        // [kGrid, num_k_heads, d_k] by row of the segment
  float* v = nullptr;                        // [kGrid, num_v_heads, d_v] by row of the segment
  float* k = nullptr;                        // [num_k_heads, kGrid, d_k] by chunk position, from the boundary on
};

/// Rows are computed one after the other, prompt or not, against the state of the last boundary: any cut gives the same bits.
class GdnMixKernel final : public ops::GdnMix::Kernel {
 public:
  GdnMixKernel(const ops::GdnMix::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem),
        pool_(pool),
        path_(path),
        math_(vector_math(path)),
        channels_(2 * problem.num_k_heads * problem.d_k + problem.num_v_heads * problem.d_v),
        ring_length_(kGrid + problem.k_max + 1),
        window_length_(3 + problem.k_max + 1) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override {
    return Scratch::size<float>(4 * channels_) + 2 * Scratch::size<float>(problem_.num_v_heads) + Scratch::size<float>(problem_.d_v);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t rows = std::min(max_rows, kGrid);
    return Scratch::size<float>(rows * k_width()) + Scratch::size<float>(rows * v_width()) + Scratch::size<float>(kGrid * k_width()) +
           Scratch::size<float>(state_size()) + static_cast<size_t>(pool_.num_threads()) * thread_bytes();
  }

  void pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, ops::Stream&) const override {
    const PackedWeights to = packed_weights(packed);
    std::vector<float> taps(static_cast<size_t>(channels_ * 4));
    load_f32(weights.conv1d, taps.data());
    for (int64_t channel = 0; channel < channels_; ++channel)
      for (int64_t tap = 0; tap < 4; ++tap) to.conv[tap * channels_ + channel] = taps[static_cast<size_t>(channel * 4 + tap)];
    // Releases differ in the dtype of these; the model's is what they are meant in (model-spec.md 2.1).
    load_f32(weights.a_log, to.decay);
    load_f32(weights.dt_bias, to.dt_bias);
    load_f32(weights.norm, to.norm);
    round_to(problem_.activation, to.decay, problem_.num_v_heads);
    round_to(problem_.activation, to.dt_bias, problem_.num_v_heads);
    round_to(problem_.activation, to.norm, problem_.d_v);
    for (int64_t head = 0; head < problem_.num_v_heads; ++head) to.decay[head] = -std::exp(to.decay[head]);
  }

  void enqueue(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state,
               const ops::Activation& out, ops::Launch& launch) const override {
    if (problem_.num_v_heads == 0) return;
    const PackedWeights weights = packed_weights(packed);
    for (const ops::RowRun& run : rows.runs)
      if (run.num_rows > 0) mix_run(rows.slots, run, in, weights, state, out.data, launch.workspace, rows.num_rows);
  }

 private:
  [[nodiscard]] int64_t k_width() const { return problem_.num_k_heads * problem_.d_k; }
  [[nodiscard]] int64_t v_width() const { return problem_.num_v_heads * problem_.d_v; }
  [[nodiscard]] int64_t state_size() const { return problem_.num_v_heads * problem_.d_v * problem_.d_k; }
  /// Of one thread, for mix_head: u of the chunk, G and decays by chunk position, and a group of rows with their products; for fold: u and k of
  /// the chunk.
  [[nodiscard]] size_t thread_bytes() const {
    const int64_t group = 2 * kRowGroup * (problem_.d_k + problem_.d_v + kGrid);
    return Scratch::size<float>(kGrid * problem_.d_v + std::max(2 * kGrid + group, kGrid * problem_.d_k));
  }
  PackedWeights packed_weights(const ops::Buffer& packed) const {
    auto* conv = reinterpret_cast<float*>(packed.address());
    auto* decay = conv + Scratch::size<float>(4 * channels_) / sizeof(float);
    auto* dt_bias = decay + Scratch::size<float>(problem_.num_v_heads) / sizeof(float);
    auto* norm = dt_bias + Scratch::size<float>(problem_.num_v_heads) / sizeof(float);
    return {conv, decay, dt_bias, norm};
  }

  void mix_run(const ops::SlotTables& slots, const ops::RowRun& source, const ops::GdnInputs& in, const PackedWeights& weights,
               const ops::GdnStateView& view, const ops::TensorView& out, const ops::TensorView& workspace, int64_t max_rows) const {
    Scratch scratch(workspace);
    const int64_t cursor = slots.cursor.data<int32_t>()[source.slot];
    const Run run{source.slot, source.first_row, cursor, cursor + source.num_rows, source.committed};
    Segment segment;
    segment.q = scratch.take<float>(std::min(max_rows, kGrid) * k_width());
    segment.v = scratch.take<float>(std::min(max_rows, kGrid) * v_width());
    segment.k = scratch.take<float>(kGrid * k_width());
    float* folded = scratch.take<float>(state_size());
    auto* thread_memory = scratch.take<std::byte>(static_cast<int64_t>(static_cast<size_t>(pool_.num_threads()) * thread_bytes()));
    const ops::TensorView stored_view = view.state.at(run.slot);
    auto* stored = stored_view.data<float>();

    segment.boundary = slots.boundary.data<int32_t>()[run.slot];
    segment.state = stored;
    if (segment.boundary + kGrid <= cursor) {
      fold(view, run.slot, segment.boundary, stored, stored, thread_memory);
      segment.boundary += kGrid;
      store_boundary_columns(run, in.qkv, view, segment.boundary);
    }
    CHECK(segment.boundary <= cursor && cursor < segment.boundary + kGrid);
    CHECK(run.committed || run.end - run.cursor <= problem_.k_max + 1);

    for (segment.begin = cursor; segment.begin < run.end; segment.begin = segment.end) {
      segment.end = std::min(run.end, segment.boundary + kGrid);
      prepare_rows(run, segment, in, weights, view);
      mix_rows(run, segment, in, weights, view, out, thread_memory);
      if (segment.end < segment.boundary + kGrid) break;
      if (run.committed) {
        fold(view, run.slot, segment.boundary, stored, stored, thread_memory);
        store_boundary_columns(run, in.qkv, view, segment.boundary + kGrid);
      } else if (segment.end < run.end) {
        fold(view, run.slot, segment.boundary, stored, folded, thread_memory);
        segment.state = folded;
      }
      segment.boundary += kGrid;
    }
    for (int64_t index = std::max(cursor, run.end - window_length_); index < run.end; ++index)
      std::memcpy(window_column(view, run.slot, index), row_address(in.qkv, run.row(index), channels_), column_bytes());
  }

  [[nodiscard]] size_t column_bytes() const { return static_cast<size_t>(channels_) * dtype_size(problem_.activation); }
  std::byte* window_column(const ops::GdnStateView& view, int64_t slot, int64_t index) const {
    return row_address(view.conv_window, slot * window_length_ + index % window_length_, channels_);
  }
  /// The raw column of an index, or null before the sequence's start.
  const std::byte* raw_column(const Run& run, const ops::TensorView& qkv, const ops::GdnStateView& view, int64_t index) const {
    if (index < 0) return nullptr;
    return index < run.cursor ? window_column(view, run.slot, index) : row_address(qkv, run.row(index), channels_);
  }
  void store_boundary_columns(const Run& run, const ops::TensorView& qkv, const ops::GdnStateView& view, int64_t boundary) const {
    for (int64_t i = 0; i < 3; ++i)
      std::memcpy(row_address(view.boundary_columns, run.slot * 3 + i, channels_), raw_column(run, qkv, view, boundary - 3 + i),
                  column_bytes());
  }
  [[nodiscard]] int64_t ring_row(int64_t slot, int64_t index) const { return slot * ring_length_ + index % ring_length_; }

  /// Conv, silu and l2norm of the segment's rows: q and v to the segment, k to the ring and the segment; with it the chunk's older k.
  void prepare_rows(const Run& run, const Segment& segment, const ops::GdnInputs& in, const PackedWeights& weights,
                    const ops::GdnStateView& view) const {
    const int64_t nk = problem_.num_k_heads, heads = 2 * nk + problem_.num_v_heads, rows = segment.end - segment.begin;
    pool_.parallel_for(nk + rows * heads, 20 * std::max(problem_.d_k, problem_.d_v), [&](int64_t begin, int64_t end, int) {
      for (int64_t item = begin; item < end; ++item) {
        if (item < nk) {
          for (int64_t index = segment.boundary; index < segment.begin; ++index)
            math_.load(row_address(view.ring_k, ring_row(run.slot, index) * nk + item, problem_.d_k), view.ring_k.dtype, problem_.d_k,
                       chunk_k(segment, item, index));
          continue;
        }
        const int64_t row = (item - nk) / heads, head = (item - nk) % heads, index = segment.begin + row;
        if (head < nk) {
          float* q = segment.q + row * k_width() + head * problem_.d_k;
          convolve(run, in.qkv, view, weights, index, head * problem_.d_k, problem_.d_k, q);
          l2_normalize(q, 1.0f / std::sqrt(static_cast<float>(problem_.d_k)));
        } else if (head < 2 * nk) {
          float* k = chunk_k(segment, head - nk, index);
          convolve(run, in.qkv, view, weights, index, head * problem_.d_k, problem_.d_k, k);
          l2_normalize(k, 1.0f);
          math_.round(problem_.ring, 1.0f, k, problem_.d_k);
          math_.store(k, problem_.d_k, view.ring_k.dtype, row_address(view.ring_k, ring_row(run.slot, index) * nk + head - nk, problem_.d_k));
        } else {
          const int64_t v_head = head - 2 * nk;
          convolve(run, in.qkv, view, weights, index, 2 * k_width() + v_head * problem_.d_v, problem_.d_v,
                   segment.v + row * v_width() + v_head * problem_.d_v);
        }
      }
    });
  }
  float* chunk_k(const Segment& segment, int64_t k_head, int64_t index) const {
    return segment.k + (k_head * kGrid + index - segment.boundary) * problem_.d_k;
  }
  /// y = silu(sum_i w_i raw[index - 3 + i]) of channels [first, first + n).
  void convolve(const Run& run, const ops::TensorView& qkv, const ops::GdnStateView& view, const PackedWeights& weights, int64_t index,
                int64_t first, int64_t n, float* y) const {
    const std::byte* columns[4];
    for (int64_t tap = 0; tap < 4; ++tap) {
      columns[tap] = raw_column(run, qkv, view, index - 3 + tap);
      if (columns[tap] != nullptr) columns[tap] += static_cast<size_t>(first) * dtype_size(problem_.activation);
    }
    math_.convolve(columns, problem_.activation, weights.conv + first, channels_, n, y);
  }
  void l2_normalize(float* x, float scale) const {
    float square = 0;
    math_.dots(x, 0, 1, x, 0, 1, problem_.d_k, &square, 0);
    const float factor = 1.0f / std::sqrt(square + 1e-6f) * scale;
    for (int64_t i = 0; i < problem_.d_k; ++i) x[i] *= factor;
  }

  /// The delta rule row by row, one value head after the other, and the gated norm of its output.
  void mix_rows(const Run& run, const Segment& segment, const ops::GdnInputs& in, const PackedWeights& weights,
                const ops::GdnStateView& view, const ops::TensorView& out, std::byte* thread_memory) const {
    const int64_t row_cost = 2 * (problem_.d_k + kGrid) * problem_.d_v;
    pool_.parallel_for(problem_.num_v_heads, (segment.end - segment.begin) * row_cost, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t head = begin; head < end; ++head)
        mix_head(run, segment, in, weights, view, out, head, own_memory(thread_memory, thread));
    });
  }
  [[nodiscard]] float* own_memory(std::byte* thread_memory, int thread) const {
    return reinterpret_cast<float*>(thread_memory + static_cast<size_t>(thread) * thread_bytes());
  }

  void mix_head(const Run& run, const Segment& segment, const ops::GdnInputs& in, const PackedWeights& weights,
                const ops::GdnStateView& view, const ops::TensorView& out, int64_t head, float* memory) const {
    const int64_t dk = problem_.d_k, dv = problem_.d_v, nv = problem_.num_v_heads, k_head = problem_.k_head[static_cast<size_t>(head)];
    float* chunk_u = memory;
    float* log_decay = chunk_u + kGrid * dv;          // G by chunk position
    float* decays = log_decay + kGrid;                // e^(G - Gj)
    float* keys_queries = decays + kGrid;             // [2 * kRowGroup, dk]: k and q of each row of a group
    float* from_state = keys_queries + 2 * kRowGroup * dk;  // [2 * kRowGroup, dv]: S^T k and S^T q; then the sums of u and o
    float* along = from_state + 2 * kRowGroup * dv;   // [2 * kRowGroup, kGrid]: (kj . k) and (kj . q) by chunk position
    const float* state = segment.state + head * dv * dk;
    const float* chunk_keys = chunk_k(segment, k_head, segment.boundary);
    auto* ring_g = view.ring_g.data<float>();
    for (int64_t index = segment.boundary; index < segment.begin; ++index) {
      const int64_t i = index - segment.boundary, place = ring_row(run.slot, index) * nv + head;
      math_.load(row_address(view.ring_u, place, dv), view.ring_u.dtype, dv, chunk_u + i * dv);
      log_decay[i] = ring_g[place];
    }
    for (int64_t group = segment.begin; group < segment.end; group += kRowGroup) {
      const int64_t group_end = std::min(group + kRowGroup, segment.end), num_vectors = 2 * (group_end - group);
      for (int64_t index = group; index < group_end; ++index) {
        std::copy_n(chunk_k(segment, k_head, index), dk, keys_queries + 2 * (index - group) * dk);
        std::copy_n(segment.q + (index - segment.begin) * k_width() + k_head * dk, dk, keys_queries + (2 * (index - group) + 1) * dk);
      }
      math_.dots(keys_queries, dk, num_vectors, state, dk, dv, dk, from_state, dv);
      math_.dots(keys_queries, dk, num_vectors, chunk_keys, dk, group_end - segment.boundary, dk, along, kGrid);
      for (int64_t index = group; index < group_end; ++index) {
        const int64_t i = index - segment.boundary, row = run.row(index), place = ring_row(run.slot, index) * nv + head;
        const float* v = segment.v + (index - segment.begin) * v_width() + head * dv;
        float* u_sum = from_state + 2 * (index - group) * dv;
        float* o = u_sum + dv;
        float* along_k = along + 2 * (index - group) * kGrid;
        float* along_q = along_k + kGrid;
        const float a = element(in.a, row * nv + head), b = element(in.b, row * nv + head);
        const float beta = round_to(problem_.activation, sigmoid(b));
        const float g = weights.decay[head] * softplus(a + weights.dt_bias[head]);
        const float total = i > 0 ? log_decay[i - 1] + g : g;
        log_decay[i] = total;
        ring_g[place] = total;

        const float decay = std::exp(total);
        for (int64_t c = 0; c < 2 * dv; ++c) u_sum[c] *= decay;
        for (int64_t j = 0; j < i; ++j) decays[j] = total - log_decay[j];
        math_.exp_minus(decays, i, 0.0f);
        for (int64_t j = 0; j < i; ++j) {
          along_k[j] *= decays[j];
          along_q[j] *= decays[j];
        }
        math_.add_products(along_k, kGrid, 1, 2, chunk_u, dv, i, dv, u_sum, dv);
        float* u = chunk_u + i * dv;
        for (int64_t c = 0; c < dv; ++c) u[c] = round_to(problem_.ring, beta * (v[c] - u_sum[c]));
        math_.store(u, dv, view.ring_u.dtype, row_address(view.ring_u, place, dv));
        math_.add_products(along_q + i, 0, 0, 1, u, 0, 1, dv, o, 0);

        math_.rms_norm(o, weights.norm, dv, problem_.eps, o);
        math_.load(row_address(in.z, row * nv + head, dv), in.z.dtype, dv, u_sum);
        math_.multiply_silu(DType::kF32, o, u_sum, dv);
        math_.store(o, dv, out.dtype, row_address(out, row * nv + head, dv));
      }
    }
  }
  static float element(const ops::TensorView& view, int64_t i) {
    float x = 0;
    load_f32(row_address(view, i, 1), view.dtype, 1, &x);
    return x;
  }

  /// to = e^G S + sum_j e^(G - Gj) uj kj^T over the 64 ring rows from `boundary` on; `from` and `to` may be the same.
  void fold(const ops::GdnStateView& view, int64_t slot, int64_t boundary, const float* from, float* to, std::byte* thread_memory) const {
    const int64_t dk = problem_.d_k, dv = problem_.d_v, nk = problem_.num_k_heads, nv = problem_.num_v_heads;
    const auto* ring_g = view.ring_g.data<float>();
    pool_.parallel_for(nv, kGrid * dk * dv, [&](int64_t begin, int64_t end, int thread) {
      float* u = own_memory(thread_memory, thread);
      float* k = u + kGrid * dv;
      for (int64_t head = begin; head < end; ++head) {
        const int64_t k_head = problem_.k_head[static_cast<size_t>(head)];
        float factors[kGrid];
        const float total = ring_g[ring_row(slot, boundary + kGrid - 1) * nv + head];
        for (int64_t j = 0; j < kGrid; ++j) {
          const int64_t place = ring_row(slot, boundary + j);
          math_.load(row_address(view.ring_u, place * nv + head, dv), view.ring_u.dtype, dv, u + j * dv);
          math_.load(row_address(view.ring_k, place * nk + k_head, dk), view.ring_k.dtype, dk, k + j * dk);
          factors[j] = total - ring_g[place * nv + head];
        }
        math_.exp_minus(factors, kGrid, 0.0f);
        for (int64_t j = 0; j < kGrid; ++j)
          for (int64_t c = 0; c < dv; ++c) u[j * dv + c] *= factors[j];
        const float decay = std::exp(total);
        const float* source = from + head * dv * dk;
        float* target = to + head * dv * dk;
        for (int64_t i = 0; i < dv * dk; ++i) target[i] = decay * source[i];
        math_.add_products(u, 1, dv, dv, k, dk, kGrid, dk, target, dk);
      }
    });
  }

  ops::GdnMix::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  int64_t channels_, ring_length_, window_length_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits&) {
  if (problem.ring != DType::kF32 && problem.ring != DType::kBF16)
    return ops::refuse("ring dtype {} is not supported; f32 and bf16 are", dtype_name(problem.ring));
  if (problem.k_max < 0 || problem.k_max >= kGrid)
    return ops::refuse("{} drafts in a verify; 0 to {} are supported", problem.k_max, kGrid - 1);
  return accepts_activation(problem.activation, problem.out);
}

Result<std::unique_ptr<ops::GdnMix::Kernel>> make(const ops::GdnMix::Problem& problem, ops::Device& device, LinearPath path) {
  CHECK(std::ssize(problem.k_head) == problem.num_v_heads);
  for (const int32_t head : problem.k_head) CHECK(head >= 0 && head < problem.num_k_heads);
  return std::unique_ptr<ops::GdnMix::Kernel>(std::make_unique<GdnMixKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
