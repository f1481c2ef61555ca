#include "worker/selftest_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace quern::worker::selftest {

std::vector<ops::RowRun> two_runs(ops::RowKind kind, int32_t num_rows) {
  const int32_t in_slot_0 = std::min(num_rows - 1, num_rows > 3 ? 3 : 1);
  std::vector<ops::RowRun> runs{{.slot = 2, .num_rows = num_rows - in_slot_0, .kind = kind}};
  if (in_slot_0 > 0) runs.push_back({.slot = 0, .num_rows = in_slot_0, .kind = kind});
  return runs;
}

void Trial::store(float value, DType dtype, std::byte* out) {
  const auto put = [&](auto stored) { std::memcpy(out, &stored, sizeof stored); };
  switch (dtype) {
    case DType::kF32: return put(value);
    case DType::kBF16: return put(to_bf16(value));
    case DType::kF16: {  // the values of the self-test are normal in half precision, or zero
      const uint32_t u = std::bit_cast<uint32_t>(value);
      const uint32_t magnitude = u & 0x7fffffffu, rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      return put(static_cast<uint16_t>((u >> 16 & 0x8000u) | (magnitude < 0x38800000u ? 0 : (rounded >> 13) - (112u << 10))));
    }
    case DType::kE4M3: return put(e4m3_encode(value));
    case DType::kI32: return put(static_cast<int32_t>(value));
    case DType::kU8: return put(static_cast<uint8_t>(value));
    case DType::kE5M2: case DType::kI64: case DType::kBool: break;
  }
  CHECK_UNREACHABLE();
}

Result<ops::TensorView> Trial::upload(std::span<const std::byte> bytes, DType dtype, const Shape& shape) {
  CHECK(bytes.size() == static_cast<size_t>(shape.num_elements()) * dtype_size(dtype));
  ASSIGN_OR_RETURN(buffers_.emplace_back(), device_.allocate(bytes.size(), "self-test"));
  const ops::TensorView view{buffers_.back().get(), 0, dtype, shape};
  stream_.copy_to_device(bytes.data(), view);
  RETURN_IF_ERROR(stream_.finish());
  return view;
}

Result<ops::TensorView> Trial::unwritten(DType dtype, const Shape& shape) {
  return upload(std::vector<std::byte>(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), std::byte{0xff}), dtype, shape);
}

Result<ops::LinearSource> Trial::linear(const ops::LinearShape& shape) {
  const int64_t rows = shape.out_features, columns = shape.in_features;
  const float amplitude = std::sqrt(3.0f / static_cast<float>(std::max<int64_t>(columns, 1)));
  ops::LinearSource source;
  source.shape = shape;
  if (shape.static_input_scale) source.input_scale = 1.0f / 64;
  if (!ops::is_fp8(shape.scheme)) {
    ASSIGN_OR_RETURN(source.weight, uniform(ops::stored_dtype(shape.scheme), {rows, columns}, -amplitude, amplitude));
    return source;
  }
  constexpr float kLargestCode = 240;
  constexpr int kMagnitudes = 13;  // from 240 down to 2^-4.1, whose codes are mostly below the smallest normal, 2^-6, or not far above
  const bool block = shape.scheme == ops::WeightScheme::kFp8Block, channel = shape.scheme == ops::WeightScheme::kFp8Channel;
  const int64_t scale_rows = block ? ceil_div(rows, ops::kScaleBlock) : channel ? rows : 1, scale_columns = block ? ceil_div(columns, ops::kScaleBlock) : 1;
  std::vector<float> largest, scale;
  for (int64_t i = 0; i < scale_rows * scale_columns; ++i) {
    largest.push_back(std::ldexp(kLargestCode, block || channel ? -below(kMagnitudes) : 0));
    scale.push_back(amplitude / largest.back() * uniform(0.6f, 1.4f));
  }
  ASSIGN_OR_RETURN(source.weight, tensor(DType::kE4M3, {rows, columns}, [&](int64_t i) {
    const int64_t row = i / columns, column = i % columns;
    const float limit = largest[static_cast<size_t>(block ? row / ops::kScaleBlock * scale_columns + column / ops::kScaleBlock : channel ? row : 0)];
    return uniform(-limit, limit);
  }));
  const Shape scale_shape = block ? Shape{scale_rows, scale_columns} : Shape{scale_rows};
  ASSIGN_OR_RETURN(source.scale, tensor(DType::kF32, scale_shape, [&](int64_t i) { return scale[static_cast<size_t>(i)]; }));
  return source;
}

