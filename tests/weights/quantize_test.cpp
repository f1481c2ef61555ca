// `quern quantize` below the command line: what it writes is what it read, to half a quantum, and what it refuses leaves nothing behind.

#include "weights/quantize.h"

#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "weights/declared.h"
#include "weights/encode_fp8.h"
#include "weights/made_checkpoint.h"
#include "weights/safetensors.h"
#include "weights/safetensors_writer.h"

namespace quern::weights {
namespace {

namespace fs = std::filesystem;
using quern::testing::TemporaryFolder;
using testing::dequantised;
using testing::MadeCheckpoint;
using testing::stage;
using tools::SynthScheme;

/// A BF16 checkpoint with its config, a tokenizer and a file that no one knows. Its sizes are no multiples of 128.
class Quantize : public ::testing::TestWithParam<QuantizeScheme> {
 protected:
  static Json tiny_config() { return tools::preset_config("tiny").value(); }

  void write_source() {
    made_.write_files();
    ASSERT_OK(write_file(made_.folder() / "config.json", tiny_config().dump()));
    ASSERT_OK(write_file(made_.folder() / "tokenizer.json", "{\"tokens\": []}"));
    ASSERT_OK(write_file(made_.folder() / "chat_template.jinja", "{{ messages }}"));
    ASSERT_OK(write_file(made_.folder() / "model.gguf", "other weights"));
  }

  /// Ranges as a calibration would find them, different for every module.
  Calibration calibration() {
    Calibration result;
    float largest = 3;
    for (const model::TensorSpec& spec : model::tensor_specs(made_.config(), false)) {
      if (!spec.quantize_at_runtime) continue;
      result.inputs[spec.name.substr(0, spec.name.rfind('.'))] = largest;
      largest += 1.25f;
    }
    for (int64_t i = 0; i < made_.config().num_layers(); ++i)
      if (made_.config().layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention)
        result.kv[i] = {.key = 7.0f + static_cast<float>(i), .value = 0.5f + static_cast<float>(i)};
    return result;
  }

  QuantizeOptions options(QuantizeScheme scheme) {
    QuantizeOptions result{.scheme = scheme, .num_threads = 2};
    if (scheme == QuantizeScheme::kStaticFp8) result.calibration = calibration();
    return result;
  }
  QuantizeOptions options() { return options(GetParam()); }

  [[nodiscard]] fs::path destination() const { return folder_.path() / "made" / "fp8"; }
  [[nodiscard]] size_t num_entries(const fs::path& dir) const {
    size_t count = 0;
    std::error_code error;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(dir, error)) ++count;
    return count;
  }

  Result<std::unique_ptr<WeightSource>> open_result(const fs::path& dir) {
    ASSIGN_OR_RETURN(const model::ModelConfig config, model::load_config(dir));
    return open_weights(dir, config, {.strict = true});
  }

  /// The message of a refusal that left nothing behind.
  std::string refusal(const QuantizeOptions& options) {
    const auto report = quantize_checkpoint(made_.folder(), destination(), options);
    EXPECT_EQ(num_entries(destination().parent_path()), 0u);
    return report ? "no error" : report.error().message;
  }

