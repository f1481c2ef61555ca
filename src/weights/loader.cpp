#include "weights/loader.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "weights/encode_fp8.h"
#include "weights/slices.h"
#include "weights/staging.h"
#include "weights/stored_values.h"

namespace quern::weights {
namespace {

using ops::LinearSource;
using ops::TensorView;
using ops::WeightScheme;

/// find_non_finite by several threads, which also bring the pages in.
std::optional<size_t> first_non_finite(std::span<const std::byte> bytes, DType dtype) {
  constexpr int64_t kGrainBytes = 4 << 20;
  const size_t element = dtype_size(dtype), none = bytes.size() / element;
  std::atomic<size_t> first = none;
  parallel_pieces(static_cast<int64_t>(none), kGrainBytes / static_cast<int64_t>(element), [&](int64_t begin, int64_t end, int64_t) {
    const auto bad = find_non_finite(bytes.subspan(static_cast<size_t>(begin) * element, static_cast<size_t>(end - begin) * element), dtype);
    if (!bad) return;
    const size_t at = static_cast<size_t>(begin) + *bad;
    for (size_t known = first.load(); at < known && !first.compare_exchange_weak(known, at);) {}
  });
  return first < none ? std::optional(first.load()) : std::nullopt;
}

/// Rows of a stored matrix, in pieces, and a range of its columns.
class StoredRows {
 public:
  StoredRows(const LinearEntry& entry, RowPieces rows, const Range& columns)
      : ref_(entry.weight),
        dtype_(ops::stored_dtype(entry.stored.scheme)),
        rows_(std::move(rows)),
        columns_(columns),
        row_columns_(entry.stored.in_features),
        row_begin_(entry.row_begin) {}

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const RowPieces& rows() const { return rows_; }
  [[nodiscard]] int64_t num_rows() const { return rows_.size(); }
  [[nodiscard]] int64_t num_columns() const { return columns_.size(); }
  [[nodiscard]] bool contiguous() const { return rows_.pieces().size() == 1 && num_columns() == row_columns_; }
  /// Bytes of row `row` of the joined ones.
  [[nodiscard]] std::span<const std::byte> row(int64_t row) const { return bytes(rows_.stored(row), columns_.begin, num_columns()); }
  [[nodiscard]] std::span<const std::byte> whole_row(int64_t row) const { return bytes(rows_.stored(row), 0, row_columns_); }
  /// All bytes, where they are contiguous.
  [[nodiscard]] std::span<const std::byte> all() const { return whole_rows(rows_.pieces()[0]); }
  [[nodiscard]] int64_t column_begin() const { return columns_.begin; }

  /// Refuses NaN and infinities by name and position.
  [[nodiscard]] Result<void> check_finite(bool with_whole_rows) const {
    return rows_.for_each([&](int64_t, const Range& piece) -> Result<void> {
      if (with_whole_rows || num_columns() == row_columns_) return check(whole_rows(piece), piece.begin, 0);
      for (int64_t r = piece.begin; r < piece.end; ++r) RETURN_IF_ERROR(check(bytes(r, columns_.begin, num_columns()), r, columns_.begin));
      return {};
    });
  }

 private:
  /// From a row of the tensor, which may itself be a segment of the stored one.
  [[nodiscard]] std::span<const std::byte> bytes(int64_t row, int64_t column, int64_t count) const {
    const size_t element = dtype_size(dtype_);
    return ref_.bytes().subspan(static_cast<size_t>((row_begin_ + row) * row_columns_ + column) * element,
                                static_cast<size_t>(count) * element);
  }
  [[nodiscard]] std::span<const std::byte> whole_rows(const Range& piece) const { return bytes(piece.begin, 0, piece.size() * row_columns_); }
  [[nodiscard]] Result<void> check(std::span<const std::byte> span, int64_t row, int64_t column) const {
    const auto bad = first_non_finite(span, dtype_);
    if (!bad) return {};
    const int64_t at = static_cast<int64_t>(*bad) + column;
    return invalid_argument("{}: element [{}, {}] is not a finite number{}; the file is damaged, or was written by a faulty conversion",
                            ref_.name, row_begin_ + row + at / row_columns_, at % row_columns_,
                            dtype_ == DType::kE4M3 ? fmt::format(" (e4m3 code {:#04x})", std::to_integer<int>(span[*bad])) : "");
  }

