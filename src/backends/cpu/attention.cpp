#include <limits>

#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "backends/cpu/vector_math.h"
#include "ops/kv_dtype.h"

namespace quern::cpu::plain {

namespace {

constexpr int64_t kTile = 8;  // rows of one run that share each decoded block of keys and values

/// Where one thread works on the rows of a tile and the query heads of one kv head; `lane` = row of the tile * heads + head.
struct TileScratch {
  float* queries;   // [lanes, head_dim]
  float* scores;    // [lanes, kKvSplit]
  float* part;      // [lanes, head_dim]: this part's weighted values
  float* total;     // [lanes, head_dim]: all parts so far, relative to max
  float* max;       // [lanes]
  float* sum;       // [lanes]
  float* part_max;  // [lanes]
  float* part_sum;  // [lanes]
  float* block;     // [kGrid, head_dim]: keys or values of one block
};

/// Per row and head: parts of 512 keys from the sequence's start, each with its own maximum m and sum l, merged in order. A row's
/// arithmetic depends on its own index alone.
class AttentionKernel final : public ops::Attention::Kernel {
 public:
  AttentionKernel(const ops::Attention::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), math_(vector_math(path)) {
    heads_of_.resize(static_cast<size_t>(problem.num_kv_heads));
    for (int32_t head = 0; head < problem.num_q_heads; ++head)
      heads_of_[static_cast<size_t>(problem.kv_head[static_cast<size_t>(head)])].push_back(head);
    for (const auto& heads : heads_of_) max_heads_ = std::max<int64_t>(max_heads_, std::ssize(heads));
  }

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return static_cast<size_t>(pool_.num_threads()) * thread_bytes(); }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv,
               int32_t first_index, const ops::Activation& out, ops::Launch& launch) const override {
    // Items are (run, tile of its rows, kv head), in that order.
    const auto num_items = [&](const ops::RowRun& run) { return ceil_div(num_real_rows(rows, run), kTile) * problem_.num_kv_heads; };
    int64_t all_items = 0, cost = 0;
    for (const ops::RowRun& run : rows.runs) {
      const int64_t run_rows = num_real_rows(rows, run);
      if (run_rows == 0) continue;
      all_items += num_items(run);
      cost += 2 * run_rows * problem_.num_q_heads * problem_.head_dim * (int64_t{rows.indices.data<int32_t>()[run.first_row + run_rows - 1]} + 1);
    }
    pool_.parallel_for(all_items, cost / std::max<int64_t>(all_items, 1), [&](int64_t begin, int64_t end, int thread) {
      const TileScratch scratch = scratch_of(launch.workspace, thread);
      for (const ops::RowRun& run : rows.runs) {
        const int64_t run_rows = num_real_rows(rows, run), items = num_items(run);
        for (int64_t item = begin; item < std::min(end, items); ++item) {
          const int64_t tile = item / problem_.num_kv_heads, row = run.first_row + tile * kTile;
          attend(rows.indices.data<int32_t>() + row, row, std::min(kTile, run_rows - tile * kTile), item % problem_.num_kv_heads,
                 rows.slots.block_tables.data<int32_t>() + run.slot * rows.slots.block_tables.shape[1], kv, first_index, query, gate, out.data,
                 scratch);
        }
        begin = std::max<int64_t>(begin - items, 0);
        end -= items;
        if (end <= 0) return;
      }
    });
  }