  MadeCheckpoint made_{SynthScheme::kBf16};
  TemporaryFolder folder_;
};

/// Half the distance between two neighbours of e4m3 around |x|.
float half_quantum(float x) {
  const int exponent = std::max(std::ilogb(std::max(std::fabs(x), 0x1p-9f)), -6);
  return std::ldexp(1.0f, exponent - 4);
}

float largest_of(const std::vector<float>& values) {
  float largest = 0;
  for (const float x : values) largest = std::max(largest, std::fabs(x));
  return largest;
}

TEST_P(Quantize, EveryWeightIsWithinHalfAQuantum) {
  write_source();
  const auto report = quantize_checkpoint(made_.folder(), destination(), options());
  ASSERT_OK(report);
  const auto source = open_result(destination());
  ASSERT_OK(source);
  int64_t num_quantized = 0;
  for (const auto& [name, linear] : (*source)->inventory().linears) {
    SCOPED_TRACE(name);
    const std::vector<float> original = made_.values(name);
    quern::testing::HostDevice device(true);
    auto stream = device.make_stream();
    auto staged = (*source)->linear(name, {}, device, **stream);
    ASSERT_OK(staged);
    const std::vector<float> now = dequantised(*staged);
    ASSERT_EQ(now.size(), original.size());
    if (!ops::is_fp8(linear.scheme)) {
      EXPECT_EQ(now, original);
      continue;
    }
    ++num_quantized;
    const int64_t columns = linear.in_features;
    const auto scale_of = [&](size_t i) {
      const auto row = static_cast<int64_t>(i) / columns, column = static_cast<int64_t>(i) % columns;
      const float* scales = staged->source.scale.data<float>();
      if (linear.scheme == ops::WeightScheme::kFp8Tensor) return scales[0];
      if (linear.scheme == ops::WeightScheme::kFp8Channel) return scales[row];
      return scales[row / 128 * ceil_div(columns, 128) + column / 128];
    };
    std::map<float, float> used;  // scale -> largest weight under it
    for (size_t i = 0; i < now.size(); ++i) {
      const float scale = scale_of(i);
      ASSERT_LE(std::fabs(now[i] - original[i]), half_quantum(original[i] / scale) * scale * 1.000001f) << i << ": " << original[i];
      used[scale] = std::max(used[scale], std::fabs(original[i]));
    }
    for (const auto& [scale, largest] : used) EXPECT_NEAR(largest / scale, 448, 448.0 / 256);  // the range is used to its end
    if (linear.scheme == ops::WeightScheme::kFp8Tensor) {
      ASSERT_TRUE(staged->source.input_scale.has_value());
      EXPECT_EQ(*staged->source.input_scale, stored_scale(calibration().inputs.at(name.substr(0, name.rfind('.')))));
    }
  }
  EXPECT_EQ(num_quantized, report->num_quantized);
  EXPECT_GT(num_quantized, 0);
}

TEST_P(Quantize, KeepsWhatReleasedCheckpointsKeep) {
  write_source();
  ASSERT_OK(quantize_checkpoint(made_.folder(), destination(), options()));
  const auto source = open_result(destination());
  ASSERT_OK(source);
  const bool is_static = GetParam() == QuantizeScheme::kStaticFp8;
  for (const auto& [name, linear] : (*source)->inventory().linears) {
    const bool mtp = name.starts_with("mtp."), gdn = name.find("linear_attn.") != std::string::npos;
    const bool kept = name == "embed_tokens.weight" || name == "lm_head.weight" || name == "mtp.fc.weight" ||
                      name.find("in_proj_a") != std::string::npos || name.find("in_proj_b") != std::string::npos ||
                      (is_static && (mtp || gdn));
    EXPECT_EQ(ops::is_fp8(linear.scheme), !kept) << name;
    EXPECT_EQ(linear.static_input_scale, is_static && !kept) << name;
  }
  quern::testing::HostDevice device(true);
  auto stream = device.make_stream();
  for (const auto& [name, vector] : (*source)->inventory().vectors) {
    auto staged = (*source)->vector(name, {}, device, **stream);
    ASSERT_OK(staged);
    const std::vector<std::byte> before = made_.bytes(name);
    ASSERT_EQ(staged->view.size_bytes(), before.size()) << name;
    EXPECT_EQ(std::memcmp(staged->view.data<std::byte>(), before.data(), before.size()), 0) << name;
  }
  // The config declares what is stored, to the loader's satisfaction.
  for (const std::string& note : (*source)->inventory().notes) EXPECT_EQ(note.find("disagrees"), std::string::npos) << note;
  const auto config = model::load_config(destination());
  ASSERT_OK(config);
  const auto declared = DeclaredQuantization::parse(config->quantization);
  ASSERT_OK(declared);
  EXPECT_EQ(declared->method(), GetParam() == QuantizeScheme::kBlockFp8 ? "fp8" : "compressed-tensors");
  EXPECT_FALSE(declared->scheme_of("lm_head").has_value());
  EXPECT_EQ(declared->scheme_of("layers.3.mlp.up_proj")->static_input_scale, is_static);
}

TEST_P(Quantize, CopiesTheSmallFilesAndNoOtherWeights) {
  write_source();
  ASSERT_OK(quantize_checkpoint(made_.folder(), destination(), options()));
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(destination())) names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"}));
  const auto config = read_json_file(destination() / "config.json");
  ASSERT_OK(config);
  Json without = *config;
  without.erase("quantization_config");
  EXPECT_EQ(without, tiny_config());
  EXPECT_EQ(num_entries(destination().parent_path()), 1u);  // no temporary folder is left
}

