#pragma once

#include <map>

#include "backends/opencl/packed_linear.h"

namespace quern::opencl {

/// One weight's place in a packed buffer for the matrix units: tiles of 16 features (tile16.cl), f32 scales of the blocks of each tile, f32 factors of the features.
/// Two weights of one shape may alternate, tile by tile.
class TiledLinear {
 public:
  TiledLinear(const ops::LinearShape& shape, size_t offset_bytes, int32_t num_weights = 1);

  /// One past the last byte, a multiple of 256: where the next weight begins.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] const ops::LinearShape& shape() const { return shape_; }
  [[nodiscard]] DType dtype() const { return ops::stored_dtype(shape_.scheme); }
  [[nodiscard]] int64_t num_tiles() const { return (shape_.out_features + 15) / 16; }
  [[nodiscard]] int32_t num_weights() const { return num_weights_; }
  [[nodiscard]] Place tiles_in(const ops::Buffer& packed) const { return place_in(packed, tiles_at_); }
  [[nodiscard]] Place scales_in(const ops::Buffer& packed) const { return place_in(packed, scales_at_); }
  [[nodiscard]] Place factors_in(const ops::Buffer& packed) const { return place_in(packed, factors_at_); }

 private:
  ops::LinearShape shape_;
  int32_t num_weights_;
  size_t tiles_at_, scales_at_, factors_at_, end_;
};

/// Definitions with which a kernel of dpas.cl is built; each without emulation is a line of programs.txt. `num_tiles` 2: gate and up of dpas_decode. `scaled`: for matrix
/// units that flush half subnormals.
std::string dpas_definitions(DType weight, Epilogue epilogue, bool decode, int num_tiles, bool large, bool scaled, std::string_view emulation = {});

/// The kernels of dpas.cl and tile16.cl: linear layers on the matrix units of Xe2, for bf16 activations and inputs in multiples of 128 (dpas::accepts_linears).
class DpasLinears {
 public:
  using Packed = TiledLinear;
  struct Pair {
    TiledLinear both;
    Pair(const ops::LinearShape& gate, const ops::LinearShape& /*up*/, size_t offset_bytes) : both(gate, offset_bytes, 2) {}
    [[nodiscard]] size_t end_bytes() const { return both.end_bytes(); }
  };
  struct Input {
    Place halves, row_scales, copies;  // f16 [count, width] with f32 [count], and bf16 [count, width]; each at a multiple of 64 bytes
    int64_t count = 0, width = 0;
  };
  static constexpr std::string_view arithmetic(DType) { return "opencl.dpas.bf16"; }
  static Result<DpasLinears> create(Device& device, DType activation, std::initializer_list<LinearUse> weights);
  static Result<DpasLinears> create_pair(Device& device, DType activation, const ops::LinearShape& gate, const ops::LinearShape& up);

  void pack(const TiledLinear& weight, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const { tile(weight, 0, source, packed, stream); }
  void pack(const Pair& pair, const ops::LinearSource& gate, const ops::LinearSource& up, ops::Buffer& packed, Stream& stream) const {
    tile(pair.both, 0, gate, packed, stream);
    tile(pair.both, 1, up, packed, stream);
  }
  [[nodiscard]] size_t input_bytes(int64_t rows, int64_t width) const {
    return 2 * Scratch::size(static_cast<size_t>(rows * width) * 2) + Scratch::size(static_cast<size_t>(rows) * sizeof(float));
  }
  Input input(Stream& stream, const Place& x, int64_t num_rows, int64_t width, Scratch& scratch, const Place& x_rows = {}) const;
  void multiply(Stream& stream, const TiledLinear& weight, const ops::Buffer& packed, const Input& x, std::span<const RowSegment> segments, Epilogue epilogue,
                const Place& out) const;
  void multiply_pair(Stream& stream, const Pair& pair, const ops::Buffer& packed, const Input& x, std::span<const RowSegment> segments, const Place& out) const;

 private:
  /// The kernels of one weight dtype and epilogue; of a pair, `decode` has both epilogues in it.
  struct Kernels {
    Function decode[2];  // for up to 8 rows, for up to 32
    Function prompt[2];  // tiles of 32 rows, of 256
  };
  Result<void> add(Device& device, DType weight, Epilogue epilogue, bool decode, int num_tiles);
  void tile(const TiledLinear& weight, int32_t which, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const;
  void decode(Stream& stream, const Kernels& kernels, const TiledLinear& weight, const ops::Buffer& packed, const Input& x, const RowSegment& rows, size_t out_bytes,
              const Place& out) const;
  void prompt(Stream& stream, const Kernels& kernels, const TiledLinear& weight, int32_t which, const ops::Buffer& packed, const Input& x, const RowSegment& rows,
              size_t out_bytes, const Place& out) const;

  Function operand_rows_, tile_weights_, tile_scales_;
  bool needs_halves_ = false, needs_copies_ = false;
  std::map<std::pair<DType, Epilogue>, Kernels> kernels_;
};

}  // namespace quern::opencl
