#include "backends/opencl/tiled_linear.h"

#include <algorithm>

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using ops::kScaleBlock;

namespace {

constexpr size_t kItems = 64;                             // of tile16.cl
constexpr size_t kOperandItems = 256;                     // of prompt_operands
constexpr size_t kSubGroup = 16, kSplits = 8;             // of dpas.cl
constexpr int64_t kDecodeRows[] = {1, 8, 32};             // of a dpas_decode
constexpr int64_t kSmallPrompt = 32, kLargePrompt = 256;  // rows of a dpas_prompt's work-group
constexpr int64_t kPromptTiles = 16;
constexpr int64_t kManyPromptRows = 128;                  // from which the large tiles are used
constexpr size_t kMaxParts = 4;

/// Registers of a work-item's thread: 256 instead of 128. The kernels that have it spill without (scripts/xpu-check).
constexpr std::string_view kLargeRegisterFile = " -cl-intel-256-GRF-per-thread";

Place shifted(Place place, int64_t bytes) {
  if (place.buffer != nullptr) place.offset_bytes += static_cast<uint64_t>(bytes);
  return place;
}

}  // namespace

TiledLinear::TiledLinear(std::vector<ops::LinearShape> weights, bool alternate, size_t offset_bytes) : weights_(std::move(weights)), alternate_(alternate), tiles_at_(offset_bytes) {
  for (const ops::LinearShape& shape : weights_) num_tiles_ += (shape.out_features + 15) / 16;
  scales_at_ = Scratch::size(tiles_at_ + static_cast<size_t>(num_tiles_ * 16 * in_features()) * dtype_size(dtype()));
  factors_at_ = Scratch::size(scales_at_ + static_cast<size_t>(num_tiles_ * (in_features() / kScaleBlock)) * sizeof(float));
  end_ = Scratch::size(factors_at_ + static_cast<size_t>(num_tiles_ * 16) * sizeof(float));
}

int32_t TiledLinear::first_tile(size_t number) const {
  if (alternate_) return static_cast<int32_t>(number);
  int64_t tile = 0;
  for (size_t i = 0; i < number; ++i) tile += (weights_[i].out_features + 15) / 16;
  return static_cast<int32_t>(tile);
}

std::string DpasProgram::definitions(std::string_view emulation) const {
  std::string text = fmt::format("-cl-std=CL3.0 -DACTIVATION_BF16 {}{}", weight_definition(weight), scaled ? " -DSCALED_OPERANDS" : "");
  bool large_file = true;
  if (rows == 0) {
    text += fmt::format(" -DEPILOGUE={} {}", static_cast<int>(epilogue), large ? "-DSGM=64 -DWGM=4" : "-DSGM=32 -DWGM=1");
  } else if (rows <= 8) {
    text += fmt::format(" -DDECODE -DROWS={} -DTILES={}{}{}", rows, pair ? 2 : 1, norms ? " -DNORM" : "", mixed ? " -DMIXED" : "");
    large_file = rows == 8 && pair && weight == DType::kBF16;
  } else {
    text += fmt::format(" -DDECODE -DROW_GROUPS={} -DTILES={}{}", rows / 8, pair ? 2 : 1, mixed ? " -DMIXED" : "");
  }
  return text.append(!emulation.empty() ? emulation : large_file ? kLargeRegisterFile : "");
}