TEST_P(Quantize, StoresTheKvScalesOfACalibration) {
  write_source();
  QuantizeOptions with = options();
  with.calibration = calibration();
  ASSERT_OK(quantize_checkpoint(made_.folder(), destination(), with));
  const auto source = open_result(destination());
  ASSERT_OK(source);
  const Inventory& inventory = (*source)->inventory();
  EXPECT_EQ(inventory.fp8_kv_declared, GetParam() != QuantizeScheme::kBlockFp8);  // quant_method fp8 has no word for it
  ASSERT_EQ(inventory.kv_scales.size(), calibration().kv.size());
  for (const auto& [layer, range] : calibration().kv) {
    EXPECT_EQ(inventory.kv_scales.at(layer).k, std::vector<float>{stored_scale(range.key)});
    EXPECT_EQ(inventory.kv_scales.at(layer).v, std::vector<float>{stored_scale(range.value)});
  }
}

TEST_P(Quantize, ShardsStayBelowTheirSize) {
  write_source();
  QuantizeOptions small = options();
  small.shard_bytes = 60'000;
  const auto report = quantize_checkpoint(made_.folder(), destination(), small);
  ASSERT_OK(report);
  EXPECT_GT(report->num_files, 3u);
  const auto index = read_json_file(destination() / "model.safetensors.index.json");
  ASSERT_OK(index);
  EXPECT_EQ((*index)["metadata"]["total_size"], report->written_bytes);
  uint64_t bytes = 0;
  std::set<std::string> files;
  for (const auto& [name, file] : (*index)["weight_map"].items()) files.insert(file.get<std::string>());
  EXPECT_EQ(files.size(), report->num_files);
  for (const std::string& file : files) {
    const auto opened = SafetensorsFile::open(destination() / file);
    ASSERT_OK(opened);
    uint64_t in_file = 0;
    size_t weights = 0;
    for (const auto& [name, tensor] : opened->tensors()) {
      EXPECT_EQ((*index)["weight_map"][name], file);
      in_file += tensor.size;
      weights += tensor.size > 1000;
    }
    EXPECT_TRUE(in_file <= small.shard_bytes || weights <= 1) << file << " has " << in_file;
    bytes += in_file;
  }
  EXPECT_EQ(bytes, report->written_bytes);
  EXPECT_OK(open_result(destination()));
}

TEST_P(Quantize, ThreadsDoNotChangeTheFile) {
  write_source();
  std::vector<std::string> written;
  for (const int threads : {1, 3}) {
    QuantizeOptions with = options();
    with.num_threads = threads;
    const fs::path dir = folder_.path() / fmt::format("with-{}", threads);
    ASSERT_OK(quantize_checkpoint(made_.folder(), dir, with));
    const auto file = read_file(dir / "model.safetensors");
    ASSERT_OK(file);
    written.push_back(*file);
  }
  EXPECT_TRUE(written[0] == written[1]);
}

TEST_P(Quantize, RowsOfZerosAndTinyWeightsStayFinite) {
  const std::string name = "layers.3.mlp.up_proj.weight";
  tools::PlannedTensor& tensor = made_.tensor(name);
  const int64_t columns = tensor.shape[1];
  tensor.fill = [fill = tensor.fill, columns](int64_t begin, int64_t count, std::byte* out) {
    fill(begin, count, out);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (begin + i) / columns;
      if (row < 130) MadeCheckpoint::write(row == 129 ? 0x1p-130f : 0.0f, DType::kBF16, out + i * 2);
    }
  };
  write_source();
  ASSERT_OK(quantize_checkpoint(made_.folder(), destination(), options()));
  const auto source = open_result(destination());
  ASSERT_OK(source);
  const std::vector<float> now = stage(**source, name), before = made_.values(name);
  for (int64_t i = 0; i < 129 * columns; ++i) ASSERT_EQ(now[static_cast<size_t>(i)], 0) << i;
  for (int64_t i = 129 * columns; i < 130 * columns; ++i) ASSERT_NEAR(now[static_cast<size_t>(i)], 0, largest_of(before) / 448 / 512) << i;
}

