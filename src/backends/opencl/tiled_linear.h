#pragma once

#include "backends/opencl/packed_linear.h"

namespace quern::opencl {

/// Weights of one dtype and of the same inputs, one after the other in a packed buffer for the matrix units: tiles of 16 features (tile16.cl), f32 scales of the blocks of
/// each tile, f32 factors of the features. Gate and up alternate, tile by tile.
class TiledLinear {
 public:
  TiledLinear(std::vector<ops::LinearShape> weights, bool alternate, size_t offset_bytes);

  /// One past the last byte, a multiple of 256: where the next weights begin.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] const std::vector<ops::LinearShape>& weights() const { return weights_; }
  [[nodiscard]] int64_t in_features() const { return weights_.front().in_features; }
  [[nodiscard]] DType dtype() const { return ops::stored_dtype(weights_.front().scheme); }
  [[nodiscard]] int64_t num_tiles() const { return num_tiles_; }
  /// Tile t of a weight is tile t * tile_step + first_tile of the packing.
  [[nodiscard]] int32_t tile_step() const { return alternate_ ? static_cast<int32_t>(weights_.size()) : 1; }
  [[nodiscard]] int32_t first_tile(size_t number) const;
  [[nodiscard]] Place tiles_in(const ops::Buffer& packed) const { return place_in(packed, tiles_at_); }
  [[nodiscard]] Place scales_in(const ops::Buffer& packed) const { return place_in(packed, scales_at_); }
  [[nodiscard]] Place factors_in(const ops::Buffer& packed) const { return place_in(packed, factors_at_); }

 private:
  std::vector<ops::LinearShape> weights_;
  bool alternate_;
  int64_t num_tiles_ = 0;
  size_t tiles_at_, scales_at_, factors_at_, end_;
};

/// A program of dpas.cl; each without emulation is a line of programs.txt.
struct DpasProgram {
  DType weight = DType::kE4M3;
  bool scaled = false;  // for matrix units that flush half subnormals
  bool pair = false;    // gate and up, kPair
  // Decode rows: how many a launch takes, 1, 8 or 32; and whether up to 8 are normed on the way, and whether bf16 weights follow those in e4m3.
  int64_t rows = 0;
  bool norms = false, mixed = false;
  // Prompt rows, where `rows` is 0: tiles of 256 rows or of 32, and the epilogue.
  bool large = false;
  Epilogue epilogue = Epilogue::kStore;
  [[nodiscard]] std::string definitions(std::string_view emulation = {}) const;
};

/// The kernels of dpas.cl, dpas_operands.cl and tile16.cl: linear layers on the matrix units of Xe2, for bf16 activations and inputs in multiples of 128
/// (dpas::accepts_linears), up to four weights. Up to 8 decode rows take one launch for all weights that are in one dtype, or in e4m3 and bf16.
class DpasLinears {
 public:
  static constexpr std::string_view arithmetic(DType) { return "opencl.dpas.bf16"; }
  static Result<DpasLinears> create(Device& device, DType activation, const LinearUse& use);

  [[nodiscard]] size_t end_bytes() const { return groups_.back().tiled.end_bytes(); }
  [[nodiscard]] size_t scratch_bytes(int64_t rows) const;
  void pack(size_t number, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const;
  void multiply(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, std::span<const RowSegment> segments, std::span<const Place> outs, Scratch& scratch) const;

 private:
  /// Weights of one dtype, by their number.
  struct Group {
    TiledLinear tiled;
    std::vector<size_t> numbers;
    Function decode[3];  // for 1 row, for up to 8, for 32
    Function prompt[2];  // tiles of 32 rows, of 256
  };
  /// Rows as matrix units take them: halves f16 and copies bf16 [count, width], each where a group needs it and at a multiple of 64 bytes.
  struct Operands {
    Place halves, copies, scales, factors;
    int32_t scales_stride = 0;
  };
  /// A product's place for the kernels.
  struct Part {
    Place out;
    int32_t features = 0;
  };
  Operands operands(Stream& stream, const LinearRows& rows, const RowSegment& segment, Scratch& scratch) const;
  void decode(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, const RowSegment& segment, std::span<const Place> outs, Scratch& scratch) const;
  void prompt(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, const RowSegment& segment, std::span<const Place> outs, Scratch& scratch) const;
  /// The products of the weights of some groups, from a row on.
  [[nodiscard]] std::array<Part, 4> parts(std::span<const Group> groups, std::span<const Place> outs, int64_t row) const;

  LinearUse use_;
  Function decode_operands_, prompt_operands_, tile_weights_, tile_scales_;
  std::vector<Group> groups_;
  bool mixed_ = false;  // decode of the first group multiplies with the second as well
  bool needs_halves_ = false, needs_copies_ = false;
};

}  // namespace quern::opencl