Result<DpasLinears> DpasLinears::create(Device& device, DType activation, const LinearUse& use) {
  CHECK(activation == DType::kBF16 && use.weights.size() <= kMaxParts);
  const bool pair = use.epilogue == Epilogue::kPair;
  DpasLinears linears;
  linears.use_ = use;
  for (size_t i = 0; i < use.weights.size(); ++i) {
    const DType dtype = ops::stored_dtype(use.weights[i].scheme);
    (dtype == DType::kBF16 ? linears.needs_copies_ : linears.needs_halves_) = true;
    if (std::any_of(linears.groups_.begin(), linears.groups_.end(), [&](const Group& g) { return g.tiled.dtype() == dtype; })) continue;
    std::vector<ops::LinearShape> shapes;
    std::vector<size_t> numbers;
    for (size_t other = i; other < use.weights.size(); ++other)
      if (ops::stored_dtype(use.weights[other].scheme) == dtype) {
        shapes.push_back(use.weights[other]);
        numbers.push_back(other);
      }
    TiledLinear tiled(std::move(shapes), pair, linears.groups_.empty() ? 0 : linears.end_bytes());
    linears.groups_.push_back({std::move(tiled), std::move(numbers), {}, {}});
  }
  CHECK(!pair || linears.groups_.size() == 1);
  linears.mixed_ = linears.groups_.size() == 2 && linears.groups_[0].tiled.dtype() == DType::kE4M3 && linears.groups_[1].tiled.dtype() == DType::kBF16;

  const std::string operands = fmt::format("-cl-std=CL3.0 -DACTIVATION_BF16{}", device.emulation());
  ASSIGN_OR_RETURN(linears.decode_operands_, device.function("dpas_operands", "decode_operands", operands));
  ASSIGN_OR_RETURN(linears.prompt_operands_, device.function("dpas_operands", "prompt_operands", operands));
  ASSIGN_OR_RETURN(linears.tile_weights_, device.function("tile16", "tile_weights", plain::activation_definition(activation)));
  ASSIGN_OR_RETURN(linears.tile_scales_, device.function("tile16", "tile_scales", plain::activation_definition(activation)));
  for (size_t i = 0; i < linears.groups_.size(); ++i) {
    Group& group = linears.groups_[i];
    DpasProgram program{.weight = group.tiled.dtype(), .pair = pair};
    if (program.weight == DType::kE4M3) {
      ASSIGN_OR_RETURN(program.scaled, device.flushes_half_subnormals());
    }
    program.epilogue = use.epilogue;
    for (const bool large : {false, true}) {
      if (use.epilogue == Epilogue::kStoreF32) break;  // logits, whose rows are all decode rows
      program.large = large;
      ASSIGN_OR_RETURN(group.prompt[large ? 1 : 0], device.function("dpas", "dpas_prompt", program.definitions(device.emulation())));
    }
    if (linears.mixed_ && i > 0) continue;
    program.norms = use.norms;
    program.mixed = linears.mixed_;
    for (size_t size = 0; size < std::size(kDecodeRows); ++size) {
      program.rows = kDecodeRows[size];
      ASSIGN_OR_RETURN(group.decode[size], device.function("dpas", "dpas_decode", program.definitions(device.emulation())));
    }
  }
  return linears;
}

void DpasLinears::pack(size_t number, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const {
  const ops::LinearShape& shape = use_.weights[number];
  CHECK(source.shape.out_features == shape.out_features && source.shape.in_features == shape.in_features && source.shape.scheme == shape.scheme);
  CHECK(end_bytes() <= packed.size_bytes());
  const Group& group = *std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return std::count(g.numbers.begin(), g.numbers.end(), number) != 0; });
  const TiledLinear& tiled = group.tiled;
  const bool by_block = shape.scheme == ops::WeightScheme::kFp8Block;
  CHECK(!by_block || (source.row_offset % 16 == 0 && source.column_offset % kScaleBlock == 0));  // slices are cut on scale blocks
  const int64_t row_offset = source.row_offset % kScaleBlock, tiles = (shape.out_features + 15) / 16, blocks = shape.in_features / kScaleBlock;
  const bool is_e4m3 = tiled.dtype() == DType::kE4M3;
  const int64_t dwords = shape.in_features * 16 / (is_e4m3 ? 4 : 2);
  const int32_t scales = scales_of(shape.scheme), step = tiled.tile_step(),
                first = tiled.first_tile(static_cast<size_t>(std::find(group.numbers.begin(), group.numbers.end(), number) - group.numbers.begin()));
  stream.launch(tile_weights_, {{plain::groups_for(dwords, kItems), static_cast<size_t>(tiles), 1}, {kItems, 1, 1}}, source.weight, source.scale, scales, row_offset,
                shape.out_features, shape.in_features, is_e4m3 ? 1 : 0, step, first, tiled.tiles_in(packed));
  stream.launch(tile_scales_, {{plain::groups_for(tiles * (blocks + 16), kItems), 1, 1}, {kItems, 1, 1}}, source.scale, scales, row_offset, shape.out_features,
                shape.in_features, tiles, step, first, tiled.scales_in(packed), tiled.factors_in(packed));
}