TEST_P(Quantize, ReadsF16AndF32AsWell) {
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    MadeCheckpoint other(SynthScheme::kBf16);
    for (tools::PlannedFile& file : other.plan().files) {
      for (tools::PlannedTensor& tensor : file.tensors) {
        tensor.fill = [fill = tensor.fill, dtype](int64_t begin, int64_t count, std::byte* out) {
          std::vector<std::byte> narrow(static_cast<size_t>(count) * 2);
          fill(begin, count, narrow.data());
          for (int64_t i = 0; i < count; ++i) {
            const float value = MadeCheckpoint::read(&narrow[static_cast<size_t>(i) * 2], DType::kBF16);
            const _Float16 half = static_cast<_Float16>(value);
            dtype == DType::kF32 ? std::memcpy(out + i * 4, &value, 4) : std::memcpy(out + i * 2, &half, 2);
          }
        };
        tensor.dtype = dtype;
      }
    }
    other.write_files();
    ASSERT_OK(write_file(other.folder() / "config.json", tiny_config().dump()));
    const fs::path dir = folder_.path() / std::string(dtype_name(dtype));
    ASSERT_OK(quantize_checkpoint(other.folder(), dir, options()));
    const auto source = open_result(dir);
    ASSERT_OK(source);
    const std::string name = "layers.3.self_attn.o_proj.weight";
    const std::vector<float> now = stage(**source, name), before = made_.values(name);
    for (size_t i = 0; i < now.size(); ++i) ASSERT_NEAR(now[i], before[i], largest_of(before) / 28) << i;
  }
}

std::string scheme_name(const ::testing::TestParamInfo<QuantizeScheme>& scheme) {
  return scheme.param == QuantizeScheme::kBlockFp8 ? "block" : scheme.param == QuantizeScheme::kStaticFp8 ? "static" : "channel";
}
INSTANTIATE_TEST_SUITE_P(Schemes, Quantize,
                         ::testing::Values(QuantizeScheme::kBlockFp8, QuantizeScheme::kStaticFp8, QuantizeScheme::kChannelFp8), scheme_name);

using QuantizeRefuses = Quantize;
using ::testing::HasSubstr;

TEST_F(QuantizeRefuses, ADestinationThatIsThere) {
  write_source();
  ASSERT_TRUE(fs::create_directories(destination()));
  ASSERT_OK(write_file(destination() / "precious", "work"));
  const auto report = quantize_checkpoint(made_.folder(), destination(), options(QuantizeScheme::kBlockFp8));
  ASSERT_FALSE(report.has_value());
  EXPECT_THAT(report.error().message, HasSubstr("exists and is not empty"));
  EXPECT_EQ(num_entries(destination()), 1u);

  fs::remove(destination() / "precious");
  EXPECT_OK(quantize_checkpoint(made_.folder(), destination(), options(QuantizeScheme::kBlockFp8)));  // an empty one is taken

  const fs::path file = folder_.path() / "file";
  ASSERT_OK(write_file(file, "x"));
  EXPECT_THAT(quantize_checkpoint(made_.folder(), file, options(QuantizeScheme::kBlockFp8)).error().message, HasSubstr("not a directory"));
  EXPECT_THAT(quantize_checkpoint(made_.folder(), made_.folder(), options(QuantizeScheme::kBlockFp8)).error().message,
              HasSubstr("onto itself"));
}

TEST_F(QuantizeRefuses, ASourceThatIsFp8) {
  for (const SynthScheme scheme : {SynthScheme::kBlockFp8, SynthScheme::kStaticFp8, SynthScheme::kModelOptFp8}) {
    TemporaryFolder source;
    tools::SynthOptions synth{.config = tiny_config(), .scheme = scheme, .text_files = false};
    ASSERT_OK(tools::write_checkpoint(synth, source.path()));
    const auto report = quantize_checkpoint(source.path(), destination(), options(QuantizeScheme::kBlockFp8));
    ASSERT_FALSE(report.has_value());
    EXPECT_THAT(report.error().message, HasSubstr("quantized already"));
    // Also where the config keeps silent about it.
    Json silent = tiny_config();
    ASSERT_OK(write_file(source.path() / "config.json", silent.dump()));
    fs::remove(source.path() / "hf_quant_config.json");
    const auto undeclared = quantize_checkpoint(source.path(), destination(), options(QuantizeScheme::kBlockFp8));
    ASSERT_FALSE(undeclared.has_value());
    EXPECT_THAT(undeclared.error().message, HasSubstr("is FP8 already"));
    EXPECT_FALSE(fs::exists(destination()));
  }
}

