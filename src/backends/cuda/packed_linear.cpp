#include "backends/cuda/packed_linear.h"

#include <algorithm>

#include "base/shape.h"

namespace quern::cuda {

using ops::kScaleBlock;
using ops::WeightScheme;

namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kFeaturesPerBlock = 8, kRowsPerBlock = 4;  // of linear.cu

ops::TensorView bytes_of(ops::Buffer& buffer, size_t offset, size_t size) {
  return {&buffer, offset, DType::kU8, Shape{static_cast<int64_t>(size)}};
}

}  // namespace

Weight::Scales scales_of(WeightScheme scheme) {
  switch (scheme) {
    case WeightScheme::kF32:
    case WeightScheme::kBF16:
    case WeightScheme::kF16: return Weight::Scales::kNone;
    case WeightScheme::kFp8Block: return Weight::Scales::kBlock;
    case WeightScheme::kFp8Channel: return Weight::Scales::kChannel;
    case WeightScheme::kFp8Tensor: return Weight::Scales::kTensor;
  }
  CHECK_UNREACHABLE();
}

Error off_the_grid(std::string_view candidate, int64_t row, int64_t column, int64_t rows) {
  return {ErrorCode::kUnsupported,
          fmt::format("a rank's slice of a block FP8 weight begins {} rows and {} columns inside a scale block, {} takes multiples of {} rows and whole blocks of columns: fewer ranks, "
                      "`--kernel OP=cuda.plain` of that op, or another",
                      row, column, candidate, rows)};
}

PackedLinear::PackedLinear(const ops::LinearShape& shape, size_t offset_bytes) : shape_(shape), weight_at_(offset_bytes) {
  const size_t weight_bytes = static_cast<size_t>(shape.out_features * shape.in_features) * dtype_size(stored_dtype(shape.scheme));
  scale_at_ = Scratch::size(weight_at_ + weight_bytes);
  offsets_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(scale_at_) + ops::max_scales(shape) * 4, 8));
  end_ = ops::is_fp8(shape.scheme) ? Scratch::size(offsets_at_ + sizeof(GridOffsets)) : scale_at_;
}

void PackedLinear::pack(const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const {
  ops::check_source(source, shape_);
  CHECK(end_ <= packed.size_bytes());
  const GridOffsets offsets{source.row_offset % kScaleBlock, source.column_offset % kScaleBlock};
  if (!source.weight.empty()) {
    const ops::TensorView from{source.weight.buffer, source.weight.offset_bytes, DType::kU8, Shape{static_cast<int64_t>(source.weight.size_bytes())}};
    stream.copy(from, bytes_of(packed, weight_at_, source.weight.size_bytes()));
  }
  if (!ops::is_fp8(shape_.scheme)) return;
  if (!source.scale.empty()) {
    const ops::TensorView from{source.scale.buffer, source.scale.offset_bytes, DType::kU8, Shape{static_cast<int64_t>(source.scale.size_bytes())}};
    stream.copy(from, bytes_of(packed, scale_at_, source.scale.size_bytes()));
  }
  stream.copy_to_device(&offsets, bytes_of(packed, offsets_at_, sizeof offsets));  // a cuda::Stream has read it on return
}

Weight PackedLinear::view(const ops::Buffer& packed) const {
  const std::byte* start = packed.address();
  return {shape_.out_features,
          shape_.in_features,
          stored_dtype(shape_.scheme),
          scales_of(shape_.scheme),
          start + weight_at_,
          reinterpret_cast<const float*>(start + scale_at_),
          reinterpret_cast<const GridOffsets*>(start + offsets_at_)};
}

Result<LinearLauncher> LinearLauncher::create(Device& device) {
  LinearLauncher launcher;
  ASSIGN_OR_RETURN(launcher.linear_, device.function<LinearArgs>("linear", "linear"));
  ASSIGN_OR_RETURN(launcher.norm_rows_, device.function<NormArgs>("linear", "norm_rows"));
  ASSIGN_OR_RETURN(launcher.widen_, device.function<WidenArgs>("linear", "widen"));
  return launcher;
}

void LinearLauncher::multiply(Stream& stream, const PackedLinear& weight, const ops::Buffer& packed, DType activation, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const {
  const LinearArgs args{weight.view(packed), activation, epilogue, static_cast<int32_t>(num_rows), x.x, x.rows, out};
  const auto features = static_cast<unsigned>(ceil_div(weight.shape().out_features, kFeaturesPerBlock)), rows = static_cast<unsigned>(ceil_div(num_rows, kRowsPerBlock));
  stream.launch(linear_, {.grid = {features, rows}, .block = {kThreads}}, args);
}

void LinearLauncher::norm(Stream& stream, DType activation, const void* x, int64_t num_rows, int64_t width, float eps, const float* weight,
                          float weight_offset, void* out, int64_t out_stride) const {
  if (width == 0) return;
  const NormArgs args{activation, static_cast<int32_t>(width), eps, weight_offset, x, weight, out, out_stride};
  stream.launch(norm_rows_, {.grid = {static_cast<unsigned>(num_rows)}, .block = {kThreads}}, args);
}

void LinearLauncher::widen(Stream& stream, const ops::TensorView& source, float* out, float addend, DType round_to) const {
  const int64_t n = source.empty() ? 0 : source.shape.num_elements();
  const WidenArgs args{n == 0 ? nullptr : source.data<void>(), source.dtype, round_to, addend, out, n};
  stream.launch(widen_, {.grid = {static_cast<unsigned>(ceil_div(n, kThreads))}, .block = {kThreads}}, args);
}

}  // namespace quern::cuda
