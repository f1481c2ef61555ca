#include "backends/cuda/tile_layer.h"

#include "backends/cuda/device_code.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda::sm90 {

using ops::WeightScheme;

namespace {

constexpr unsigned kThreads = 256;

bool has_row_scale(WeightScheme scheme) { return scheme == WeightScheme::kFp8Channel || scheme == WeightScheme::kFp8Tensor; }
size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }
int tiles_of(int64_t features) { return static_cast<int>((features + kTileRows - 1) / kTileRows); }

}  // namespace

Result<Packers> Packers::load(Device& device) {
  Packers packers;
  ASSIGN_OR_RETURN(packers.tiles, device.function<PackArgs>("rows_sm90", "pack_tiles"));
  ASSIGN_OR_RETURN(packers.scales, device.function<PackScalesArgs>("rows_sm90", "pack_scales"));
  ASSIGN_OR_RETURN(packers.norm, device.function<PackNormArgs>("rows_sm90", "pack_norm"));
  return packers;
}

void Packers::pack_norm(Stream& stream, const ops::TensorView& weight, float* factors) const {
  CHECK(weight.dtype == DType::kBF16 || weight.dtype == DType::kF32);
  PackNormArgs args;
  args.weight = weight.data<void>();
  args.is_bf16 = weight.dtype == DType::kBF16 ? 1 : 0;
  args.count = static_cast<int32_t>(weight.shape.num_elements());
  args.factors = factors;
  stream.launch(norm, {.grid = {plain::blocks_for(args.count, kThreads)}, .block = {kThreads}}, args);
}

ops::Verdict accepts_device(const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = plain::has_device_code(traits); !verdict.accepted) return verdict;
  if (traits.architecture != 90)
    return ops::refuse("clusters, bulk copies and wgmma are used as sm_90 has them, the device is sm_{}", traits.architecture);
  const auto built = code_architectures();
  if (!built.empty() && std::find(built.begin(), built.end(), "90a") == built.end()) return ops::refuse("this build has no device code for sm_90a");
  return ops::accept();
}

ops::Verdict TileLayer::accepts(const Spec& spec, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  const ops::LinearShape& first = spec.parts.front();
  for (const ops::LinearShape& part : spec.parts) {
    if (part.out_features == 0 || part.in_features == 0) return ops::refuse("an empty shard");
    if (part.scheme != first.scheme || part.in_features != first.in_features) return ops::refuse("weights of several schemes over one input");
    if (part.out_features % 2 != 0) return ops::refuse("{} output features are odd", part.out_features);
    if (part.in_features % ops::kScaleBlock != 0) return ops::refuse("{} input features are not a multiple of {}", part.in_features, ops::kScaleBlock);
    if (part.scheme != WeightScheme::kBF16 && !ops::is_fp8(part.scheme)) return ops::refuse("{} weights are not supported", weight_scheme_name(part.scheme));
    if (ops::is_fp8(part.scheme) && !traits.fp8_matrix) return ops::refuse("fp8 weights are multiplied with quantised activations, which are not wanted");
  }
  if (spec.parts.size() > static_cast<size_t>(kMaxSegments)) return ops::refuse("{} weights over one input", spec.parts.size());
  if (spec.gate_and_up && first.out_features != spec.parts[1].out_features) return ops::refuse("gate and up differ in extent");
  if (spec.norm_width > kMaxNormWidth) return ops::refuse("rows of {} are normed up to {}", spec.norm_width, kMaxNormWidth);
  for (const ops::LinearShape& side : spec.side) {
    if (side.scheme != WeightScheme::kBF16) return ops::refuse("in_proj_a and in_proj_b in {}; bf16 is supported", weight_scheme_name(side.scheme));
    if (side.out_features == 0 || side.out_features > kTileRows || side.out_features % 2 != 0) return ops::refuse("{} heads", side.out_features);
  }
  if (!spec.side.empty() && spec.norm_width == 0) return ops::refuse("in_proj_a and in_proj_b over rows without a norm");
  return ops::accept();
}

TileLayer::TileLayer(Spec spec, size_t offset_bytes) : spec_(std::move(spec)), weight_at_(offset_bytes) {
  const size_t parts = spec_.gate_and_up ? 1 : spec_.parts.size();
  for (size_t i = 0; i < parts; ++i) tiles_ += part_tiles(i);
  const auto tiles = static_cast<size_t>(tiles_);
  const auto blocks = static_cast<size_t>(k_blocks());
  scale_at_ = weight_at_ + tiles * blocks * kTileBytes;
  row_scale_at_ = align(scale_at_ + (is_e4m3() ? tiles * blocks * kTileScales * sizeof(float) : 0));
  side_at_ = align(row_scale_at_ + (has_row_scale(spec_.parts[0].scheme) ? tiles * kTileRows * sizeof(float) : 0));
  norm_at_ = side_at_ + spec_.side.size() * static_cast<size_t>(in_features() / 64) * kTileBytes;
  arrivals_at_ = align(norm_at_ + static_cast<size_t>(spec_.norm_width) * sizeof(float));
  end_ = align(arrivals_at_ + kNumArrivals * sizeof(int32_t));
}

int TileLayer::num_side_units() const {
  SideRows side;
  if (has_side()) side.num_b = static_cast<int32_t>(spec_.side[0].out_features), side.num_a = static_cast<int32_t>(spec_.side[1].out_features);
  return side_units(side, static_cast<int>(in_features() / 128));
}

int TileLayer::part_tiles(size_t part) const { return tiles_of((spec_.gate_and_up ? 2 : 1) * spec_.parts[part].out_features); }