TEST_F(QuantizeRefuses, ASourceThatIsNotWhole) {
  write_source();
  ASSERT_TRUE(fs::remove(made_.folder() / "model.safetensors"));
  EXPECT_THAT(refusal(options(QuantizeScheme::kBlockFp8)), HasSubstr("expected model.safetensors"));
  ASSERT_TRUE(fs::remove(made_.folder() / "config.json"));
  EXPECT_THAT(refusal(options(QuantizeScheme::kBlockFp8)), HasSubstr("config.json"));

  ASSERT_TRUE(made_.erase("layers.1.mlp.up_proj.weight"));
  write_source();
  EXPECT_THAT(refusal(options(QuantizeScheme::kBlockFp8)), HasSubstr("layers.1.mlp.up_proj.weight"));
}

TEST_F(QuantizeRefuses, StaticWithoutRanges) {
  write_source();
  EXPECT_THAT(refusal({.scheme = QuantizeScheme::kStaticFp8}), HasSubstr("needs a calibration"));
  QuantizeOptions partial = options(QuantizeScheme::kStaticFp8);
  partial.calibration->inputs.erase("layers.3.mlp.down_proj");
  EXPECT_THAT(refusal(partial), HasSubstr("layers.3.mlp.down_proj: the calibration has no range"));
}

TEST_F(QuantizeRefuses, WeightsThatAreNotNumbers) {
  made_.put("layers.1.mlp.down_proj.weight", 300, {0x80, 0x7f});
  write_source();
  const int64_t columns = made_.tensor("layers.1.mlp.down_proj.weight").shape[1];
  EXPECT_THAT(refusal(options(QuantizeScheme::kChannelFp8)),
              HasSubstr(fmt::format("layers.1.mlp.down_proj.weight: element [{}, {}]", 300 / columns, 300 % columns)));
}

TEST_F(QuantizeRefuses, ToGoOnAfterACancellation) {
  write_source();
  QuantizeOptions cancelled = options(QuantizeScheme::kBlockFp8);
  int asked = 0;
  cancelled.num_threads = 1;
  cancelled.cancelled = [&] { return ++asked > 5; };
  EXPECT_THAT(refusal(cancelled), HasSubstr("cancelled"));
  EXPECT_EQ(asked, 6);
}

TEST_F(QuantizeRefuses, ADiskThatIsTooSmallOrReadOnly) {
  const auto space = check_disk_space(folder_.path(), uint64_t{1} << 62);
  ASSERT_FALSE(space.has_value());
  EXPECT_EQ(space.error().code, ErrorCode::kResourceExhausted);
  EXPECT_OK(check_disk_space(folder_.path(), 1));
  write_source();
  const auto report = quantize_checkpoint(made_.folder(), "/proc/quern/fp8", options(QuantizeScheme::kBlockFp8));
  ASSERT_FALSE(report.has_value());
  EXPECT_THAT(report.error().message, HasSubstr("cannot make the directory"));
}

TEST_F(QuantizeRefuses, BeforeAnythingIsRead) {
  write_source();
  QuantizeOptions without = options(QuantizeScheme::kStaticFp8);
  without.calibration.reset();
  EXPECT_OK(check_quantizable(made_.folder(), destination(), without));  // ranges are found afterwards
  EXPECT_FALSE(fs::exists(destination().parent_path()));
  EXPECT_FALSE(check_quantizable(made_.folder(), made_.folder(), without).has_value());
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  TemporaryFolder folder;
  const fs::path path = folder.path() / "out.safetensors";
  const std::vector<TensorHeader> headers = {{"a \"quoted\" name", "BF16", {2, 3}, 12}, {"scalar", "F32", {}, 4}, {"none", "U8", {0}, 0}};
  const auto writer = SafetensorsWriter::create(path, headers);
  ASSERT_OK(writer);
  std::vector<std::byte> bytes(12);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i + 1);
  ASSERT_OK(writer->write(0, 6, std::span(bytes).subspan(6)));
  ASSERT_OK(writer->write(1, 0, std::span(bytes).first(4)));
  ASSERT_OK(writer->write(0, 0, std::span(bytes).first(6)));
  ASSERT_OK(writer->sync());
  const auto file = SafetensorsFile::open(path);
  ASSERT_OK(file);
  ASSERT_EQ(file->tensors().size(), 3u);
  const StoredTensor& quoted = file->tensors().at("a \"quoted\" name");
  EXPECT_EQ(quoted.shape, (Shape{2, 3}));
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), file->bytes(quoted).begin()));
  EXPECT_EQ(file->tensors().at("scalar").shape.rank(), 0);
  EXPECT_EQ(quoted.offset % 8, 0u);
}

}  // namespace
}  // namespace quern::weights
