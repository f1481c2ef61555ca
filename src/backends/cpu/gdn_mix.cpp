#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "backends/cpu/vector_math.h"

namespace quern::cpu::plain {

namespace {

using ops::kGrid;

constexpr int64_t kAhead = 4;  // ring rows on their way from memory while one is loaded
constexpr int64_t kRowGroup = 8;  // rows that share a pass over the state

/// A run of rows. Sequence index `index` stands in the step's rows, in the window, or before the sequence's start.
struct Run {
  int64_t slot = 0, first_row = 0, cursor = 0, end = 0;  // rows stand at [cursor, end)
  int64_t boundary = 0;                                  // where the stored state stands before the step
  bool committed = true;
  [[nodiscard]] int64_t row(int64_t index) const { return first_row + index - cursor; }
  /// Where it stands after the step.
  [[nodiscard]] int64_t next_boundary() const { return std::max(boundary, (committed ? end : cursor) / kGrid * kGrid); }
};

/// Weights as packed, all f32.
struct PackedWeights {
  float* conv;     // [4, channels]: tap 3 multiplies the current token
  float* decay;    // [num_v_heads]: -exp(A_log)
  float* dt_bias;  // [num_v_heads]
  float* norm;     // [d_v]
};

/// Where one thread works on the v heads of one k head. Chunk position i is index boundary + i.
struct HeadScratch {
  float* q;             // [kGrid, d_k] by row of the segment
  float* v;             // [kGrid, d_v] by row of the segment
  float* k;             // [kGrid, d_k] by chunk position
  float* u;             // [kGrid, d_v] by chunk position
  float* log_decay;     // [kGrid]: G by chunk position
  float* decays;        // [kGrid]: e^(G - Gj)
  float* keys_queries;  // [2 * kRowGroup, d_k]: k and q of each row of a group
  float* from_state;    // [2 * kRowGroup, d_v]: S^T k and S^T q; then the sums of u and o
  float* along;         // [2 * kRowGroup, kGrid]: (kj . k) and (kj . q) by chunk position
  float* folded;        // [v heads of the k head, d_v, d_k]: the state of a boundary that a run crosses without committing
};

/// Rows between two boundaries, at the indices [begin, end).
struct Segment {
  int64_t boundary = 0, begin = 0, end = 0;
};

/// Rows are computed one after the other, prompt or not, against the state of the last boundary: any cut gives the same bits. Heads know nothing of
/// each other, so a thread takes a k head with its v heads through all rows of a run.
class GdnMixKernel final : public ops::GdnMix::Kernel {
 public:
  GdnMixKernel(const ops::GdnMix::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem),
        pool_(pool),
        path_(path),
        math_(vector_math(path)),
        channels_(2 * problem.num_k_heads * problem.d_k + problem.num_v_heads * problem.d_v),
        ring_length_(kGrid + problem.k_max + 1),
        window_length_(3 + problem.k_max + 1) {
    v_heads_.resize(static_cast<size_t>(problem.num_k_heads));
    for (int32_t head = 0; head < problem.num_v_heads; ++head)
      v_heads_[static_cast<size_t>(problem.k_head[static_cast<size_t>(head)])].push_back(head);
    for (const auto& heads : v_heads_) max_v_heads_ = std::max<int64_t>(max_v_heads_, std::ssize(heads));
  }

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override {
    return Scratch::size<float>(4 * channels_) + 2 * Scratch::size<float>(problem_.num_v_heads) + Scratch::size<float>(problem_.d_v);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return static_cast<size_t>(pool_.num_threads()) * thread_bytes(); }

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
    const int64_t nk = problem_.num_k_heads;
    const int64_t row_cost = (problem_.num_v_heads * (problem_.d_k + kGrid) * problem_.d_v * 2 + 20 * channels_) / nk;
    const int64_t rows_a_run = rows.num_rows / std::max<int64_t>(std::ssize(rows.runs), 1) + 1;
    pool_.parallel_for(std::ssize(rows.runs) * nk, rows_a_run * row_cost, [&](int64_t begin, int64_t end, int thread) {
      const HeadScratch scratch = scratch_of(launch.workspace, thread);
      for (int64_t item = begin; item < end; ++item) {
        const ops::RowRun& source = rows.runs[static_cast<size_t>(item / nk)];
        if (source.num_rows > 0) mix_heads(run_of(rows.slots, source), item % nk, in, weights, state, out.data, scratch);
      }
    });
    // Columns last: until here all heads read those of earlier steps.
    for (const ops::RowRun& source : rows.runs)
      if (source.num_rows > 0) store_columns(run_of(rows.slots, source), in.qkv, state);
  }

