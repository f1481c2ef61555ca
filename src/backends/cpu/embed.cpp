#include <cstring>

#include "backends/cpu/numeric.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

constexpr int64_t kPiece = 256;  // columns decoded at a time

class EmbedKernel final : public ops::Embed::Kernel {
 public:
  EmbedKernel(const ops::Embed::Problem& problem, ThreadPool& pool, LinearPath path)
      : problem_(problem), pool_(pool), path_(path), table_({problem.vocab_size, problem.hidden, problem.scheme}, 0, path) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation, path_); }
  [[nodiscard]] size_t packed_bytes() const override { return table_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return cpu::table_layout(path_); }
  void pack(const ops::LinearSource& table, ops::Buffer& packed, ops::Stream&) const override { table_.pack(table, packed, pool_); }

  void enqueue(const ops::Rows& rows, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    for (int32_t row = 0; row < rows.num_rows; ++row) resolve(rows, row);
    if (rows.num_rows > 0) enqueue_lookup(rows.tokens.first(rows.num_rows), packed, x, launch);
  }

  void enqueue_lookup(const ops::TensorView& tokens, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch&) const override {
    const LinearView table = table_.view(packed);
    const auto* ids = tokens.data<int32_t>();
    pool_.parallel_for(tokens.shape[0], 2 * problem_.hidden, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        CHECK(ids[row] >= 0 && ids[row] < problem_.end_of_ids());
        const int64_t table_row = ids[row] - problem_.first_id;
        if (table_row < 0 || table_row >= problem_.vocab_size) {
          std::memset(row_address(x, row, problem_.hidden), 0, static_cast<size_t>(problem_.hidden) * dtype_size(x.dtype));
          continue;
        }
        for (int64_t column = 0; column < problem_.hidden; column += kPiece) {
          float values[kPiece];
          const int64_t n = std::min(kPiece, problem_.hidden - column);
          decode_row(table, table_row, column, column + n, values);
          store_f32(values, n, x.dtype, row_address(x, row, problem_.hidden) + static_cast<size_t>(column) * dtype_size(x.dtype));
        }
      }
    });
  }

 private:
  /// Token, index and position of a row.
  static void resolve(const ops::Rows& rows, int32_t row) {
    int32_t& token = rows.tokens.data<int32_t>()[row];
    int32_t& index = rows.indices.data<int32_t>()[row];
    int32_t* position = rows.positions.data<int32_t>() + int64_t{row} * 3;
    const int32_t r = rows.row_runs.data<int32_t>()[row];
    if (r < 0) {
      token = 0;
      index = -1;
      std::fill_n(position, 3, 0);
      return;
    }
    const auto& run = rows.run_table.data<ops::RunEntry>()[r];
    const int32_t i = row - run.first_row;
    const ops::SlotTables& slots = rows.slots;
    index = slots.cursor.data<int32_t>()[run.slot] + i;
    token = rows.given_tokens.data<int32_t>()[row];
    if (token < 0) {
      CHECK(i <= slots.drafts.shape[1]);
      token = i == 0 ? slots.last_token.data<int32_t>()[run.slot] : slots.drafts.data<int32_t>()[run.slot * slots.drafts.shape[1] + i - 1];
    }
    const bool decode = (run.flags & ops::kRunIsDecode) != 0;
    for (int axis = 0; axis < 3; ++axis)
      position[axis] = decode ? index + slots.position_delta.data<int32_t>()[run.slot] : rows.run_positions.data<int32_t>()[int64_t{r} * 3 + axis] + i;
  }

  ops::Embed::Problem problem_;
  ThreadPool& pool_;
  LinearPath path_;
  PackedLinear table_;
};

}  // namespace

ops::Verdict accepts(const ops::Embed::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::Embed::Kernel>> make(const ops::Embed::Problem& problem, ops::Device& device, LinearPath path) {
  return std::unique_ptr<ops::Embed::Kernel>(std::make_unique<EmbedKernel>(problem, pool_of(device), path));
}

}  // namespace quern::cpu::plain