  const TensorRef& ref_;
  DType dtype_;
  RowPieces rows_;
  Range columns_;
  int64_t row_columns_, row_begin_;
};

Result<TensorView> stage_weight(const StoredRows& rows, Staging& staging, std::string_view purpose) {
  if (rows.contiguous()) return staging.borrow(rows.all(), rows.dtype(), {rows.num_rows(), rows.num_columns()}, purpose);
  return staging.make_rows(rows.dtype(), rows.num_rows(), rows.num_columns(), purpose, [&](int64_t first, int64_t count, std::byte* out) {
    for (int64_t r = 0; r < count; ++r) {
      const auto row = rows.row(first + r);
      std::memcpy(out + static_cast<size_t>(r) * row.size(), row.data(), row.size());
    }
  });
}

/// Whole rows are quantized and then cut, so that every cut of a row has the same scale.
Result<void> stage_quantized(const StoredRows& rows, Staging& staging, std::string_view purpose, LinearSource& source) {
  std::vector<float> scales(static_cast<size_t>(rows.num_rows()));
  const auto columns = static_cast<size_t>(rows.num_columns());
  const auto write = [&](int64_t first, int64_t count, std::byte* out) {
    std::vector<float> values;
    std::vector<uint8_t> codes;
    for (int64_t r = 0; r < count; ++r) {
      const auto whole = rows.whole_row(first + r);
      const size_t size = whole.size() / dtype_size(rows.dtype());
      values.resize(size);
      codes.resize(size);
      widen(whole.data(), rows.dtype(), size, values.data());
      scales[static_cast<size_t>(first + r)] = quantize_row_fp8(values.data(), size, codes.data());
      std::memcpy(out + static_cast<size_t>(r) * columns, codes.data() + rows.column_begin(), columns);
    }
  };
  ASSIGN_OR_RETURN(source.weight, staging.make_rows(DType::kE4M3, rows.num_rows(), rows.num_columns(), purpose, write));
  ASSIGN_OR_RETURN(source.scale, staging.copy(scales, {rows.num_rows()}, purpose));
  return {};
}

/// The scales of a slice, widened to f32 in the layout of LinearSource.
Result<void> stage_scale(const LinearEntry& entry, const RowPieces& rows, const Range& columns, Staging& staging, std::string_view purpose,
                         LinearSource& source) {
  switch (entry.stored.scheme) {
    case WeightScheme::kF32:
    case WeightScheme::kBF16:
    case WeightScheme::kF16: return {};
    case WeightScheme::kFp8Tensor: {
      const bool per_segment = entry.scale.tensor->shape.num_elements() > 1;
      ASSIGN_OR_RETURN(const std::vector<float> scale, read_scales(entry.scale, per_segment ? static_cast<size_t>(entry.segment) : 0, 1));
      ASSIGN_OR_RETURN(source.scale, staging.copy(scale, {1}, purpose));
      return {};
    }
    case WeightScheme::kFp8Channel: {
      std::vector<float> scales;
      RETURN_IF_ERROR(rows.for_each([&](int64_t, const Range& piece) -> Result<void> {
        ASSIGN_OR_RETURN(const std::vector<float> part, read_scales(entry.scale, static_cast<size_t>(entry.row_begin + piece.begin), static_cast<size_t>(piece.size())));
        scales.insert(scales.end(), part.begin(), part.end());
        return {};
      }));
      ASSIGN_OR_RETURN(source.scale, staging.copy(scales, {rows.size()}, purpose));
      return {};
    }
    case WeightScheme::kFp8Block: {
      const std::optional<ScaleRows> scale_rows = scale_rows_of(rows, entry.row_begin);
      if (!scale_rows) return make_error(ErrorCode::kUnsupported, "{}: its pieces cannot be joined, since their scale blocks do not lie on one grid of {}", entry.weight.name, ops::kScaleBlock);
      const Range block_columns = blocks_of(columns);
      const int64_t stored_columns = ceil_div(entry.stored.in_features, ops::kScaleBlock);
      std::vector<float> grid;
      for (const int64_t r : scale_rows->stored) {
        ASSIGN_OR_RETURN(const std::vector<float> row,
                         read_scales(entry.scale, static_cast<size_t>(r * stored_columns + block_columns.begin),
                                     static_cast<size_t>(block_columns.size())));
        grid.insert(grid.end(), row.begin(), row.end());
      }
      ASSIGN_OR_RETURN(source.scale, staging.copy(grid, {std::ssize(scale_rows->stored), block_columns.size()}, purpose));
      source.row_offset = scale_rows->offset;
      source.column_offset = columns.begin % ops::kScaleBlock;
      return {};
    }
  }
  CHECK_UNREACHABLE();
}

Result<std::optional<float>> read_input_scale(const LinearEntry& entry) {
  if (!entry.input_scale) return std::optional<float>();
  const bool per_segment = entry.input_scale.tensor->shape.num_elements() > 1;
  ASSIGN_OR_RETURN(const std::vector<float> scale, read_scales(entry.input_scale, per_segment ? static_cast<size_t>(entry.segment) : 0, 1));
  if (scale[0] <= 0) return invalid_argument("{}: a scale of {} is not above 0", entry.input_scale.name, scale[0]);
  return std::optional<float>(scale[0]);
}

}  // namespace

Result<std::unique_ptr<WeightSource>> CheckpointSource::open(const std::filesystem::path& model_dir, const model::ModelConfig& config,
                                                             const LoadOptions& options) {
  ASSIGN_OR_RETURN(const DeclaredQuantization declared, DeclaredQuantization::parse(config.quantization));
  Faults faults;
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(model_dir, faults));
  Account account = account_for(config, declared, checkpoint, options, /*files_ok=*/faults.empty(), faults);
  if (!faults.empty()) return faults.to_error(fmt::format("cannot load {}", model_dir.string()));
  return std::unique_ptr<WeightSource>(new CheckpointSource(std::move(checkpoint), std::move(account)));
}