 private:
  [[nodiscard]] int64_t k_width() const { return problem_.num_k_heads * problem_.d_k; }
  [[nodiscard]] int64_t state_size() const { return problem_.d_v * problem_.d_k; }  // of one v head
  [[nodiscard]] size_t thread_bytes() const {
    const int64_t dk = problem_.d_k, dv = problem_.d_v;
    return 2 * Scratch::size<float>(kGrid * dk) + 2 * Scratch::size<float>(kGrid * dv) + 2 * Scratch::size<float>(kGrid) +
           Scratch::size<float>(2 * kRowGroup * dk) + Scratch::size<float>(2 * kRowGroup * dv) + Scratch::size<float>(2 * kRowGroup * kGrid) +
           Scratch::size<float>(max_v_heads_ * state_size());
  }
  HeadScratch scratch_of(const ops::TensorView& workspace, int thread) const {
    ops::TensorView own = workspace;
    own.offset_bytes += static_cast<size_t>(thread) * thread_bytes();
    own.shape = Shape({static_cast<int64_t>(thread_bytes())});
    CHECK(own.offset_bytes + thread_bytes() <= workspace.offset_bytes + workspace.size_bytes());
    Scratch scratch(own);
    const int64_t dk = problem_.d_k, dv = problem_.d_v;
    HeadScratch head;
    head.q = scratch.take<float>(kGrid * dk);
    head.v = scratch.take<float>(kGrid * dv);
    head.k = scratch.take<float>(kGrid * dk);
    head.u = scratch.take<float>(kGrid * dv);
    head.log_decay = scratch.take<float>(kGrid);
    head.decays = scratch.take<float>(kGrid);
    head.keys_queries = scratch.take<float>(2 * kRowGroup * dk);
    head.from_state = scratch.take<float>(2 * kRowGroup * dv);
    head.along = scratch.take<float>(2 * kRowGroup * kGrid);
    head.folded = scratch.take<float>(max_v_heads_ * state_size());
    return head;
  }
  PackedWeights packed_weights(const ops::Buffer& packed) const {
    auto* conv = reinterpret_cast<float*>(packed.address());
    auto* decay = conv + Scratch::size<float>(4 * channels_) / sizeof(float);
    auto* dt_bias = decay + Scratch::size<float>(problem_.num_v_heads) / sizeof(float);
    auto* norm = dt_bias + Scratch::size<float>(problem_.num_v_heads) / sizeof(float);
    return {conv, decay, dt_bias, norm};
  }

  Run run_of(const ops::SlotTables& slots, const ops::RowRun& source) const {
    const int64_t cursor = slots.cursor.data<int32_t>()[source.slot], boundary = slots.boundary.data<int32_t>()[source.slot];
    const Run run{source.slot, source.first_row, cursor, cursor + source.num_rows, boundary, source.committed};
    CHECK(boundary <= cursor && cursor < boundary + 2 * kGrid);
    CHECK(run.committed || run.end - run.cursor <= problem_.k_max + 1);
    return run;
  }

  /// All rows of a run for one k head and its v heads.
  void mix_heads(const Run& run, int64_t k_head, const ops::GdnInputs& in, const PackedWeights& weights, const ops::GdnStateView& view,
                 const ops::TensorView& out, const HeadScratch& s) const {
    const std::vector<int32_t>& heads = v_heads_[static_cast<size_t>(k_head)];
    const auto stored = [&](int32_t head) { return view.state.at(run.slot).at(head).data<float>(); };
    Segment segment{run.boundary, run.cursor, run.cursor};
    if (segment.boundary + kGrid <= run.cursor) {  // a fold that is due
      load_keys(run, k_head, segment.boundary, segment.boundary + kGrid, view, s);
      for (const int32_t head : heads) {
        load_updates(run, head, segment.boundary, segment.boundary + kGrid, view, s);
        fold(stored(head), stored(head), s);
      }
      segment.boundary += kGrid;
    }
    for (bool from_folded = false; segment.begin < run.end; segment.begin = segment.end, segment.boundary += kGrid) {
      segment.end = std::min(run.end, segment.boundary + kGrid);
      const bool crosses = segment.end == segment.boundary + kGrid && (run.committed || segment.end < run.end);
      load_keys(run, k_head, segment.boundary, segment.begin, view, s);
      prepare_keys(run, segment, k_head, in, weights, view, s);
      for (size_t h = 0; h < heads.size(); ++h) {
        float* folded = s.folded + static_cast<int64_t>(h) * state_size();
        const float* state = from_folded ? folded : stored(heads[h]);
        load_updates(run, heads[h], segment.boundary, segment.begin, view, s);
        mix_head(run, segment, in, weights, state, view, out, heads[h], s);
        if (crosses) fold(state, run.committed ? stored(heads[h]) : folded, s);
      }
      from_folded = crosses && !run.committed;
    }
  }

