#include "backends/cuda/linears_mma.h"

#include <algorithm>

#include "backends/cuda/device_code.h"
#include "backends/cuda/plain.h"
#include "base/shape.h"

namespace quern::cuda::mma {

using ops::WeightScheme;

namespace {

/// Block scales are kept for every tile of features.
int64_t num_scales(const ops::LinearShape& shape) {
  if (shape.scheme == WeightScheme::kFp8Block) return ceil_div(shape.out_features, kTileFeatures) * (shape.in_features / kBlockColumns);
  return ops::max_scales(shape);
}

}  // namespace

TiledLinear::TiledLinear(const ops::LinearShape& shape, size_t offset_bytes) : shape_(shape), tiles_at_(offset_bytes) {
  const int64_t tiles = ceil_div(shape.out_features, kTileFeatures) * (shape.in_features / kTileColumns);
  scale_at_ = Scratch::size(tiles_at_ + static_cast<size_t>(tiles) * static_cast<size_t>(tile_bytes(ops::is_fp8(shape.scheme))));
  end_ = Scratch::size(scale_at_ + static_cast<size_t>(num_scales(shape)) * sizeof(float));
}

TiledWeight TiledLinear::view(const ops::Buffer& packed) const {
  const std::byte* start = packed.address();
  return {static_cast<int32_t>(shape_.out_features), static_cast<int32_t>(shape_.in_features), scales_of(shape_.scheme), start + tiles_at_, reinterpret_cast<const float*>(start + scale_at_)};
}

Result<TiledLinears> TiledLinears::create(Device& device) {
  TiledLinears linears;
  ASSIGN_OR_RETURN(linears.plain_, LinearLauncher::create(device));
  static constexpr const char* kNames[][3] = {{"multiply_block_8", "multiply_block_16", "multiply_block_32"},
                                              {"multiply_e4m3_8", "multiply_e4m3_16", "multiply_e4m3_32"},
                                              {"multiply_bf16_8", "multiply_bf16_16", "multiply_bf16_32"}};
  Kernels* all[] = {&linears.block_, &linears.e4m3_, &linears.bf16_};
  for (size_t scheme = 0; scheme < 3; ++scheme)
    for (size_t i = 0; i < 3; ++i) {
      ASSIGN_OR_RETURN((*all[scheme])[i], device.function<TiledLinearArgs>("linear_mma", kNames[scheme][i]));
    }
  ASSIGN_OR_RETURN(linears.tile_, device.function<TileWeightArgs>("linear_mma", "tile_weight"));
  ASSIGN_OR_RETURN(linears.tile_scales_, device.function<TileScalesArgs>("linear_mma", "tile_scales"));
  linears.overlap_ = waits_for_predecessors(code_architectures(), device.traits().architecture);
  return linears;
}

ops::Verdict TiledLinears::accepts(DType activation, std::initializer_list<ops::LinearShape> weights) {
  if (activation != DType::kBF16) return ops::refuse("{} activations are not supported; bf16 are", dtype_name(activation));
  for (const ops::LinearShape& weight : weights) {
    if (!ops::is_fp8(weight.scheme) && weight.scheme != WeightScheme::kBF16) return ops::refuse("{} weights are not supported", weight_scheme_name(weight.scheme));
    if (weight.out_features == 0 || weight.in_features == 0) return ops::refuse("an empty shard");
    if (weight.out_features % 2 != 0) return ops::refuse("{} output features are odd", weight.out_features);
    if (weight.in_features % kBlockColumns != 0) return ops::refuse("{} input features are not a multiple of {}", weight.in_features, kBlockColumns);
  }
  return ops::accept();
}

void TiledLinears::pack(const TiledLinear& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream, Tiles order) const {
  const ops::LinearShape& shape = weight.shape();
  ops::check_source(source, shape);
  CHECK(weight.end_bytes() <= packed.size_bytes());
  const TiledWeight to = weight.view(packed);
  const int64_t tile_rows = ceil_div(shape.out_features, kTileFeatures);
  const TileWeightArgs args{source.weight.data<void>(), to.out_features, to.in_features, order, const_cast<void*>(to.tiles)};
  const int64_t pieces = tile_rows * (shape.in_features / kTileColumns) * tile_bytes(order != Tiles::kBF16) / 16;
  cuda_stream(stream).launch(tile_, {.grid = {static_cast<unsigned>(std::min<int64_t>(ceil_div(pieces, kThreads), 1 << 14))}, .block = {kThreads}}, args);
  if (num_scales(shape) == 0) return;
  if (shape.scheme == WeightScheme::kFp8Block) {
    const int64_t row_offset = source.row_offset % ops::kScaleBlock, column_offset = source.column_offset % ops::kScaleBlock;
    if (row_offset % kTileFeatures != 0 || column_offset != 0) {
      cuda_stream(stream).fail(off_the_grid("cuda.mma", row_offset, column_offset, kTileFeatures));
      return;
    }
    const TileScalesArgs scales{source.scale.data<float>(), static_cast<int32_t>(row_offset), static_cast<int32_t>(tile_rows), to.in_features / kBlockColumns, const_cast<float*>(to.scale)};
    cuda_stream(stream).launch(tile_scales_, {.grid = {static_cast<unsigned>(ceil_div(num_scales(shape), kThreads))}, .block = {kThreads}}, scales);
    return;
  }
  stream.copy({source.scale.buffer, source.scale.offset_bytes, DType::kF32, Shape{num_scales(shape)}}, {&packed, weight.scale_at(), DType::kF32, Shape{num_scales(shape)}});
}

void TiledLinears::multiply(Stream& stream, const TiledLinear& weight, const ops::Buffer& packed, DType /*activation*/, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const {
  const TiledLinearArgs args{weight.view(packed), epilogue, static_cast<int32_t>(num_rows), x.x, x.rows, out};
  const Kernels& kernels = !ops::is_fp8(weight.shape().scheme) ? bf16_ : weight.shape().scheme == WeightScheme::kFp8Block ? block_ : e4m3_;
  const size_t size = num_rows <= 8 ? 0 : num_rows <= 16 ? 1 : 2;
  const auto across = static_cast<unsigned>(ceil_div(num_rows, int64_t{8} << size)), along = static_cast<unsigned>(ceil_div(weight.shape().out_features, kTileFeatures));
  stream.launch(kernels[size], {.grid = {across, along}, .block = {kThreads}, .programmatic = overlap_}, args);
}

}  // namespace quern::cuda::mma