size_t DpasLinears::scratch_bytes(int64_t rows) const {
  const int64_t width = use_.weights.front().in_features;
  const size_t matrix = Scratch::size(static_cast<size_t>(rows * width) * 2), vector = Scratch::size(static_cast<size_t>(rows) * sizeof(float));
  const size_t of_blocks = Scratch::size(static_cast<size_t>(width / kScaleBlock * (rows + kDecodeRows[2])) * sizeof(float));
  return 2 * matrix + of_blocks + vector;
}

/// A segment's operands, in the order and with the sizes of scratch_bytes.
DpasLinears::Operands DpasLinears::operands(Stream& stream, const LinearRows& rows, const RowSegment& segment, Scratch& scratch) const {
  const int64_t width = use_.weights.front().in_features;
  const bool decode = segment.kind == ops::RowKind::kDecode;
  const auto elements = static_cast<size_t>(segment.count * width), count = static_cast<size_t>(segment.count);
  Operands result;
  const Place x = rows.names.buffer == nullptr ? shifted(rows.x, segment.first * width * 2) : rows.x, names = shifted(rows.names, segment.first * 4);
  if (!needs_halves_ && !use_.norms && names.buffer == nullptr && x.offset_bytes % 64 == 0) {  // bf16 rows as they are; block loads begin at multiples of 64 bytes
    result.copies = x;
    return result;
  }
  if (needs_halves_) {
    result.scales_stride = static_cast<int32_t>(segment.count + kDecodeRows[2]);  // a launch reads the scales of 32 rows, whatever their number
    result.halves = scratch.take(elements * 2);
    result.scales = scratch.take((decode ? static_cast<size_t>(width / kScaleBlock * result.scales_stride) : count) * sizeof(float));
  }
  if (needs_copies_) result.copies = scratch.take(elements * 2);
  result.factors = scratch.take(count * sizeof(float));
  if (decode)
    stream.launch(decode_operands_, {{count, 1, 1}, {kSubGroup * kSplits, 1, 1}}, x, names, rows.norm, rows.eps, static_cast<int32_t>(width), result.halves, result.scales,
                  result.scales_stride, result.copies, result.factors);
  else
    stream.launch(prompt_operands_, {{count, 1, 1}, {kOperandItems, 1, 1}}, x, names, rows.norm, rows.eps, static_cast<int32_t>(width), result.halves, result.scales,
                  result.copies, result.factors);
  return result;
}

std::array<DpasLinears::Part, 4> DpasLinears::parts(std::span<const Group> groups, std::span<const Place> outs, int64_t row) const {
  std::array<Part, kMaxParts> parts;
  const size_t out_bytes = use_.epilogue == Epilogue::kStoreF32 ? 4 : 2;
  size_t part = 0;
  for (const Group& group : groups)
    for (const size_t number : group.numbers) {
      const int64_t features = use_.weights[number].out_features;
      parts[part++] = {shifted(outs[number], row * features * static_cast<int64_t>(out_bytes)), static_cast<int32_t>(features)};
      if (use_.epilogue == Epilogue::kPair) return parts;
    }
  return parts;
}

