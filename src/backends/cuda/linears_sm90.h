#pragma once

#include <algorithm>
#include <array>

#include "backends/cuda/rows_sm90.h"
#include "backends/cuda/sm90.h"
#include "backends/cuda/stream.h"
#include "backends/cuda/tile_layer.h"
#include "ops/kernel.h"

namespace quern::cuda::sm90 {

inline constexpr std::string_view kArithmeticE4M3 = "cuda.sm90.wgmma.e4m3.k128", kArithmeticBF16 = "cuda.sm90.wgmma.bf16";
inline constexpr std::array kColumns = {8, 16, 32, 64, 128, 256};

/// Among how many of `most` blocks the list of a weight's tiles is cut: of fewer than `most` where each then has a whole tile row, or the same share of one, and no more than kMore tiles besides.
/// Then fewer parts have to be added up, none or those of blocks that end together.
constexpr int decode_blocks(int tiles, int k_blocks, int most) {
  constexpr int64_t kMore = 2;
  const int64_t total = int64_t{tiles} * k_blocks, even = int64_t{tiles} * std::min(most / tiles, k_blocks);
  if (total <= most) return static_cast<int>(total);
  const auto each = [&](int64_t blocks) { return (total + blocks - 1) / blocks; };
  return even > 0 && each(even) <= each(most) + kMore ? static_cast<int>(even) : most;
}

/// How many of a launch's `most` blocks, those without tiles, multiply all side rows of more than 64 decode rows; 0: every block some, when its tiles are done. Where the others are not kept waiting:
/// a block of 128 of K takes as long as kTiles tiles (measured with the 96 side rows of 27B and 256 rows). `k_blocks`: of 128.
constexpr int side_blocks(const LinearLayer& linear, int k_blocks, int most) {
  constexpr int kTiles = 7;
  const SideRows& side = linear.side;
  const int idle = most - linear.blocks, groups = side_groups(side.num_b) + side_groups(side.num_a);
  if (side.weight == nullptr || idle <= 0 || side.num_b == 0 || side.num_a == 0 || groups > kSideGroups) return 0;
  const int slices = (side_slices(k_blocks) + idle - 1) / idle;
  return slices * kSideSlice * kTiles <= linear.tiles * linear.k_blocks / linear.blocks ? idle : 0;
}

/// The first rows of a step are prompt rows, the others decode rows and padding.
struct RowSplit {
  int64_t prompt = 0, decode = 0;
  RowSplit() = default;
  explicit RowSplit(const ops::Rows& rows) {
    for (const ops::RowRun& run : rows.runs)
      if (run.kind == ops::RowKind::kPrompt) prompt = std::max<int64_t>(prompt, run.first_row + run.num_rows);
    decode = rows.num_rows - prompt;
  }
};

/// Rows on their way into linear layers, bf16 [rows, columns].
struct RowsIn {
  const void* data = nullptr;
  int64_t columns = 0;
  /// The rows from `row` on.
  [[nodiscard]] RowsIn from(int64_t row) const { return {static_cast<const std::byte*>(data) + row * columns * 2, columns}; }
};

/// A launch's workspace for decode rows: `spare`, and their e4m3 or bf16 form.
struct DecodePlaces {
  static constexpr int64_t kSpareBytes = 32768;  // a row: side rows' bf16 input, or what attn_in rotates
  std::byte *spare, *x_scale, *x, *end;
  DecodePlaces(std::byte* workspace, int64_t rows, int64_t in_features);
};

/// A launch's workspace for prompt rows: their e4m3 and bf16 forms, as far as wanted, and `spare_columns` bf16 more a row.
struct PromptPlaces {
  std::byte *x8, *x_scale, *x16, *spare, *end;
  PromptPlaces(std::byte* workspace, int64_t rows, int64_t in_features, bool e4m3, bool bf16, int64_t spare_columns);
};

inline std::byte* row_data(const ops::TensorView& tensor, int64_t row = 0, int64_t columns = 0) {
  return tensor.buffer == nullptr ? nullptr : tensor.data<std::byte>() + row * columns * 2;
}
inline std::string_view arithmetic_id(const TileLayer& layer) { return layer.is_e4m3() ? kArithmeticE4M3 : kArithmeticBF16; }
inline ops::Verdict accepts_activation(DType activation, ops::ActivationLayout layout = ops::ActivationLayout::kPlain) {
  if (activation != DType::kBF16) return ops::refuse("{} activations are not supported; bf16 are", dtype_name(activation));
  if (layout != ops::ActivationLayout::kPlain) return ops::refuse("activations travel in plain layout");
  return ops::accept();
}

/// The linear kernels of one device: what the ops of this platform are made of.
class Linears {
 public:
  /// `num_side_units`: of the layers with side rows, TileLayer::num_side_units().
  static Result<Linears> load(Device& device, PromptShape shape, int num_side_units = 0);

  [[nodiscard]] const Packers& packers() const { return packers_; }
  /// What `layer` needs, whichever rows there are; `spare_columns` as in PromptPlaces.
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows, const TileLayer& layer, int64_t spare_columns = 0) const;