  /// The columns that later steps need: the three before the new boundary, if the state moved there, and the run's last ones.
  void store_columns(const Run& run, const ops::TensorView& qkv, const ops::GdnStateView& view) const {
    const int64_t boundary = run.next_boundary();
    if (boundary > run.boundary)
      for (int64_t i = 0; i < 3; ++i)
        std::memcpy(row_address(view.boundary_columns, run.slot * 3 + i, channels_), raw_column(run, qkv, view, boundary - 3 + i), column_bytes());
    for (int64_t index = std::max(run.cursor, run.end - window_length_); index < run.end; ++index)
      std::memcpy(window_column(view, run.slot, index), row_address(qkv, run.row(index), channels_), column_bytes());
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
  [[nodiscard]] int64_t ring_row(int64_t slot, int64_t index) const { return slot * ring_length_ + index % ring_length_; }

  /// k of the indices [begin, end) of one chunk, and u and G of a v head.
  void load_keys(const Run& run, int64_t k_head, int64_t begin, int64_t end, const ops::GdnStateView& view, const HeadScratch& s) const {
    const int64_t dk = problem_.d_k;
    const auto place = [&](int64_t index) { return ring_row(run.slot, index) * problem_.num_k_heads + k_head; };
    for (int64_t index = begin; index < std::min(end, begin + kAhead); ++index) prefetch_row(view.ring_k, place(index), dk);
    for (int64_t index = begin; index < end; ++index) {
      if (index + kAhead < end) prefetch_row(view.ring_k, place(index + kAhead), dk);
      math_.load(row_address(view.ring_k, place(index), dk), view.ring_k.dtype, dk, s.k + (index - begin) * dk);
    }
  }
  void load_updates(const Run& run, int64_t head, int64_t begin, int64_t end, const ops::GdnStateView& view, const HeadScratch& s) const {
    const int64_t dv = problem_.d_v;
    const auto place = [&](int64_t index) { return ring_row(run.slot, index) * problem_.num_v_heads + head; };
    const auto prefetch = [&](int64_t index) {
      prefetch_row(view.ring_u, place(index), dv);
      prefetch_row(view.ring_g, place(index), 1);
    };
    for (int64_t index = begin; index < std::min(end, begin + kAhead); ++index) prefetch(index);
    for (int64_t index = begin; index < end; ++index) {
      if (index + kAhead < end) prefetch(index + kAhead);
      math_.load(row_address(view.ring_u, place(index), dv), view.ring_u.dtype, dv, s.u + (index - begin) * dv);
      s.log_decay[index - begin] = view.ring_g.data<float>()[place(index)];
    }
  }
  /// Rows of a ring lie kilobytes apart: no processor foresees the next one.
  static void prefetch_row(const ops::TensorView& ring, int64_t row, int64_t columns) {
    const std::byte* address = row_address(ring, row, columns);
    for (size_t line = 0; line < static_cast<size_t>(columns) * dtype_size(ring.dtype); line += 64) __builtin_prefetch(address + line);
  }

  /// Conv, silu and l2norm of q and k of the segment's rows; k also goes to the ring.
  void prepare_keys(const Run& run, const Segment& segment, int64_t k_head, const ops::GdnInputs& in, const PackedWeights& weights,
                    const ops::GdnStateView& view, const HeadScratch& s) const {
    const int64_t dk = problem_.d_k, nk = problem_.num_k_heads;
    for (int64_t index = segment.begin; index < segment.end; ++index) {
      float* q = s.q + (index - segment.begin) * dk;
      convolve(run, in.qkv, view, weights, index, k_head * dk, dk, q);
      l2_normalize(q, 1.0f / std::sqrt(static_cast<float>(dk)));
      float* k = s.k + (index - segment.boundary) * dk;
      convolve(run, in.qkv, view, weights, index, k_width() + k_head * dk, dk, k);
      l2_normalize(k, 1.0f);
      math_.round(problem_.ring, 1.0f, k, dk);
      math_.store(k, dk, view.ring_k.dtype, row_address(view.ring_k, ring_row(run.slot, index) * nk + k_head, dk));
    }
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

  /// The delta rule row by row for one v head, and the gated norm of its output.
  void mix_head(const Run& run, const Segment& segment, const ops::GdnInputs& in, const PackedWeights& weights, const float* state,
                const ops::GdnStateView& view, const ops::TensorView& out, int64_t head, const HeadScratch& s) const {
    const int64_t dk = problem_.d_k, dv = problem_.d_v, nv = problem_.num_v_heads;
    for (int64_t index = segment.begin; index < segment.end; ++index)
      convolve(run, in.qkv, view, weights, index, 2 * k_width() + head * dv, dv, s.v + (index - segment.begin) * dv);
    for (int64_t group = segment.begin; group < segment.end; group += kRowGroup) {
      const int64_t group_end = std::min(group + kRowGroup, segment.end), num_vectors = 2 * (group_end - group);
      for (int64_t index = group; index < group_end; ++index) {
        std::copy_n(s.k + (index - segment.boundary) * dk, dk, s.keys_queries + 2 * (index - group) * dk);
        std::copy_n(s.q + (index - segment.begin) * dk, dk, s.keys_queries + (2 * (index - group) + 1) * dk);
      }
      math_.dots(s.keys_queries, dk, num_vectors, state, dk, dv, dk, s.from_state, dv);
      math_.dots(s.keys_queries, dk, num_vectors, s.k, dk, group_end - segment.boundary, dk, s.along, kGrid);
      for (int64_t index = group; index < group_end; ++index) {
        const int64_t i = index - segment.boundary, row = run.row(index), place = ring_row(run.slot, index) * nv + head;
        const float* v = s.v + (index - segment.begin) * dv;
        float* u_sum = s.from_state + 2 * (index - group) * dv;
        float* o = u_sum + dv;
        float* along_k = s.along + 2 * (index - group) * kGrid;
        float* along_q = along_k + kGrid;
        const float a = element(in.a, row * nv + head), b = element(in.b, row * nv + head);
        const float beta = round_to(problem_.activation, sigmoid(b));
        const float g = weights.decay[head] * softplus(a + weights.dt_bias[head]);
        const float total = i > 0 ? s.log_decay[i - 1] + g : g;
        s.log_decay[i] = total;
        view.ring_g.data<float>()[place] = total;

        const float decay = std::exp(total);
        for (int64_t c = 0; c < 2 * dv; ++c) u_sum[c] *= decay;
        for (int64_t j = 0; j < i; ++j) s.decays[j] = total - s.log_decay[j];
        math_.exp_minus(s.decays, i, 0.0f);
        for (int64_t j = 0; j < i; ++j) {
          along_k[j] *= s.decays[j];
          along_q[j] *= s.decays[j];
        }
        math_.add_products(along_k, kGrid, 1, 2, s.u, dv, i, dv, u_sum, dv);
        float* u = s.u + i * dv;
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

  /// to = e^G S + sum_j e^(G - Gj) uj kj^T over the whole chunk in scratch, whose u is used up; `from` and `to` may be the same.
  void fold(const float* from, float* to, const HeadScratch& s) const {
    const int64_t dk = problem_.d_k, dv = problem_.d_v;
    const float total = s.log_decay[kGrid - 1];
    for (int64_t j = 0; j < kGrid; ++j) s.decays[j] = total - s.log_decay[j];
    math_.exp_minus(s.decays, kGrid, 0.0f);
    for (int64_t j = 0; j < kGrid; ++j)
      for (int64_t c = 0; c < dv; ++c) s.u[j * dv + c] *= s.decays[j];
    const float decay = std::exp(total);
    for (int64_t i = 0; i < state_size(); ++i) to[i] = decay * from[i];
    math_.add_products(s.u, 1, dv, dv, s.k, dk, kGrid, dk, to, dk);
  }

  ops::GdnMix::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  int64_t channels_, ring_length_, window_length_;
  std::vector<std::vector<int32_t>> v_heads_;  // of each k head
  int64_t max_v_heads_ = 0;
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