Result<Step> Trial::step(std::vector<ops::RowRun> runs, const Positions& positions) {
  Step step;
  std::vector<int32_t> tokens, indices, triples;
  for (ops::RowRun& run : runs) {
    run.first_row = static_cast<int32_t>(indices.size());
    for (int32_t i = 0; i < run.num_rows; ++i) {
      const int32_t index = positions.cursor[static_cast<size_t>(run.slot)] + i;
      tokens.push_back(below(64));
      indices.push_back(index);
      for (const int32_t axis : {0, 1, 2}) triples.push_back(index + (run.kind == ops::RowKind::kPrompt ? 100 * axis : 0));
    }
  }
  step.runs = std::move(runs);
  const auto n = static_cast<int32_t>(indices.size());
  const auto num_runs = static_cast<int32_t>(step.runs.size());
  step.rows.num_rows = n;
  step.rows.runs = step.runs;
  std::vector<ops::RunEntry> entries(step.runs.size());
  std::vector<int32_t> row_runs(indices.size());
  ops::fill_run_tables(step.runs, entries, row_runs);
  ASSIGN_OR_RETURN(step.rows.run_table, upload(std::as_bytes(std::span(entries)), DType::kI32, {num_runs, ops::kRunFields}));
  ASSIGN_OR_RETURN(step.rows.row_runs, ints({n}, row_runs));
  ASSIGN_OR_RETURN(step.rows.given_tokens, ints({n}, tokens));
  ASSIGN_OR_RETURN(step.rows.run_positions, ints({num_runs, 3}, std::vector<int32_t>(static_cast<size_t>(num_runs) * 3, 0)));
  ASSIGN_OR_RETURN(step.rows.tokens, ints({n}, tokens));
  ASSIGN_OR_RETURN(step.rows.indices, ints({n}, indices));
  ASSIGN_OR_RETURN(step.rows.positions, ints({n, 3}, triples));
  ops::SlotTables& slots = step.rows.slots;
  ASSIGN_OR_RETURN(slots.cursor, ints({kNumSlots}, {positions.cursor.begin(), positions.cursor.end()}));
  ASSIGN_OR_RETURN(slots.boundary, ints({kNumSlots}, {positions.boundary.begin(), positions.boundary.end()}));
  ASSIGN_OR_RETURN(slots.last_token, tensor(DType::kI32, {kNumSlots}, [&](int64_t) { return below(64); }));
  ASSIGN_OR_RETURN(slots.position_delta, tensor(DType::kI32, {kNumSlots}, [](int64_t slot) { return 5 * slot - 3; }));
  ASSIGN_OR_RETURN(slots.drafts, tensor(DType::kI32, {kNumSlots, kDrafts}, [&](int64_t) { return below(64); }));
  constexpr int32_t kStride = 10;  // no common divisor with the number of blocks
  ASSIGN_OR_RETURN(slots.block_tables, tensor(DType::kI32, {kNumSlots, kMaxBlocks}, [](int64_t i) { return i * kStride % (kNumSlots * kMaxBlocks); }));
  return step;
}

Result<ops::Launch> Trial::launch(const ops::Kernel& kernel, int64_t max_rows) {
  const auto bytes = static_cast<int64_t>(kernel.workspace_bytes(max_rows));
  ASSIGN_OR_RETURN(const ops::TensorView workspace, unwritten(DType::kU8, {bytes}));
  return ops::Launch{stream_, workspace};
}