 private:
  /// Rows of a run that are not padding, which stands at the end.
  static int64_t num_real_rows(const ops::Rows& rows, const ops::RowRun& run) {
    const int32_t* indices = rows.indices.data<int32_t>() + run.first_row;
    return std::count_if(indices, indices + run.num_rows, [](int32_t index) { return index >= 0; });
  }
  [[nodiscard]] int64_t max_lanes() const { return kTile * max_heads_; }
  [[nodiscard]] size_t thread_bytes() const {
    const int64_t d = problem_.head_dim, lanes = max_lanes();
    return 3 * Scratch::size<float>(lanes * d) + Scratch::size<float>(lanes * ops::kKvSplit) + 4 * Scratch::size<float>(lanes) +
           Scratch::size<float>(ops::kGrid * d);
  }
  TileScratch scratch_of(const ops::TensorView& workspace, int thread) const {
    ops::TensorView own = workspace;
    own.offset_bytes += static_cast<size_t>(thread) * thread_bytes();
    own.shape = Shape({static_cast<int64_t>(thread_bytes())});
    CHECK(own.offset_bytes + thread_bytes() <= workspace.offset_bytes + workspace.size_bytes());
    Scratch scratch(own);
    const int64_t d = problem_.head_dim, lanes = max_lanes();
    TileScratch tile;
    tile.queries = scratch.take<float>(lanes * d);
    tile.scores = scratch.take<float>(lanes * ops::kKvSplit);
    tile.part = scratch.take<float>(lanes * d);
    tile.total = scratch.take<float>(lanes * d);
    tile.max = scratch.take<float>(lanes);
    tile.sum = scratch.take<float>(lanes);
    tile.part_max = scratch.take<float>(lanes);
    tile.part_sum = scratch.take<float>(lanes);
    tile.block = scratch.take<float>(ops::kGrid * d);
    return tile;
  }

  void attend(const int32_t* indices, int64_t first_row, int64_t num_rows, int64_t kv_head, const int32_t* block_table,
              const ops::KvCacheView& kv, int64_t first_index, const ops::TensorView& query, const ops::TensorView& gate,
              const ops::TensorView& out, const TileScratch& s) const {
    const std::vector<int32_t>& heads = heads_of_[static_cast<size_t>(kv_head)];
    const int64_t d = problem_.head_dim, num_heads = std::ssize(heads), lanes = num_rows * num_heads;
    const auto source_row = [&](int64_t lane) {
      return (first_row + lane / num_heads) * problem_.num_q_heads + heads[static_cast<size_t>(lane % num_heads)];
    };
    const auto index_of = [&](int64_t lane) { return int64_t{indices[lane / num_heads]}; };
    const int64_t last_index = indices[num_rows - 1];  // rows of a run stand at consecutive indices
    const float k_scale = scale_of(kv.k, kv.k_scale, kv_head), v_scale = scale_of(kv.v, kv.v_scale, kv_head);
    const float scale = k_scale / std::sqrt(static_cast<float>(d));
    for (int64_t lane = 0; lane < lanes; ++lane) {
      math_.load(row_address(query, source_row(lane), d), query.dtype, d, s.queries + lane * d);
      s.max[lane] = -std::numeric_limits<float>::infinity();
      s.sum[lane] = 0;
    }
    std::fill_n(s.total, lanes * d, 0.0f);

    for (int64_t part = first_index / ops::kKvSplit * ops::kKvSplit; part <= last_index; part += ops::kKvSplit) {
      const int64_t part_end = std::min(part + ops::kKvSplit, last_index + 1);
      std::fill_n(s.part, lanes * d, 0.0f);
      const int64_t part_begin = std::max(part, first_index);
      for_blocks(part_begin, part_end, num_rows, num_heads, indices, [&](int64_t begin, int64_t end) { load_block(kv.k, block_table, kv_head, begin, end, s.block); },
                 [&](int64_t begin, int64_t first, int64_t count, int64_t visible) {
                   math_.dots(s.queries + first * d, d, count, s.block, d, visible, d, s.scores + first * ops::kKvSplit + begin - part, ops::kKvSplit);
                 });
      for (int64_t lane = 0; lane < lanes; ++lane) {
        float* scores = s.scores + lane * ops::kKvSplit + part_begin - part;
        const int64_t visible = std::clamp<int64_t>(index_of(lane) + 1 - part_begin, 0, part_end - part_begin);
        for (int64_t j = 0; j < visible; ++j) scores[j] *= scale;
        s.part_max[lane] = math_.max(scores, visible);
        s.part_sum[lane] = math_.exp_minus(scores, visible, s.part_max[lane]);
      }
      for_blocks(part_begin, part_end, num_rows, num_heads, indices, [&](int64_t begin, int64_t end) { load_block(kv.v, block_table, kv_head, begin, end, s.block); },
                 [&](int64_t begin, int64_t first, int64_t count, int64_t visible) {
                   math_.add_products(s.scores + first * ops::kKvSplit + begin - part, ops::kKvSplit, 1, count, s.block, d, visible, d, s.part + first * d, d);
                 });
      for (int64_t lane = 0; lane < lanes; ++lane)
        if (part_begin <= index_of(lane)) merge(s, lane);
    }

    for (int64_t lane = 0; lane < lanes; ++lane) {
      float* values = s.total + lane * d;
      float* gates = s.part + lane * d;
      const float factor = s.sum[lane] > 0 ? v_scale / s.sum[lane] : s.sum[lane];  // no key at all: 0; NaN stays NaN
      math_.load(row_address(gate, source_row(lane), d), gate.dtype, d, gates);
      math_.gate(problem_.activation, values, factor, gates, d);
      math_.store(values, d, out.dtype, row_address(out, source_row(lane), d));
    }
  }

