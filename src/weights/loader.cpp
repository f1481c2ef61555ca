#include "weights/loader.h"

#include <atomic>
#include <cstring>
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

/// A rectangle of a stored matrix.
class StoredRows {
 public:
  StoredRows(const LinearEntry& entry, const Range& rows, const Range& columns)
      : ref_(entry.weight),
        dtype_(ops::stored_dtype(entry.stored.scheme)),
        columns_(columns),
        row_columns_(entry.stored.in_features),
        row_begin_(entry.row_begin + rows.begin),
        num_rows_(rows.size()) {}

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] int64_t num_rows() const { return num_rows_; }
  [[nodiscard]] int64_t num_columns() const { return columns_.size(); }
  [[nodiscard]] bool contiguous() const { return num_columns() == row_columns_; }
  /// Bytes of row `row` of the rectangle.
  [[nodiscard]] std::span<const std::byte> row(int64_t row) const { return bytes(row, columns_.begin, num_columns()); }
  [[nodiscard]] std::span<const std::byte> whole_row(int64_t row) const { return bytes(row, 0, row_columns_); }
  [[nodiscard]] std::span<const std::byte> all() const { return bytes(0, 0, num_rows_ * row_columns_); }
  [[nodiscard]] int64_t column_begin() const { return columns_.begin; }

  /// Refuses NaN and infinities by name and position.
  [[nodiscard]] Result<void> check_finite(bool whole_rows) const {
    if (contiguous() || whole_rows) return check(all(), 0, 0);
    for (int64_t r = 0; r < num_rows_; ++r) RETURN_IF_ERROR(check(row(r), r, columns_.begin));
    return {};
  }

 private:
  [[nodiscard]] std::span<const std::byte> bytes(int64_t row, int64_t column, int64_t count) const {
    const size_t element = dtype_size(dtype_);
    return ref_.bytes().subspan(static_cast<size_t>((row_begin_ + row) * row_columns_ + column) * element,
                                static_cast<size_t>(count) * element);
  }
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
  Range columns_;
  int64_t row_columns_, row_begin_, num_rows_;
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
Result<void> stage_scale(const LinearEntry& entry, const Range& rows, const Range& columns, Staging& staging, std::string_view purpose,
                         LinearSource& source) {
  const auto first_row = static_cast<size_t>(entry.row_begin + rows.begin);
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
      ASSIGN_OR_RETURN(const std::vector<float> scale, read_scales(entry.scale, first_row, static_cast<size_t>(rows.size())));
      ASSIGN_OR_RETURN(source.scale, staging.copy(scale, {rows.size()}, purpose));
      return {};
    }
    case WeightScheme::kFp8Block: {
      const Range block_rows = blocks_of({entry.row_begin + rows.begin, entry.row_begin + rows.end}), block_columns = blocks_of(columns);
      const int64_t stored_columns = ceil_div(entry.stored.in_features, ops::kScaleBlock);
      std::vector<float> grid;
      for (int64_t r = block_rows.begin; r < block_rows.end; ++r) {
        ASSIGN_OR_RETURN(const std::vector<float> row,
                         read_scales(entry.scale, static_cast<size_t>(r * stored_columns + block_columns.begin),
                                     static_cast<size_t>(block_columns.size())));
        grid.insert(grid.end(), row.begin(), row.end());
      }
      ASSIGN_OR_RETURN(source.scale, staging.copy(grid, {block_rows.size(), block_columns.size()}, purpose));
      source.row_offset = static_cast<int64_t>(first_row) % ops::kScaleBlock;
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

Result<StagedLinear> CheckpointSource::linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) {
  const auto found = account_.linears.find(name);
  CHECK_MSG(found != account_.linears.end(), std::string(name));
  const LinearEntry& entry = found->second;
  const Range rows = row_range(slice, entry.stored), columns = column_range(slice, entry.stored);
  entry.weight.file->will_need(*entry.weight.tensor);

  const StoredRows stored(entry, rows, columns);
  RETURN_IF_ERROR(stored.check_finite(/*whole_rows=*/entry.quantize));
  StagedLinear staged;
  Staging staging(device, stream, staged.buffers);
  LinearSource& source = staged.source;
  source.shape = inventory().linears.find(name)->second;
  source.shape.out_features = rows.size();
  source.shape.in_features = columns.size();
  if (entry.quantize) {
    RETURN_IF_ERROR(stage_quantized(stored, staging, name, source));
    return staged;
  }
  ASSIGN_OR_RETURN(source.weight, stage_weight(stored, staging, name));
  RETURN_IF_ERROR(stage_scale(entry, rows, columns, staging, name, source));
  ASSIGN_OR_RETURN(source.input_scale, read_input_scale(entry));
  return staged;
}

Result<StagedTensor> CheckpointSource::vector(std::string_view name, ops::Device& device, ops::Stream& stream) {
  const auto found = account_.vectors.find(name);
  CHECK_MSG(found != account_.vectors.end(), std::string(name));
  const auto& [dtype, shape] = inventory().vectors.find(name)->second;
  const TensorRef& ref = found->second;
  if (const auto bad = find_non_finite(ref.bytes(), dtype))
    return invalid_argument("{}: element {} is not a finite number; the file is damaged", ref.name, *bad);
  StagedTensor staged;
  ASSIGN_OR_RETURN(staged.view, Staging(device, stream, staged.buffers).borrow(ref.bytes(), dtype, shape, name));
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
