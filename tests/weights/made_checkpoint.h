#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/float_convert.h"
#include "model/config.h"
#include "support/host_device.h"
#include "support/test_support.h"
#include "synth_checkpoint/plan.h"
#include "synth_checkpoint/schemes.h"
#include "synth_checkpoint/synth.h"
#include "synth_checkpoint/writer.h"
#include "weights/source.h"

namespace quern::weights::testing {

using tools::SynthOptions;
using tools::SynthScheme;

inline constexpr std::string_view kPrefix = "model.language_model.";

/// A generated checkpoint that a test may spoil before it is written. Its sizes are no multiples of 128.
class MadeCheckpoint {
 public:
  explicit MadeCheckpoint(SynthScheme scheme, const std::function<void(SynthOptions&)>& adjust = {}) {
    options_.config = tools::preset_config("tiny").value();
    options_.scheme = scheme;
    if (adjust) adjust(options_);
    config_ = model::parse_config(options_.config, "tiny").value();
    config_.quantization = tools::quantization_config(config_, options_);
    plan_ = tools::plan_checkpoint(config_, options_, !options_.config.contains("text_config"));
  }

  [[nodiscard]] model::ModelConfig& config() { return config_; }
  [[nodiscard]] tools::CheckpointPlan& plan() { return plan_; }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_.path(); }

  /// A planned tensor by stored name, or by canonical name.
  tools::PlannedTensor& tensor(std::string_view name) {
    for (tools::PlannedFile& file : plan_.files)
      for (tools::PlannedTensor& tensor : file.tensors)
        if (tensor.name == name || tensor.name == std::string(kPrefix) + std::string(name)) return tensor;
    CHECK_MSG(false, std::string(name));
    std::abort();
  }
  bool erase(std::string_view name) {
    size_t erased = 0;
    for (tools::PlannedFile& file : plan_.files) {
      erased +=
          std::erase_if(file.tensors, [&](const auto& t) { return t.name == name || t.name == std::string(kPrefix) + std::string(name); });
    }
    if (!plan_.index.is_null()) plan_.index["weight_map"].erase(std::string(kPrefix) + std::string(name));
    return erased == 1;
  }
  void add(std::string name, DType dtype, Shape shape, std::vector<float> values = {}) {
    values.resize(static_cast<size_t>(shape.num_elements()), values.empty() ? 0.5f : values.back());
    plan_.files.front().tensors.push_back({std::move(name), dtype, shape, [dtype, values](int64_t begin, int64_t count, std::byte* out) {
                                             for (int64_t i = 0; i < count; ++i)
                                               write(values[static_cast<size_t>(begin + i)], dtype,
                                                     out + i * static_cast<int64_t>(dtype_size(dtype)));
                                           }});
  }
  /// Element `index` of a tensor gets these bytes.
  void put(std::string_view name, int64_t index, std::vector<uint8_t> bytes) {
    tools::PlannedTensor& t = tensor(name);
    t.fill = [fill = t.fill, index, bytes = std::move(bytes)](int64_t begin, int64_t count, std::byte* out) {
      fill(begin, count, out);
      if (begin <= index && index < begin + count)
        std::memcpy(out + static_cast<size_t>(index - begin) * bytes.size(), bytes.data(), bytes.size());
    };
  }
  void rename(std::string_view from, std::string to) { tensor(from).name = std::move(to); }

  void write_files() const {
    ASSERT_OK(tools::write_safetensors(plan_.files, folder(), 1));
    if (plan_.index.is_null()) return;
    ASSERT_OK(write_file(folder() / "model.safetensors.index.json", plan_.index.dump()));
  }
  Result<std::unique_ptr<WeightSource>> open(const LoadOptions& options = {}) {
    write_files();
    return open_weights(folder(), config_, options);
  }
  std::string error(const LoadOptions& options = {}) {
    const auto source = open(options);
    return source ? "no error" : source.error().message;
  }