  /// Blocks of the indices [begin, end), one after the other: load(begin, end of the block), then body(begin of the block, first lane, lanes,
  /// keys) for lanes that see the same keys of it, which are its first ones.
  template <class Load, class Body>
  static void for_blocks(int64_t begin, int64_t end, int64_t num_rows, int64_t num_heads, const int32_t* indices, const Load& load,
                         const Body& body) {
    for (int64_t block = begin, next = 0; block < end; block = next) {
      next = std::min((block / ops::kGrid + 1) * ops::kGrid, end);
      load(block, next);
      for (int64_t row = 0, last = 0; row < num_rows; row = last) {
        const auto visible = [&](int64_t r) { return std::clamp<int64_t>(int64_t{indices[r]} + 1 - block, 0, next - block); };
        for (last = row + 1; last < num_rows && visible(last) == visible(row);) ++last;
        if (visible(row) > 0) body(block, row * num_heads, (last - row) * num_heads, visible(row));
      }
    }
  }

  /// Adds a part to what came before it.
  void merge(const TileScratch& s, int64_t lane) const {
    const float max = std::max(s.max[lane], s.part_max[lane]);
    const float before = std::exp(s.max[lane] - max), now = std::exp(s.part_max[lane] - max);
    s.sum[lane] = s.sum[lane] * before + s.part_sum[lane] * now;
    float* total = s.total + lane * problem_.head_dim;
    const float* part = s.part + lane * problem_.head_dim;
    for (int64_t i = 0; i < problem_.head_dim; ++i) total[i] = total[i] * before + part[i] * now;
    s.max[lane] = max;
  }

  /// Keys or values of the indices [begin, end), all in one block, as stored.
  void load_block(const ops::TensorView& cache, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end, float* out) const {
    if (begin >= end) return;
    const int64_t place = (int64_t{block_table[begin / ops::kGrid]} * problem_.num_kv_heads + kv_head) * ops::kGrid + begin % ops::kGrid;
    math_.load(row_address(cache, place, problem_.head_dim), cache.dtype, (end - begin) * problem_.head_dim, out);
  }
  static float scale_of(const ops::TensorView& cache, const ops::TensorView& scales, int64_t kv_head) {
    return cache.dtype == DType::kE4M3 && !scales.empty() ? scales.data<float>()[kv_head] : 1.0f;
  }

  ops::Attention::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  const VectorMath& math_;
  std::vector<std::vector<int32_t>> heads_of_;  // query heads of each kv head
  int64_t max_heads_ = 0;
};

}  // namespace

ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits&) {
  if (ops::Verdict verdict = ops::accepts_kv(problem.kv, problem.activation); !verdict.accepted) return verdict;
  return accepts_activation(problem.activation, problem.out);
}

Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device, LinearPath path) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  for (const int32_t head : problem.kv_head) CHECK(head >= 0 && head < problem.num_kv_heads);
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
