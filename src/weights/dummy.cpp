#include "weights/dummy.h"

#include <optional>
#include <string>

#include "base/check.h"
#include "weights/slices.h"
#include "weights/staging.h"
#include "weights/synthetic.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;

/// The scales of a slice, cut from the grid of the whole tensor.
Result<void> stage_scale(const SyntheticTensor& tensor, const ops::LinearShape& whole, const RowPieces& rows, const Range& columns,
                         Staging& staging, std::string_view purpose, ops::LinearSource& source) {
  std::vector<float> scales;
  Shape shape;
  switch (whole.scheme) {
    case WeightScheme::kF32:
    case WeightScheme::kBF16:
    case WeightScheme::kF16: return {};
    case WeightScheme::kFp8Tensor:
      scales = {tensor.scale(0)};
      shape = {1};
      break;
    case WeightScheme::kFp8Channel:
      for (int64_t r = 0; r < rows.size(); ++r) scales.push_back(tensor.scale(rows.stored(r)));
      shape = {rows.size()};
      break;
    case WeightScheme::kFp8Block: {
      const std::optional<ScaleRows> scale_rows = scale_rows_of(rows, 0);
      if (!scale_rows) return make_error(ErrorCode::kUnsupported, "{}: its pieces cannot be joined, since their scale blocks do not lie on one grid of {}", purpose, ops::kScaleBlock);
      const Range block_columns = blocks_of(columns);
      const int64_t grid_columns = ceil_div(whole.in_features, ops::kScaleBlock);
      for (const int64_t r : scale_rows->stored)
        for (int64_t c = block_columns.begin; c < block_columns.end; ++c) scales.push_back(tensor.scale(r * grid_columns + c));
      shape = {std::ssize(scale_rows->stored), block_columns.size()};
      source.row_offset = scale_rows->offset;
      source.column_offset = columns.begin % ops::kScaleBlock;
      break;
    }
  }
  ASSIGN_OR_RETURN(source.scale, staging.copy(scales, shape, purpose));
  return {};
}

}  // namespace

Result<StagedLinear> DummySource::linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const auto found = inventory_.linears.find(name);
  CHECK_MSG(found != inventory_.linears.end(), std::string(name));
  return make(name, found->second, slice, device, stream);
}

Result<StagedLinear> DummySource::linear_in_fp8(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const auto found = inventory_.linears.find(name);
  CHECK_MSG(found != inventory_.linears.end(), std::string(name));
  ops::LinearShape whole = found->second;
  if (ops::is_fp8(whole.scheme)) return invalid_argument("{} is {} already", name, ops::weight_scheme_name(whole.scheme));
  whole.scheme = WeightScheme::kFp8Channel;
  return make(name, whole, slice, device, stream);
}

Result<StagedLinear> DummySource::make(std::string_view name, const ops::LinearShape& whole, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const RowPieces rows(slice, whole.out_features);
  const Range columns = column_range(slice, whole);
  const SyntheticTensor tensor(name, {whole.out_features, whole.in_features}, seed_);
  const DType dtype = ops::stored_dtype(whole.scheme);

  StagedLinear staged;
  Staging staging(device, stream, staged.buffers);
  ops::LinearSource& source = staged.source;
  source.shape = whole;
  source.shape.out_features = rows.size();
  source.shape.in_features = columns.size();
  const auto write = [&](int64_t first, int64_t count, std::byte* out) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t begin = rows.stored(first + r) * whole.in_features + columns.begin;
      std::byte* row = out + static_cast<size_t>(r * columns.size()) * dtype_size(dtype);
      ops::is_fp8(whole.scheme) ? tensor.fill_codes(begin, columns.size(), row) : tensor.fill(dtype, begin, columns.size(), row);
    }
  };
  ASSIGN_OR_RETURN(source.weight, staging.make_rows(dtype, rows.size(), columns.size(), name, write));
  RETURN_IF_ERROR(stage_scale(tensor, whole, rows, columns, staging, name, source));
  if (whole.static_input_scale) source.input_scale = kInputScale;
  return staged;
}

Result<StagedTensor> DummySource::vector(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const auto found = inventory_.vectors.find(name);
  CHECK_MSG(found != inventory_.vectors.end(), std::string(name));
  const auto& [dtype, shape] = found->second;
  const SyntheticTensor tensor(name, shape, seed_);
  const RowPieces rows(slice, shape[0]);
  const int64_t width = shape[0] == 0 ? 0 : shape.num_elements() / shape[0];
  StagedTensor staged;
  Staging staging(device, stream, staged.buffers);
  ASSIGN_OR_RETURN(staged.view, staging.make_rows(dtype, rows.size(), width, name, [&, type = dtype](int64_t first, int64_t count, std::byte* out) {
    for (int64_t r = 0; r < count; ++r) tensor.fill(type, rows.stored(first + r) * width, width, out + static_cast<size_t>(r * width) * dtype_size(type));
  }));
  staged.view.shape = shape_of_rows(shape, rows.size());
  return staged;
}

}  // namespace quern::weights
