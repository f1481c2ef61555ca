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

  void enqueue(const ops::Rows& rows, std::span<const ops::Embed::RunInput> inputs, const ops::Buffer& packed, const ops::TensorView& x,
               ops::Launch& launch) const override {
    CHECK(inputs.size() == rows.runs.size());
    for (size_t i = 0; i < inputs.size(); ++i) resolve(rows, rows.runs[i], inputs[i]);
    if (rows.num_rows > 0) enqueue_lookup(rows.tokens.first(rows.num_rows), packed, x, launch);
  }

  void enqueue_lookup(const ops::TensorView& tokens, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch&) const override {
    const LinearView table = table_.view(packed);
    const auto* ids = tokens.data<int32_t>();
    pool_.parallel_for(tokens.shape[0], 2 * problem_.hidden, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        CHECK(ids[row] >= 0 && ids[row] < problem_.vocab_size);
        for (int64_t column = 0; column < problem_.hidden; column += kPiece) {
          float values[kPiece];
          const int64_t n = std::min(kPiece, problem_.hidden - column);
          decode_row(table, ids[row], column, column + n, values);
          store_f32(values, n, x.dtype, row_address(x, row, problem_.hidden) + static_cast<size_t>(column) * dtype_size(x.dtype));
        }
      }
    });
  }

 private:
  /// Token, index and position of each row of a run.
  static void resolve(const ops::Rows& rows, const ops::RowRun& run, const ops::Embed::RunInput& input) {
    const int32_t cursor = rows.slots.cursor.data<int32_t>()[run.slot];
    const bool from_device = input.tokens.empty();
    CHECK(from_device || std::ssize(input.tokens) == run.num_rows);
    const int32_t* drafts = nullptr;
    if (from_device && run.num_rows > 1) {
      CHECK(run.num_rows - 1 <= rows.slots.drafts.shape[1]);
      drafts = rows.slots.drafts.data<int32_t>() + run.slot * rows.slots.drafts.shape[1];
    }
    const int32_t delta = run.kind == ops::RowKind::kDecode ? rows.slots.position_delta.data<int32_t>()[run.slot] : 0;
    for (int32_t i = 0; i < run.num_rows; ++i) {
      const int32_t row = run.first_row + i, index = cursor + i;
      int32_t token = 0;
      if (!from_device)
        token = input.tokens[static_cast<size_t>(i)];
      else
        token = i == 0 ? rows.slots.last_token.data<int32_t>()[run.slot] : drafts[i - 1];
      rows.tokens.data<int32_t>()[row] = token;
      rows.indices.data<int32_t>()[row] = index;
      for (int axis = 0; axis < 3; ++axis)
        rows.positions.data<int32_t>()[row * 3 + axis] = run.kind == ops::RowKind::kDecode ? index + delta : input.position[axis] + i;
    }
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