void DpasLinears::decode(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, const RowSegment& segment, std::span<const Place> outs, Scratch& scratch) const {
  const int64_t width = use_.weights.front().in_features;
  const size_t size = segment.count == 1 ? 0 : segment.count <= kDecodeRows[1] ? 1 : 2;
  Operands operands;
  if (size == 2) operands = this->operands(stream, rows, segment, scratch);
  for (int64_t done = 0; done < segment.count; done += kDecodeRows[size]) {
    const auto count = static_cast<int32_t>(std::min(segment.count - done, kDecodeRows[size]));
    const int64_t row = segment.first + done;
    const Place x = rows.names.buffer == nullptr ? shifted(rows.x, row * width * 2) : rows.x;
    for (size_t g = 0; g < (mixed_ ? 1 : groups_.size()); ++g) {
      const TiledLinear &first = groups_[g].tiled, &second = groups_[mixed_ ? 1 : g].tiled;
      const auto of = [&](const TiledLinear& tiled) { return size < 2 ? x : shifted(tiled.dtype() == DType::kBF16 ? operands.copies : operands.halves, done * width * 2); };
      const std::array<Part, kMaxParts> to = parts({&groups_[g], mixed_ ? size_t{2} : size_t{1}}, outs, row);
      const int64_t tiles = first.num_tiles() + (mixed_ ? second.num_tiles() : 0);
      stream.launch(groups_[g].decode[size], {{static_cast<size_t>(tiles / first.tile_step()), 1, 1}, {kSubGroup * kSplits, 1, 1}}, first.tiles_in(packed), first.scales_in(packed),
                    first.factors_in(packed), static_cast<int32_t>(first.num_tiles()), second.tiles_in(packed), second.factors_in(packed), of(first), of(second),
                    size < 2 ? shifted(rows.names, row * 4) : Place{}, rows.norm, rows.eps, shifted(operands.scales, done * 4), operands.scales_stride,
                    shifted(operands.factors, done * 4), count, static_cast<int32_t>(width), static_cast<int32_t>(use_.epilogue), to[0].out, to[0].features, to[1].out,
                    to[1].features, to[2].out, to[2].features, to[3].out, to[3].features);
    }
  }
}

void DpasLinears::prompt(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, const RowSegment& segment, std::span<const Place> outs, Scratch& scratch) const {
  CHECK(use_.epilogue != Epilogue::kStoreF32);
  const Operands operands = this->operands(stream, rows, segment, scratch);
  const bool large = segment.count > kManyPromptRows;
  for (const Group& group : groups_) {
    const TiledLinear& tiled = group.tiled;
    const bool is_bf16 = tiled.dtype() == DType::kBF16;
    const std::array<Part, kMaxParts> to = parts({&group, 1}, outs, segment.first);
    const LaunchShape shape{{plain::groups_for(tiled.num_tiles(), kPromptTiles), plain::groups_for(segment.count, large ? kLargePrompt : kSmallPrompt), 1},
                            {kSubGroup * 8, large ? size_t{4} : size_t{1}, 1}};
    stream.launch(group.prompt[large ? 1 : 0], shape, tiled.tiles_in(packed), tiled.scales_in(packed), tiled.factors_in(packed), is_bf16 ? operands.copies : operands.halves,
                  is_bf16 ? operands.factors : operands.scales, static_cast<int32_t>(segment.count), static_cast<int32_t>(tiled.num_tiles()),
                  static_cast<int32_t>(tiled.in_features()), to[0].out, to[0].features, to[1].out, to[1].features, to[2].out, to[2].features, to[3].out, to[3].features);
  }
}

void DpasLinears::multiply(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, std::span<const RowSegment> segments, std::span<const Place> outs,
                           Scratch& scratch) const {
  for (const RowSegment& segment : segments) {
    Scratch of_segment = scratch;  // free for the next one: work is in order
    (this->*(segment.kind == ops::RowKind::kDecode ? &DpasLinears::decode : &DpasLinears::prompt))(stream, packed, rows, segment, outs, of_segment);
  }
}

namespace dpas {

ops::Verdict accepts_linears(const ops::DeviceTraits& traits, DType activation, std::initializer_list<ops::LinearShape> weights) {
  if (ops::Verdict verdict = simd16::accepts_device(traits); !verdict.accepted) return verdict;
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