Result<StagedLinear> CheckpointSource::linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) { return stage(name, slice, false, device, stream); }
Result<StagedLinear> CheckpointSource::linear_in_fp8(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) { return stage(name, slice, true, device, stream); }

Result<StagedLinear> CheckpointSource::stage(std::string_view name, const Slice& slice, bool in_fp8, ops::Device& device, ops::Stream& stream) {
  const auto found = account_.linears.find(name);
  CHECK_MSG(found != account_.linears.end(), std::string(name));
  const LinearEntry& entry = found->second;
  const RowPieces rows(slice, entry.stored.out_features);
  const Range columns = column_range(slice, entry.stored);
  if (rows.size() == entry.stored.out_features) entry.weight.file->will_need(*entry.weight.tensor);

  if (in_fp8 && ops::is_fp8(entry.stored.scheme)) return invalid_argument("{} is {} already", name, ops::weight_scheme_name(entry.stored.scheme));
  const bool quantize = entry.quantize || in_fp8;
  const StoredRows stored(entry, rows, columns);
  RETURN_IF_ERROR(stored.check_finite(/*with_whole_rows=*/quantize));
  StagedLinear staged;
  Staging staging(device, stream, staged.buffers);
  LinearSource& source = staged.source;
  source.shape = inventory().linears.find(name)->second;
  source.shape.out_features = rows.size();
  source.shape.in_features = columns.size();
  if (quantize) {
    source.shape.scheme = WeightScheme::kFp8Channel;
    RETURN_IF_ERROR(stage_quantized(stored, staging, name, source));
    return staged;
  }
  ASSIGN_OR_RETURN(source.weight, stage_weight(stored, staging, name));
  RETURN_IF_ERROR(stage_scale(entry, rows, columns, staging, name, source));
  ASSIGN_OR_RETURN(source.input_scale, read_input_scale(entry));
  return staged;
}

Result<StagedTensor> CheckpointSource::vector(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const auto found = account_.vectors.find(name);
  CHECK_MSG(found != account_.vectors.end(), std::string(name));
  const auto& [dtype, shape] = inventory().vectors.find(name)->second;
  const TensorRef& ref = found->second;
  const RowPieces rows(slice, shape[0]);
  const int64_t width = shape[0] == 0 ? 0 : shape.num_elements() / shape[0];
  const size_t row_bytes = static_cast<size_t>(width) * dtype_size(dtype);
  const auto bytes_of = [&](const Range& piece) { return ref.bytes().subspan(static_cast<size_t>(piece.begin) * row_bytes, static_cast<size_t>(piece.size()) * row_bytes); };
  RETURN_IF_ERROR(rows.for_each([&, type = dtype](int64_t, const Range& piece) -> Result<void> {
    if (const auto bad = find_non_finite(bytes_of(piece), type))
      return invalid_argument("{}: element {} is not a finite number; the file is damaged", ref.name, piece.begin * width + static_cast<int64_t>(*bad));
    return {};
  }));
  StagedTensor staged;
  Staging staging(device, stream, staged.buffers);
  if (rows.pieces().size() == 1) {
    ASSIGN_OR_RETURN(staged.view, staging.borrow(bytes_of(rows.pieces()[0]), dtype, shape_of_rows(shape, rows.size()), name));
    return staged;
  }
  ASSIGN_OR_RETURN(staged.view, staging.make_rows(dtype, rows.size(), width, name, [&](int64_t first, int64_t count, std::byte* out) {
    for (int64_t r = 0; r < count; ++r) std::memcpy(out + static_cast<size_t>(r) * row_bytes, ref.bytes().data() + static_cast<size_t>(rows.stored(first + r)) * row_bytes, row_bytes);
  }));
  staged.view.shape = shape_of_rows(shape, rows.size());
  return staged;
}

void CheckpointSource::done_with(std::string_view name) {
  if (const auto linear = account_.linears.find(name); linear != account_.linears.end()) {
    const TensorRef& weight = linear->second.weight;
    weight.file->done_with(*weight.tensor);
  } else if (const auto vector = account_.vectors.find(name); vector != account_.vectors.end()) {
    vector->second.file->done_with(*vector->second.tensor);
  }
}

}  // namespace quern::weights