void TileLayer::pack(const Sources& sources, ops::Buffer& packed, const Packers& packers, Stream& stream) const {
  CHECK(end_ <= packed.size_bytes());
  const int blocks = k_blocks();
  const auto pack_weight = [&](const ops::LinearSource& source, const ops::LinearSource* second, std::byte* to, int tiles, int tile_blocks) {
    PackArgs args;
    args.source = source.weight.data<void>();
    args.second = second == nullptr ? nullptr : second->weight.data<void>();
    args.row_bytes = source.shape.in_features * static_cast<int64_t>(dtype_size(stored_dtype(source.shape.scheme)));
    args.rows = static_cast<int32_t>(source.shape.out_features);
    args.tiles = tiles;
    args.k_blocks = tile_blocks;
    args.packed = to;
    const auto pieces = int64_t{tiles} * tile_blocks * (kTileBytes / 16);
    stream.launch(packers.tiles, {.grid = {static_cast<unsigned>(std::min<int64_t>(plain::blocks_for(pieces, kThreads), 1 << 14))}, .block = {kThreads}}, args);
  };
  int tile = 0;
  const size_t step = spec_.gate_and_up ? 2 : 1;
  for (size_t i = 0; i < spec_.parts.size(); i += step) {
    const ops::LinearSource& source = *sources.parts[i];
    const ops::LinearSource* second = spec_.gate_and_up ? sources.parts[i + 1] : nullptr;
    CHECK(source.shape == spec_.parts[i]);
    if (const int64_t row = source.row_offset % ops::kScaleBlock, column = source.column_offset % ops::kScaleBlock;
        source.shape.scheme == WeightScheme::kFp8Block && (row != 0 || column != 0)) {
      stream.fail(off_the_grid("cuda.sm90", row, column, ops::kScaleBlock));
      return;
    }
    const int tiles = part_tiles(i);
    pack_weight(source, second, packed.address() + weight_at_ + static_cast<size_t>(tile) * static_cast<size_t>(blocks) * kTileBytes, tiles, blocks);
    if (is_e4m3()) {
      PackScalesArgs args;
      args.source = source.scale.data<float>();
      args.second = second == nullptr ? nullptr : second->scale.data<float>();
      args.rows = static_cast<int32_t>(source.shape.out_features);
      args.tiles = tiles;
      args.k_blocks = blocks;
      args.per_row = source.shape.scheme == WeightScheme::kFp8Channel ? 1 : source.shape.scheme == WeightScheme::kFp8Tensor ? 2 : 0;
      args.scale = reinterpret_cast<float*>(packed.address() + scale_at_) + int64_t{tile} * blocks * kTileScales;
      if (args.per_row != 0) args.row_scale = reinterpret_cast<float*>(packed.address() + row_scale_at_) + int64_t{tile} * kTileRows;
      const int64_t threads = int64_t{tiles} * std::max(blocks, kTileRows);
      stream.launch(packers.scales, {.grid = {plain::blocks_for(threads, kThreads)}, .block = {kThreads}}, args);
    }
    tile += tiles;
  }
  const auto side_blocks = static_cast<int>(in_features() / 64);
  for (size_t i = 0; i < spec_.side.size(); ++i)
    pack_weight(*sources.side[i], nullptr, packed.address() + side_at_ + i * static_cast<size_t>(side_blocks) * kTileBytes, 1, side_blocks);
  if (spec_.norm_width > 0) packers.pack_norm(stream, sources.norm, reinterpret_cast<float*>(packed.address() + norm_at_));
  stream.fill_zero({&packed, arrivals_at_, DType::kI32, {kNumArrivals}});
}

LinearLayer TileLayer::linear(const ops::Buffer& packed) const {
  LinearLayer linear;
  linear.weight = packed.address() + weight_at_;
  if (is_e4m3()) linear.scale = reinterpret_cast<const float*>(packed.address() + scale_at_);
  if (has_row_scale(spec_.parts[0].scheme)) linear.row_scale = reinterpret_cast<const float*>(packed.address() + row_scale_at_);
  linear.tiles = tiles_;
  linear.k_blocks = k_blocks();
  linear.norm = norm(packed);
  if (!spec_.side.empty()) {
    linear.side.weight = packed.address() + side_at_;
    linear.side.num_b = static_cast<int32_t>(spec_.side[0].out_features);
    linear.side.num_a = static_cast<int32_t>(spec_.side[1].out_features);
  }
  int tile = 0;
  for (size_t i = 0; i < (spec_.gate_and_up ? 1 : spec_.parts.size()); ++i) {
    linear.segments[i].first_tile = tile;
    linear.segments[i].features = static_cast<int32_t>(spec_.parts[i].out_features);
    linear.num_segments = static_cast<int32_t>(i + 1);
    tile += part_tiles(i);
  }
  return linear;
}

LinearLayer TileLayer::side_linear(const ops::Buffer& packed) const {
  LinearLayer linear;
  linear.weight = packed.address() + side_at_;
  linear.tiles = static_cast<int32_t>(spec_.side.size());
  linear.k_blocks = static_cast<int32_t>(in_features() / 64);
  for (size_t i = 0; i < spec_.side.size(); ++i) {
    linear.segments[i].first_tile = static_cast<int32_t>(i);
    linear.segments[i].features = static_cast<int32_t>(spec_.side[i].out_features);
  }
  linear.num_segments = linear.tiles;
  return linear;
}

}  // namespace quern::cuda::sm90