  /// A planned tensor's bytes.
  std::vector<std::byte> bytes(std::string_view name) {
    const tools::PlannedTensor& t = tensor(name);
    std::vector<std::byte> all(t.size_bytes());
    t.fill(0, t.shape.num_elements(), all.data());
    return all;
  }
  /// A planned BF16, F32 or e4m3 tensor as numbers.
  std::vector<float> values(std::string_view name) {
    const tools::PlannedTensor& t = tensor(name);
    const std::vector<std::byte> all = bytes(name);
    std::vector<float> numbers(static_cast<size_t>(t.shape.num_elements()));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = read(all.data() + i * dtype_size(t.dtype), t.dtype);
    return numbers;
  }

  static float read(const std::byte* at, DType dtype) {
    if (dtype == DType::kE4M3) return e4m3_decode(std::to_integer<uint8_t>(*at));
    if (dtype == DType::kF32) {
      float value = 0;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof bits);
    return dtype == DType::kF16 ? f16_to_f32(bits) : to_f32(bf16{bits});
  }
  static void write(float value, DType dtype, std::byte* out) {
    const uint16_t narrow = to_bf16(value).bits;
    const uint8_t code = e4m3_encode(value);
    const int8_t integer = static_cast<int8_t>(value);
    const void* source = dtype == DType::kF32     ? static_cast<const void*>(&value)
                         : dtype == DType::kE4M3  ? static_cast<const void*>(&code)
                         : dtype_size(dtype) == 1 ? static_cast<const void*>(&integer)
                                                  : &narrow;
    std::memcpy(out, source, std::min<size_t>(dtype_size(dtype), 4));
  }

 private:
  quern::testing::TemporaryFolder folder_;
  SynthOptions options_;
  model::ModelConfig config_;
  tools::CheckpointPlan plan_;
};

/// A staged linear as the numbers that it means, [out_features, in_features].
inline std::vector<float> dequantised(const StagedLinear& staged) {
  const ops::LinearSource& s = staged.source;
  const int64_t rows = s.shape.out_features, columns = s.shape.in_features;
  std::vector<float> numbers(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      float scale = 1;
      if (s.shape.scheme == ops::WeightScheme::kFp8Tensor) scale = s.scale.data<float>()[0];
      if (s.shape.scheme == ops::WeightScheme::kFp8Channel) scale = s.scale.data<float>()[r];
      if (s.shape.scheme == ops::WeightScheme::kFp8Block) {
        scale = s.scale.data<float>()[(s.row_offset + r) / 128 * s.scale.shape[1] + (s.column_offset + c) / 128];
      }
      const auto i = static_cast<size_t>(r * columns + c);
      numbers[i] = scale * MadeCheckpoint::read(s.weight.data<std::byte>() + i * dtype_size(s.weight.dtype), s.weight.dtype);
    }
  }
  return numbers;
}

/// What a slice of a staged linear means; fails the test when it cannot be staged.
inline std::vector<float> stage(WeightSource& source, std::string_view name, const Slice& slice = {}, bool in_place = true) {
  quern::testing::HostDevice device(in_place);
  auto stream = device.make_stream();
  auto staged = source.linear(name, slice, device, **stream);
  EXPECT_OK(staged);
  if (!staged) return {};
  EXPECT_OK((*stream)->finish());
  return dequantised(*staged);
}

inline std::vector<float> cut(const std::vector<float>& whole, int64_t columns, const Slice& s) {
  std::vector<float> part;
  const int64_t row_end = s.row_end < 0 ? static_cast<int64_t>(whole.size()) / columns : s.row_end,
                column_end = s.column_end < 0 ? columns : s.column_end;
  std::vector<Range> pieces{{s.row_begin, row_end}};
  pieces.insert(pieces.end(), s.further_rows.begin(), s.further_rows.end());
  for (const Range& piece : pieces)
    for (int64_t r = piece.begin; r < piece.end; ++r)
      for (int64_t c = s.column_begin; c < column_end; ++c) part.push_back(whole[static_cast<size_t>(r * columns + c)]);
  return part;
}

}  // namespace quern::weights::testing
