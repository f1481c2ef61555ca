#include <cstring>

#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

class DraftRowsKernel final : public ops::DraftRows::Kernel {
 public:
  explicit DraftRowsKernel(const ops::DraftRows::Problem& problem) : problem_(problem) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cpu.plain"; }

  void enqueue_first(const ops::TensorView& runs, const ops::Rows& step, const ops::SampleOutput& sampled, const ops::Rows& rows,
                     const ops::TensorView& last_rows, ops::Launch&) const override {
    std::fill_n(rows.tokens.data<int32_t>(), rows.num_rows, 0);
    std::fill_n(rows.indices.data<int32_t>(), rows.num_rows, -1);
    std::fill_n(rows.positions.data<int32_t>(), 3 * rows.num_rows, 0);
    for (int64_t r = 0; r < runs.shape[0]; ++r) {
      const ops::DraftRun& draft = runs.data<ops::DraftRun>()[r];
      const auto& run = step.run_table.data<ops::RunEntry>()[r];
      int32_t& last_row = last_rows.data<int32_t>()[r];
      last_row = -1;
      if (draft.slot < 0 || draft.fill == 0 || sampled.non_finite.data<int32_t>()[r] != 0) continue;
      const int32_t* tokens = sampled.tokens.data<int32_t>() + r * (problem_.k_max + 1);
      const int32_t num_tokens = sampled.num_tokens.data<int32_t>()[r];
      const bool verify = (run.flags & ops::kRunIsCommitted) == 0;
      const int32_t num_committed = verify ? num_tokens : run.num_rows;
      const int32_t after = num_tokens > 0 ? tokens[num_tokens - 1] : draft.following_token;
      const int32_t num_pairs = after >= 0 ? num_committed : num_committed - 1;
      for (int32_t p = 0; p < num_pairs; ++p) {
        const int32_t row = run.first_row + p;
        int32_t token = after;
        if (p + 1 < num_committed) token = verify ? tokens[p] : step.tokens.data<int32_t>()[row + 1];
        place(rows, row, token, step.indices.data<int32_t>()[row] + 1, step.positions.data<int32_t>() + 3 * row);
      }
      if (draft.depth > 0 && num_pairs > 0) last_row = run.first_row + num_pairs - 1;
    }
  }

  void enqueue_next(const ops::TensorView& runs, int32_t pass, const ops::TensorView& ids, const ops::Rows& before, const ops::TensorView& hidden,
                    const ops::Rows& rows, const ops::TensorView& hidden_out, const ops::TensorView& last_rows, const ops::TensorView& drafts,
                    ops::Launch&) const override {
    const size_t row_bytes = static_cast<size_t>(problem_.hidden) * dtype_size(problem_.activation);
    const int64_t table_width = rows.slots.drafts.shape[1];
    for (int64_t r = 0; r < runs.shape[0]; ++r) {
      const ops::DraftRun& draft = runs.data<ops::DraftRun>()[r];
      int32_t& last_row = last_rows.data<int32_t>()[r];
      const int32_t row = last_row, id = ids.data<int32_t>()[r];
      last_row = -1;
      rows.indices.data<int32_t>()[r] = -1;
      rows.tokens.data<int32_t>()[r] = 0;
      std::fill_n(rows.positions.data<int32_t>() + 3 * r, 3, 0);
      std::memset(row_address(hidden_out, r, problem_.hidden), 0, row_bytes);
      if (row < 0) continue;
      rows.slots.drafts.data<int32_t>()[draft.slot * table_width + pass] = id;
      drafts.data<int32_t>()[r * problem_.k_max + pass] = id;
      if (draft.depth <= pass + 1) continue;
      place(rows, static_cast<int32_t>(r), id, before.indices.data<int32_t>()[row] + 1, before.positions.data<int32_t>() + 3 * row);
      std::memcpy(row_address(hidden_out, r, problem_.hidden), row_address(hidden, row, problem_.hidden), row_bytes);
      last_row = static_cast<int32_t>(r);
    }
  }

 private:
  /// `position`: (t, h, w) of the row whose hidden is paired with the token.
  static void place(const ops::Rows& rows, int32_t row, int32_t token, int32_t index, const int32_t* position) {
    rows.tokens.data<int32_t>()[row] = token;
    rows.indices.data<int32_t>()[row] = index;
    for (int axis = 0; axis < 3; ++axis) rows.positions.data<int32_t>()[3 * row + axis] = position[axis] + 1;
  }

  ops::DraftRows::Problem problem_;
};

}  // namespace

ops::Verdict accepts(const ops::DraftRows::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::DraftRows::Kernel>> make(const ops::DraftRows::Problem& problem, ops::Device&) {
  return std::unique_ptr<ops::DraftRows::Kernel>(std::make_unique<DraftRowsKernel>(problem));
}

}  // namespace quern::cpu::plain
