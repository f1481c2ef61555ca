#include "backends/opencl/packed_linear.h"

#include <algorithm>

#include "backends/opencl/plain.h"
#include "base/shape.h"

namespace quern::opencl {

using ops::kScaleBlock;
using ops::WeightScheme;

namespace {

constexpr size_t kLanes = 16, kFeatures = 4, kRows = 4;  // of linear.cl
constexpr size_t kItems = 64;                            // of norm.cl

/// Where a weight's slice begins inside its first scale block; known when it is packed, so it is kept beside the weight.
struct GridOffsets {
  int64_t row = 0, column = 0;
};

ops::TensorView bytes_of(ops::Buffer& buffer, size_t offset, size_t size) { return {&buffer, offset, DType::kU8, Shape{static_cast<int64_t>(size)}}; }

}  // namespace

const char* weight_definition(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "-DWEIGHT_F32";
    case DType::kBF16: return "-DWEIGHT_BF16";
    case DType::kF16: return "-DWEIGHT_F16";
    case DType::kE4M3: return "-DWEIGHT_E4M3";
    default: CHECK_UNREACHABLE();
  }
}

int32_t scales_of(WeightScheme scheme) {
  switch (scheme) {
    case WeightScheme::kF32:
    case WeightScheme::kBF16:
    case WeightScheme::kF16: return kScalesNone;
    case WeightScheme::kFp8Block: return kScalesBlock;
    case WeightScheme::kFp8Channel: return kScalesChannel;
    case WeightScheme::kFp8Tensor: return kScalesTensor;
  }
  CHECK_UNREACHABLE();
}

PackedLinear::PackedLinear(const ops::LinearShape& shape, size_t offset_bytes) : shape_(shape), weight_at_(offset_bytes) {
  const size_t weight_bytes = static_cast<size_t>(shape.out_features * shape.in_features) * dtype_size(dtype());
  scale_at_ = Scratch::size(weight_at_ + weight_bytes);
  offsets_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(scale_at_) + ops::max_scales(shape) * 4, sizeof(GridOffsets)));
  end_ = ops::is_fp8(shape.scheme) ? Scratch::size(offsets_at_ + sizeof(GridOffsets)) : scale_at_;
}

void PackedLinear::pack(const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const {
  ops::check_source(source, shape_);
  CHECK(end_ <= packed.size_bytes());
  const GridOffsets offsets{source.row_offset % kScaleBlock, source.column_offset % kScaleBlock};
  const auto copy = [&](const ops::TensorView& from, size_t at) {
    stream.copy(bytes_of(*from.buffer, from.offset_bytes, from.size_bytes()), bytes_of(packed, at, from.size_bytes()));
  };
  if (!source.weight.empty()) copy(source.weight, weight_at_);
  if (!source.scale.empty()) copy(source.scale, scale_at_);
  if (scales() == kScalesBlock) stream.set(place_in(packed, offsets_at_), offsets);
}

std::vector<RowSegment> segments_of(const ops::Rows& rows, int64_t first, int64_t count) {
  std::vector<ops::RowKind> kinds(static_cast<size_t>(count), ops::RowKind::kDecode);
  for (const ops::RowRun& run : rows.runs)
    for (int64_t row = std::max<int64_t>(run.first_row, first); row < std::min<int64_t>(run.first_row + run.num_rows, first + count); ++row)
      kinds[static_cast<size_t>(row - first)] = run.kind;
  std::vector<RowSegment> segments;
  for (int64_t row = 0; row < count; ++row) {
    const ops::RowKind kind = kinds[static_cast<size_t>(row)];
    if (segments.empty() || segments.back().kind != kind) segments.push_back({row, 0, kind});
    ++segments.back().count;
  }
  return segments;
}

Result<VectorLauncher> VectorLauncher::create(Device& device, DType activation) {
  VectorLauncher launcher;
  ASSIGN_OR_RETURN(launcher.norm_rows_, device.function("norm", "norm_rows", plain::activation_definition(activation)));
  ASSIGN_OR_RETURN(launcher.widen_, device.function("norm", "widen_vector", plain::activation_definition(activation)));
  return launcher;
}

void VectorLauncher::norm(Stream& stream, const Place& x, int64_t num_rows, int64_t width, float eps, const Place& weight, float addend, const Place& out,
                          int64_t out_stride) const {
  if (width == 0) return;
  stream.launch(norm_rows_, {{static_cast<size_t>(num_rows), 1, 1}, {kItems, 1, 1}}, x, weight, out, static_cast<int32_t>(width), out_stride, eps, addend);
}

void VectorLauncher::widen(Stream& stream, const ops::TensorView& source, const Place& out, float addend, DType round_to) const {
  const int64_t n = source.empty() ? 0 : source.shape.num_elements();
  stream.launch(widen_, {{plain::groups_for(n, kItems), 1, 1}, {kItems, 1, 1}}, source, number_of(source.dtype), round_to == DType::kBF16 ? 1 : 0, addend, out, n);
}

Result<PlainLinears> PlainLinears::create(Device& device, DType activation, const LinearUse& use) {
  PlainLinears linears;
  linears.use_ = use;
  linears.activation_ = activation;
  ASSIGN_OR_RETURN(linears.vectors_, VectorLauncher::create(device, activation));
  for (const ops::LinearShape& shape : use.weights) {
    linears.weights_.emplace_back(shape, linears.weights_.empty() ? 0 : linears.end_bytes());
    const DType dtype = ops::stored_dtype(shape.scheme);
    ASSIGN_OR_RETURN(linears.linear_[static_cast<size_t>(dtype)],
                     device.function("linear", "linear", fmt::format("{} {}", plain::activation_definition(activation), weight_definition(dtype))));
  }
  return linears;
}

size_t PlainLinears::scratch_bytes(int64_t rows) const {
  return use_.norms ? Scratch::size(static_cast<size_t>(rows * use_.weights.front().in_features) * dtype_size(activation_)) : 0;
}

void PlainLinears::multiply(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, std::span<const RowSegment> /*segments*/, std::span<const Place> outs,
                            Scratch& scratch) const {
  Place x = rows.x;
  if (use_.norms) {
    CHECK(rows.names.buffer == nullptr);
    const int64_t width = use_.weights.front().in_features;
    x = scratch.take(scratch_bytes(rows.count));
    vectors_.norm(stream, rows.x, rows.count, width, rows.eps, rows.norm, 0.0f, x, width);
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    const PackedLinear& weight = weights_[i];
    const ops::LinearShape& shape = weight.shape();
    const Function& linear = linear_[static_cast<size_t>(weight.dtype())];
    const bool pair = use_.epilogue == Epilogue::kPair;
    const Epilogue epilogue = !pair ? use_.epilogue : i == 0 ? Epilogue::kSilu : Epilogue::kMultiply;
    stream.launch(linear, {{plain::groups_for(shape.out_features, kFeatures), plain::groups_for(rows.count, kRows), 1}, {kLanes, kFeatures, 1}}, weight.weight_in(packed),
                  weight.scale_in(packed), weight.offsets_in(packed), weight.scales(), shape.out_features, shape.in_features, x, rows.names, static_cast<int32_t>(rows.count),
                  outs[pair ? 0 : i], static_cast<int32_t>(epilogue));
  }
}

}  // namespace quern::opencl