  /// Rows that one launch takes, and the spare place of its workspace.
  struct Piece {
    int64_t first_row = 0, rows = 0;
    std::byte* spare = nullptr;
  };
  /// `layer` for the rows of a step. `outputs(linear, piece)` completes what a launch is told of it: epilogue, eps, segments. `then(piece)` may enqueue what follows on the piece.
  template <class Outputs, class Then>
  void enqueue(Stream& stream, const TileLayer& layer, const ops::Buffer& packed, const ops::Rows& rows, const RowsIn& in, const ops::TensorView& workspace,
               const Outputs& outputs, int64_t spare_columns, const Then& then) const {
    const RowSplit split(rows);
    LinearLayer linear = layer.linear(packed);
    if (split.prompt > 0) {
      const PromptPlaces places(workspace.data<std::byte>(), split.prompt, layer.in_features(), layer.is_e4m3(), !layer.is_e4m3() || layer.has_side(), spare_columns);
      const Piece piece{0, split.prompt, places.spare};
      outputs(linear, piece);
      prompt(stream, layer, packed, linear, in, split.prompt, places);
      then(piece);
    }
    for (int64_t row = split.prompt; row < rows.num_rows; row += kMaxDecodeRows) {
      const int64_t count = std::min<int64_t>(rows.num_rows - row, kMaxDecodeRows);
      const Piece piece{row, count, DecodePlaces(workspace.data<std::byte>(), count, layer.in_features()).spare};
      outputs(linear, piece);
      linear.in = in.from(row).data;
      linear.in_stride = in.columns;
      launch_decode(stream, linear, layer.is_e4m3(), count, layer.arrivals(packed), workspace);
      then(piece);
    }
  }
  template <class Outputs>
  void enqueue(Stream& stream, const TileLayer& layer, const ops::Buffer& packed, const ops::Rows& rows, const RowsIn& in, const ops::TensorView& workspace,
               const Outputs& outputs) const {
    enqueue(stream, layer, packed, rows, in, workspace, [&](LinearLayer& linear, const Piece& piece) { outputs(linear, piece.first_row); }, 0, [](const Piece&) {});
  }
  /// The same where the input is more than a norm: `fill(places, row, stream)` enqueues the quantisation of the rows from `row` on into x8 or x16 of `places`.
  template <class Fill, class Outputs>
  void enqueue_filled(Stream& stream, const TileLayer& layer, const ops::Buffer& packed, const RowSplit& split, const ops::TensorView& workspace, const Fill& fill,
                      const Outputs& outputs) const {
    LinearLayer linear = layer.linear(packed);
    if (split.prompt > 0) {
      outputs(linear, 0);
      const PromptPlaces places(workspace.data<std::byte>(), split.prompt, layer.in_features(), layer.is_e4m3(), !layer.is_e4m3(), 0);
      fill(to_fill(layer, split.prompt, places.x8, places.x_scale, places.x16), 0, stream);
      multiply_prompt(stream, linear, layer.is_e4m3(), split.prompt, places);
    }
    const int64_t end = split.prompt + split.decode;
    for (int64_t row = split.prompt; row < end; row += kMaxDecodeRows) {
      const int64_t rows = std::min<int64_t>(end - row, kMaxDecodeRows);
      outputs(linear, row);
      const DecodePlaces places(workspace.data<std::byte>(), rows, layer.in_features());
      fill(to_fill(layer, rows, places.x, places.x_scale, places.x), row, stream);
      launch_decode(stream, linear, layer.is_e4m3(), rows, layer.arrivals(packed), workspace);
    }
  }
  void quantise(Stream& stream, const QuantiseArgs& args) const;
  /// Both in one launch; they have norms.
  void norm_pair(Stream& stream, const QuantiseArgs& first, const QuantiseArgs& second) const;

 private:
  struct Kind {
    std::array<Function<DecodeArgs>, kColumns.size()> decode;
    Function<PromptArgs> prompt, prompt_pair, prompt_tall_pair;
  };
  void prompt(Stream& stream, const TileLayer& layer, const ops::Buffer& packed, const LinearLayer& linear, const RowsIn& in, int64_t rows,
              const PromptPlaces& places) const;
  /// As quantise(), for rows of `in` in their order and no `out`.
  void quantise_prompt(Stream& stream, const QuantiseArgs& args) const;
  void multiply_prompt(Stream& stream, const LinearLayer& linear, bool e4m3, int64_t rows, const PromptPlaces& places) const;
  [[nodiscard]] PromptShape fastest_shape(const LinearLayer& linear, bool e4m3, int64_t rows) const;
  static QuantiseArgs to_fill(const TileLayer& layer, int64_t rows, std::byte* x8, std::byte* x_scale, std::byte* x16);
  /// Decode rows, up to kMaxDecodeRows.
  void launch_decode(Stream& stream, LinearLayer linear, bool e4m3, int64_t rows, int32_t* arrivals, const ops::TensorView& workspace) const;

  Packers packers_;
  Function<QuantisePairArgs> norm_pair_;
  Function<QuantiseArgs> quantise_, norm_prompt_, quantise_prompt_;
  std::array<Function<DecodeArgs>, 3> resident_;  // one, two, and up to kResidentRows
  Kind e4m3_, bf16_;
  int num_sms_ = 0, max_shared_bytes_ = 0;
  std::shared_ptr<ops::Buffer> parts_;       // DecodeArgs::parts
  std::shared_ptr<ops::Buffer> side_parts_;  // SideRows::parts
  PromptShape shape_ = PromptShape::kFastest;
};

}  // namespace quern::cuda::sm90
