#include "backends/opencl/tiled_linear.h"

#include <algorithm>

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "base/shape.h"

namespace quern::opencl {

using ops::kScaleBlock;

namespace {

constexpr size_t kItems = 64;                             // of tile16.cl
constexpr size_t kSubGroup = 16, kSplits = 8;             // of dpas.cl
constexpr int64_t kSmallDecode = 8, kLargeDecode = 32;    // rows of a dpas_decode
constexpr int64_t kSmallPrompt = 32, kLargePrompt = 256;  // rows of a dpas_prompt's work-group
constexpr int64_t kPromptFeatures = 256;
constexpr int64_t kManyPromptRows = 128;                  // from which the large tiles are used

/// Registers of a work-item's thread: 256 instead of 128. The kernels named spill without (scripts/xpu-check).
constexpr std::string_view kLargeRegisterFile = " -cl-intel-256-GRF-per-thread";

Place shifted(Place place, int64_t bytes) {
  if (place.buffer != nullptr) place.offset_bytes += static_cast<uint64_t>(bytes);
  return place;
}

}  // namespace

TiledLinear::TiledLinear(const ops::LinearShape& shape, size_t offset_bytes, int32_t num_weights) : shape_(shape), num_weights_(num_weights), tiles_at_(offset_bytes) {
  const int64_t tiles = num_tiles() * num_weights;
  scales_at_ = Scratch::size(tiles_at_ + static_cast<size_t>(tiles * 16 * shape.in_features) * dtype_size(dtype()));
  factors_at_ = Scratch::size(scales_at_ + static_cast<size_t>(tiles * (shape.in_features / kScaleBlock)) * sizeof(float));
  end_ = Scratch::size(factors_at_ + static_cast<size_t>(tiles * 16) * sizeof(float));
}

std::string dpas_definitions(DType weight, Epilogue epilogue, bool decode, int num_tiles, bool large, bool scaled, std::string_view emulation) {
  const std::string shape = decode  ? fmt::format("-DDECODE -DTILES={} -DROW_GROUPS={}", num_tiles, (large ? kLargeDecode : kSmallDecode) / 8)
                            : large ? "-DSGM=64 -DWGM=4"
                                    : "-DSGM=32 -DWGM=1";
  return fmt::format("-cl-std=CL3.0 -DACTIVATION_BF16 {}{} -DEPILOGUE={} {}{}", weight_definition(weight), scaled ? " -DSCALED_OPERANDS" : "", static_cast<int>(epilogue), shape,
                     !emulation.empty() ? emulation : large || !decode ? kLargeRegisterFile : "");
}

Result<DpasLinears> DpasLinears::create(Device& device, DType activation, std::initializer_list<LinearUse> weights) {
  CHECK(activation == DType::kBF16);
  DpasLinears linears;
  const std::string_view definitions = plain::activation_definition(activation);
  ASSIGN_OR_RETURN(linears.operand_rows_, device.function("tile16", "operand_rows", definitions));
  ASSIGN_OR_RETURN(linears.tile_weights_, device.function("tile16", "tile_weights", definitions));
  ASSIGN_OR_RETURN(linears.tile_scales_, device.function("tile16", "tile_scales", definitions));
  for (const LinearUse& use : weights) {
    const DType dtype = ops::stored_dtype(use.shape.scheme);
    (dtype == DType::kBF16 ? linears.needs_copies_ : linears.needs_halves_) = true;
    RETURN_IF_ERROR(linears.add(device, dtype, use.epilogue, true, 1));
    RETURN_IF_ERROR(linears.add(device, dtype, use.epilogue, false, 1));
  }
  return linears;
}

Result<DpasLinears> DpasLinears::create_pair(Device& device, DType activation, const ops::LinearShape& gate, const ops::LinearShape& up) {
  CHECK(gate.scheme == up.scheme && gate.out_features == up.out_features);
  ASSIGN_OR_RETURN(DpasLinears linears, create(device, activation, {}));
  const DType dtype = ops::stored_dtype(gate.scheme);
  (dtype == DType::kBF16 ? linears.needs_copies_ : linears.needs_halves_) = true;
  RETURN_IF_ERROR(linears.add(device, dtype, Epilogue::kSilu, true, 2));
  RETURN_IF_ERROR(linears.add(device, dtype, Epilogue::kSilu, false, 1));
  RETURN_IF_ERROR(linears.add(device, dtype, Epilogue::kMultiply, false, 1));
  return linears;
}

Result<void> DpasLinears::add(Device& device, DType weight, Epilogue epilogue, bool decode, int num_tiles) {
  Kernels& kernels = kernels_[{weight, epilogue}];
  bool scaled = false;
  if (weight == DType::kE4M3) {
    ASSIGN_OR_RETURN(scaled, device.flushes_half_subnormals());
  }
  for (const bool large : {false, true}) {
    const std::string definitions = dpas_definitions(weight, epilogue, decode, num_tiles, large, scaled, device.emulation());
    ASSIGN_OR_RETURN((decode ? kernels.decode : kernels.prompt)[large ? 1 : 0], device.function("dpas", decode ? "dpas_decode" : "dpas_prompt", definitions));
  }
  return {};
}

void DpasLinears::tile(const TiledLinear& weight, int32_t which, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const {
  const ops::LinearShape& shape = weight.shape();
  CHECK(source.shape.out_features == shape.out_features && source.shape.in_features == shape.in_features && source.shape.scheme == shape.scheme);
  CHECK(weight.end_bytes() <= packed.size_bytes());
  const bool by_block = shape.scheme == ops::WeightScheme::kFp8Block;
  CHECK(!by_block || (source.row_offset % 16 == 0 && source.column_offset % kScaleBlock == 0));  // slices are cut on scale blocks
  const int64_t row_offset = source.row_offset % kScaleBlock, tiles = weight.num_tiles(), blocks = shape.in_features / kScaleBlock;
  const bool is_e4m3 = weight.dtype() == DType::kE4M3;
  const int64_t dwords = shape.in_features * 16 / (is_e4m3 ? 4 : 2);
  const int32_t scales = scales_of(shape.scheme);
  stream.launch(tile_weights_, {{plain::groups_for(dwords, kItems), static_cast<size_t>(tiles), 1}, {kItems, 1, 1}}, source.weight, source.scale, scales, row_offset,
                shape.out_features, shape.in_features, is_e4m3 ? 1 : 0, weight.num_weights(), which, weight.tiles_in(packed));
  stream.launch(tile_scales_, {{plain::groups_for(tiles * (blocks + 16), kItems), 1, 1}, {kItems, 1, 1}}, source.scale, scales, row_offset, shape.out_features,
                shape.in_features, tiles, weight.num_weights(), which, weight.scales_in(packed), weight.factors_in(packed));
}

DpasLinears::Input DpasLinears::input(Stream& stream, const Place& x, int64_t num_rows, int64_t width, Scratch& scratch, const Place& x_rows) const {
  Input input;
  input.count = num_rows;
  input.width = width;
  const auto elements = static_cast<size_t>(num_rows * width);
  const bool in_place = x_rows.buffer == nullptr && x.offset_bytes % 64 == 0;  // block loads begin at multiples of 64 bytes
  if (needs_halves_) {
    input.halves = scratch.take(elements * 2);
    input.row_scales = scratch.take(static_cast<size_t>(num_rows) * sizeof(float));
  }
  Place copies;
  if (needs_copies_) {
    if (!in_place) copies = scratch.take(elements * 2);
    input.copies = in_place ? x : copies;
  }
  if (needs_halves_ || copies.buffer != nullptr)
    stream.launch(operand_rows_, {{static_cast<size_t>(num_rows), 1, 1}, {kItems, 1, 1}}, x, x_rows, static_cast<int32_t>(width), input.halves, input.row_scales, copies);
  return input;
}

void DpasLinears::decode(Stream& stream, const Kernels& kernels, const TiledLinear& weight, const ops::Buffer& packed, const Input& x, const RowSegment& rows,
                         size_t out_bytes, const Place& out) const {
  const ops::LinearShape& shape = weight.shape();
  const Place& operands = weight.dtype() == DType::kBF16 ? x.copies : x.halves;
  for (int64_t row = rows.first; row < rows.first + rows.count;) {
    const int64_t left = rows.first + rows.count - row;
    const bool large = left > kSmallDecode;
    const int64_t count = std::min(left, large ? kLargeDecode : kSmallDecode);
    stream.launch(kernels.decode[large ? 1 : 0], {{static_cast<size_t>(weight.num_tiles()), 1, 1}, {kSubGroup * kSplits, 1, 1}}, weight.tiles_in(packed),
                  weight.scales_in(packed), weight.factors_in(packed), shifted(operands, row * x.width * 2), shifted(x.row_scales, row * 4), static_cast<int32_t>(count),
                  static_cast<int32_t>(shape.out_features), static_cast<int32_t>(shape.in_features), shifted(out, row * shape.out_features * static_cast<int64_t>(out_bytes)));
    row += count;
  }
}

void DpasLinears::prompt(Stream& stream, const Kernels& kernels, const TiledLinear& weight, int32_t which, const ops::Buffer& packed, const Input& x, const RowSegment& rows,
                         size_t out_bytes, const Place& out) const {
  const ops::LinearShape& shape = weight.shape();
  const Place& operands = weight.dtype() == DType::kBF16 ? x.copies : x.halves;
  const bool large = rows.count > kManyPromptRows;
  const LaunchShape launch{{plain::groups_for(shape.out_features, kPromptFeatures), plain::groups_for(rows.count, large ? kLargePrompt : kSmallPrompt), 1},
                           {kSubGroup * 8, large ? size_t{4} : size_t{1}, 1}};
  stream.launch(kernels.prompt[large ? 1 : 0], launch, weight.tiles_in(packed), weight.scales_in(packed), weight.factors_in(packed),
                shifted(operands, rows.first * x.width * 2), shifted(x.row_scales, rows.first * 4), static_cast<int32_t>(rows.count), static_cast<int32_t>(shape.out_features),
                static_cast<int32_t>(shape.in_features), weight.num_weights(), which, shifted(out, rows.first * shape.out_features * static_cast<int64_t>(out_bytes)));
}

void DpasLinears::multiply(Stream& stream, const TiledLinear& weight, const ops::Buffer& packed, const Input& x, std::span<const RowSegment> segments, Epilogue epilogue,
                           const Place& out) const {
  const Kernels& kernels = kernels_.at({weight.dtype(), epilogue});
  const size_t out_bytes = epilogue == Epilogue::kStoreF32 ? 4 : 2;
  for (const RowSegment& rows : segments)
    if (rows.kind == ops::RowKind::kDecode)
      decode(stream, kernels, weight, packed, x, rows, out_bytes, out);
    else
      prompt(stream, kernels, weight, 0, packed, x, rows, out_bytes, out);
}

void DpasLinears::multiply_pair(Stream& stream, const Pair& pair, const ops::Buffer& packed, const Input& x, std::span<const RowSegment> segments, const Place& out) const {
  const TiledLinear& weight = pair.both;
  const Kernels& gate = kernels_.at({weight.dtype(), Epilogue::kSilu});
  for (const RowSegment& rows : segments) {
    if (rows.kind == ops::RowKind::kDecode) {
      decode(stream, gate, weight, packed, x, rows, 2, out);
    } else {
      prompt(stream, gate, weight, 0, packed, x, rows, 2, out);
      prompt(stream, kernels_.at({weight.dtype(), Epilogue::kMultiply}), weight, 1, packed, x, rows, 2, out);
    }
  }
}

namespace dpas {

ops::Verdict accepts_linears(const ops::DeviceTraits& traits, DType activation, std::initializer_list<ops::LinearShape> weights) {
  if (traits.architecture != 2021 && traits.architecture != 2031) return ops::refuse("made for Arc Pro B60 and B70 (Xe2)");
  if (activation != DType::kBF16) return ops::refuse("activation dtype {} is not supported; bf16 is", dtype_name(activation));
  for (const ops::LinearShape& weight : weights) {
    if (weight.scheme == ops::WeightScheme::kF32) return ops::refuse("weight scheme {} is not supported", ops::weight_scheme_name(weight.scheme));
    if (weight.in_features == 0 || weight.in_features % kScaleBlock != 0) return ops::refuse("{} inputs; multiples of {} are supported", weight.in_features, kScaleBlock);
    if (weight.out_features == 0) return ops::refuse("no outputs");
  }
  return plain::has_device_code(traits);
}

}  // namespace dpas

}  // namespace quern::opencl