Result<std::vector<float>> Trial::read(const ops::TensorView& view) {
  std::vector<std::byte> bytes(view.size_bytes());
  stream_.copy_to_host(view, bytes.data());
  RETURN_IF_ERROR(stream_.finish());
  std::vector<float> values(static_cast<size_t>(view.shape.num_elements()));
  const auto widen = [&]<class Stored>(Stored, auto&& value_of) {
    for (size_t i = 0; i < values.size(); ++i) {
      Stored stored;
      std::memcpy(&stored, bytes.data() + i * sizeof stored, sizeof stored);
      values[i] = value_of(stored);
    }
  };
  switch (view.dtype) {
    case DType::kF32: widen(float{}, [](float x) { return x; }); break;
    case DType::kBF16: widen(bf16{}, [](bf16 x) { return to_f32(x); }); break;
    case DType::kE4M3: widen(uint8_t{}, [](uint8_t x) { return kE4M3Table[x]; }); break;
    case DType::kI32: widen(int32_t{}, [](int32_t x) { return static_cast<float>(x); }); break;
    case DType::kU8: widen(uint8_t{}, [](uint8_t x) { return static_cast<float>(x); }); break;
    case DType::kF16: case DType::kE5M2: case DType::kI64: case DType::kBool: CHECK_UNREACHABLE();
  }
  return values;
}

Result<void> Trial::keep(std::string name, const ops::TensorView& view, double bound) {
  ASSIGN_OR_RETURN(std::vector<float> values, read(view));
  outputs_.push_back({std::move(name), std::move(values), view.shape[view.shape.rank() - 1], bound});
  return {};
}

double Trial::bound(int num_roundings, DType activation, std::initializer_list<ops::WeightScheme> schemes, int num_quantizations) const {
  const bool quantizes = device_.traits().fp8_matrix && std::any_of(schemes.begin(), schemes.end(), ops::is_fp8);
  return num_roundings * rounding_error(activation) + (quantizes ? num_quantizations * rounding_error(DType::kE4M3) : 0);
}

namespace {

std::string difference(const Output& expected, const Output& actual) {
  const size_t n = expected.values.size(), length = static_cast<size_t>(std::max<int64_t>(expected.row_length, 1));
  double energy = 0;
  for (size_t i = 0; i < n; ++i) {
    const float e = expected.values[i], a = actual.values[i];
    const bool both_nan = std::isnan(e) && std::isnan(a);
    if (expected.bound == 0 ? !(e == a || both_nan) : std::isfinite(e) != std::isfinite(a))
      return fmt::format("{}: element {} is {} and should be {}", expected.name, i, a, e);
    if (std::isfinite(e)) energy += static_cast<double>(e) * e;
  }
  if (expected.bound == 0) return {};
  // Row by row, so that one wrong row among many shows; a row that happens to be small is measured against the others.
  const double mean_energy = energy / static_cast<double>(n / length);
  double worst = 0;
  for (size_t begin = 0; begin < n; begin += length) {
    double error = 0, row_energy = 0;
    for (size_t i = begin; i < begin + length; ++i) {
      const double e = expected.values[i], a = actual.values[i];
      if (!std::isfinite(e)) continue;
      error += (a - e) * (a - e);
      row_energy += e * e;
    }
    if (error > 0) worst = std::max(worst, error / std::max(row_energy, 0.1 * mean_energy));
  }
  if (worst <= expected.bound) return {};
  return fmt::format("{}: normalised mean square error {:.2g}, allowed is {:.2g}", expected.name, worst, expected.bound);
}

}  // namespace

std::string difference(const std::vector<Output>& expected, const std::vector<Output>& actual) {
  CHECK(expected.size() == actual.size());
  for (size_t i = 0; i < expected.size(); ++i)
    if (std::string text = difference(expected[i], actual[i]); !text.empty()) return text;
  return {};
}

}  // namespace quern::worker::selftest
