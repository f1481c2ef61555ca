#include "weights/quantize.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/float_convert.h"
#include "ops/linear.h"
#include "weights/declared.h"
#include "weights/encode_fp8.h"
#include "weights/quantize_plan.h"
#include "weights/quantized_config.h"
#include "weights/stored_values.h"

namespace quern::weights {
namespace {

namespace fs = std::filesystem;

constexpr size_t kCopyBytes = size_t{8} << 20;
constexpr uintmax_t kLargestTextFile = uintmax_t{64} << 20;  // tokenizers have 13 MB; what is larger is weights in another format

Error cancelled_error() { return make_error(ErrorCode::kCancelled, "cancelled; nothing was written"); }

// --- The folder ------------------------------------------------------------------------------------------------------------------------

/// A folder beside the destination that becomes it when it is complete, and vanishes otherwise.
class PendingFolder {
 public:
  static Result<PendingFolder> create(const fs::path& destination) {
    std::error_code error;
    const fs::path parent = destination.parent_path();
    fs::create_directories(parent, error);
    if (error) return invalid_argument("{}: cannot make the directory: {}", parent.string(), error.message());
    fs::path path = parent / fmt::format(".{}.partial-{}", destination.filename().string(), ::getpid());
    if (!fs::create_directory(path, error))
      return invalid_argument("{}: cannot make the directory: {}", path.string(), error ? error.message() : "it exists");
    return PendingFolder(std::move(path), destination);
  }
  PendingFolder(PendingFolder&& other) noexcept : path_(std::exchange(other.path_, {})), destination_(std::move(other.destination_)) {}
  PendingFolder& operator=(PendingFolder&&) = delete;
  ~PendingFolder() {
    std::error_code error;
    if (!path_.empty()) fs::remove_all(path_, error);
  }

  [[nodiscard]] const fs::path& path() const { return path_; }
  Result<void> commit() {
    std::error_code error;
    fs::rename(path_, destination_, error);  // onto nothing, or onto an empty directory
    if (error) return invalid_argument("{}: cannot be renamed to {}: {}", path_.string(), destination_.string(), error.message());
    path_.clear();
    return {};
  }

 private:
  PendingFolder(fs::path path, fs::path destination) : path_(std::move(path)), destination_(std::move(destination)) {}
  fs::path path_, destination_;
};

/// The destination as an absolute path without a slash at its end.
Result<fs::path> checked_destination(const fs::path& source, const fs::path& destination) {
  std::error_code error;
  if (destination.empty()) return invalid_argument("the destination is empty");
  fs::path absolute = fs::absolute(destination, error).lexically_normal();
  if (error) return invalid_argument("{}: {}", destination.string(), error.message());
  if (!absolute.has_filename()) absolute = absolute.parent_path();
  const fs::file_status status = fs::status(absolute, error);
  if (!fs::exists(status)) return absolute;
  if (!fs::is_directory(status)) return invalid_argument("{} exists and is not a directory", destination.string());
  if (fs::equivalent(source, absolute, error))
    return invalid_argument("{} is the source; a checkpoint cannot be quantized onto itself", destination.string());
  const bool empty = fs::is_empty(absolute, error);
  if (error) return invalid_argument("{}: {}", destination.string(), error.message());
  if (!empty) return invalid_argument("{} exists and is not empty; give a new directory", destination.string());
  return absolute;
}

/// Tokenizer, chat template, generation_config, licence: whatever is small and not replaced.
Result<void> copy_other_files(const fs::path& source, const fs::path& folder) {
  constexpr std::array kReplaced{"config.json", "hf_quant_config.json", "model.safetensors.index.json"};
  constexpr std::array kWeights{".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"};
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(source, error)) {
    const fs::path& path = entry.path();
    const std::string name = path.filename().string(), extension = path.extension().string();
    if (!entry.is_regular_file(error) || name.starts_with(".") || entry.file_size(error) > kLargestTextFile) continue;
    if (std::find(kReplaced.begin(), kReplaced.end(), name) != kReplaced.end()) continue;
    if (std::find(kWeights.begin(), kWeights.end(), extension) != kWeights.end()) continue;
    fs::copy_file(path, folder / name, error);
    if (error) return invalid_argument("{}: cannot be copied: {}", path.string(), error.message());
  }
  if (error) return invalid_argument("{}: {}", source.string(), error.message());
  return {};
}

// --- The source ------------------------------------------------------------------------------------------------------------------------

struct Source {
  Json json;
  model::ModelConfig config;
  Checkpoint checkpoint;
};

Result<std::pair<QuantizePlan, Source>> open_source(const fs::path& dir, const QuantizeOptions& options) {
  ASSIGN_OR_RETURN(Json json, read_json_file(dir / "config.json"));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::load_config(dir));
  if (!config.quantization.is_null()) {
    const auto declared = DeclaredQuantization::parse(config.quantization);
    return invalid_argument("{} is quantized already ({}); only a BF16, F16 or F32 checkpoint can be quantized", dir.string(),
                            declared ? declared->method() : "its config.json has a quantization_config");
  }
  Faults faults;
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(dir, faults));
  Source source{std::move(json), std::move(config), std::move(checkpoint)};
  ASSIGN_OR_RETURN(QuantizePlan plan, plan_quantization(source.checkpoint, source.config, options, faults));
  return std::pair(std::move(plan), std::move(source));
}

// --- The weights -----------------------------------------------------------------------------------------------------------------------

/// Quantizes one weight band by band: 128 rows as f32 are all that is in memory.
class WeightQuantizer {
 public:
  using Advance = std::function<bool(size_t bytes)>;  // false: stop
  WeightQuantizer(const QuantizeItem& item, const SafetensorsWriter& out, QuantizeScheme scheme, Advance advance)
      : item_(item), out_(out), scheme_(scheme), advance_(std::move(advance)), rows_(item.source.tensor->shape[0]), columns_(item.source.tensor->shape[1]) {}

  Result<void> run() {
    float tensor_scale = 1;
    if (scheme_ == QuantizeScheme::kStaticFp8) {
      float largest = 0;
      for (int64_t row = 0; row < rows_; row += ops::kScaleBlock) {
        RETURN_IF_ERROR(read_band(row));
        largest = std::max(largest, largest_magnitude(values_.data(), values_.size()));
      }
      tensor_scale = stored_scale(largest);
      scales_ = {to_bf16(tensor_scale)};
    }
    for (int64_t row = 0; row < rows_; row += ops::kScaleBlock) {
      RETURN_IF_ERROR(read_band(row));
      codes_.resize(values_.size());
      encode_band(tensor_scale);
      RETURN_IF_ERROR(out_.write(item_.weight, static_cast<size_t>(row * columns_), std::as_bytes(std::span(codes_))));
      if (!advance_(values_.size() * dtype_size(*item_.source.tensor->dtype))) return cancelled_error();
    }
    return out_.write(item_.weight + 1, 0, std::as_bytes(std::span(scales_)));
  }

 private:
  Result<void> read_band(int64_t row) {
    const TensorRef& ref = item_.source;
    const DType dtype = *ref.tensor->dtype;
    const auto count = static_cast<size_t>(std::min(ops::kScaleBlock, rows_ - row) * columns_);
    const auto bytes = ref.bytes().subspan(static_cast<size_t>(row * columns_) * dtype_size(dtype), count * dtype_size(dtype));
    if (const auto bad = find_non_finite(bytes, dtype)) {
      return invalid_argument("{}: element [{}, {}] is not a finite number; the file is damaged", ref.name,
                              row + static_cast<int64_t>(*bad) / columns_, static_cast<int64_t>(*bad) % columns_);
    }
    values_.resize(count);
    widen(bytes.data(), dtype, count, values_.data());
    return {};
  }

  void encode_band(float tensor_scale) {
    const auto columns = static_cast<size_t>(columns_);
    switch (scheme_) {
      case QuantizeScheme::kStaticFp8: return encode_e4m3(values_.data(), values_.size(), tensor_scale, codes_.data());
      case QuantizeScheme::kChannelFp8:
        for (size_t at = 0; at < values_.size(); at += columns) {
          const float scale = stored_scale(largest_magnitude(&values_[at], columns));
          encode_e4m3(&values_[at], columns, scale, &codes_[at]);
          scales_.push_back(to_bf16(scale));
        }
        return;
      case QuantizeScheme::kBlockFp8:
        for (size_t column = 0; column < columns; column += ops::kScaleBlock) {
          const size_t width = std::min<size_t>(ops::kScaleBlock, columns - column);
          float largest = 0;
          for (size_t at = column; at < values_.size(); at += columns) largest = std::max(largest, largest_magnitude(&values_[at], width));
          const float scale = stored_scale(largest);
          for (size_t at = column; at < values_.size(); at += columns) encode_e4m3(&values_[at], width, scale, &codes_[at]);
          scales_.push_back(to_bf16(scale));
        }
        return;
    }
    CHECK_UNREACHABLE();
  }

  const QuantizeItem& item_;
  const SafetensorsWriter& out_;
  const QuantizeScheme scheme_;
  const Advance advance_;
  const int64_t rows_, columns_;
  std::vector<float> values_;
  std::vector<uint8_t> codes_;
  std::vector<bf16> scales_;
};

Result<void> copy_tensor(const QuantizeItem& item, const SafetensorsWriter& out, const WeightQuantizer::Advance& advance) {
  const std::span<const std::byte> bytes = item.source.bytes();
  for (size_t at = 0; at < bytes.size(); at += kCopyBytes) {
    const auto chunk = bytes.subspan(at, std::min(kCopyBytes, bytes.size() - at));
    RETURN_IF_ERROR(out.write(item.weight, at, chunk));
    if (!advance(chunk.size())) return cancelled_error();
  }
  return {};
}

/// Threads take one tensor after the other; the first error stops all.
class WeightWriter {
 public:
  WeightWriter(const QuantizePlan& plan, const QuantizeOptions& options) : plan_(plan), options_(options) {}

  Result<void> write(const fs::path& folder) {
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      ASSIGN_OR_RETURN(SafetensorsWriter file, SafetensorsWriter::create(folder / file_name(i), plan_.files[i]));
      files_.push_back(std::move(file));
    }
    for (const QuantizeConstant& constant : plan_.constants) {
      const bf16 value = to_bf16(constant.value);
      RETURN_IF_ERROR(files_[constant.file].write(constant.index, 0, std::as_bytes(std::span(&value, 1))));
    }
    {
      std::vector<std::jthread> threads;
      for (int i = 1; i < options_.num_threads; ++i) threads.emplace_back([this] { work(); });
      work();
    }
    if (failed_) return *std::move(failed_);
    for (const SafetensorsWriter& file : files_) RETURN_IF_ERROR(file.sync());
    return {};
  }

  [[nodiscard]] std::string file_name(size_t i) const {
    return plan_.files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, plan_.files.size());
  }
  [[nodiscard]] Json index() const {
    std::map<std::string, std::string> weight_map;
    for (size_t i = 0; i < plan_.files.size(); ++i)
      for (const TensorHeader& tensor : plan_.files[i]) weight_map[tensor.name] = file_name(i);
    return Json{{"metadata", {{"total_size", plan_.written_bytes}}}, {"weight_map", weight_map}};
  }

 private:
  void work() {
    const auto advance = [this](size_t bytes) { return progress(bytes); };
    for (size_t i = next_++; i < plan_.items.size(); i = next_++) {
      const QuantizeItem& item = plan_.items[i];
      item.source.file->will_need(*item.source.tensor);
      const SafetensorsWriter& out = files_[item.file];
      Result<void> done = item.quantized ? WeightQuantizer(item, out, options_.scheme, advance).run() : copy_tensor(item, out, advance);
      item.source.file->done_with(*item.source.tensor);
      if (done) continue;
      const std::lock_guard lock(mutex_);
      if (!failed_) failed_ = std::move(done).error();
      next_ = plan_.items.size();
    }
  }

  bool progress(size_t bytes) {
    const std::lock_guard lock(mutex_);
    read_bytes_ += bytes;
    if (options_.progress) options_.progress(static_cast<double>(read_bytes_) / static_cast<double>(std::max<uint64_t>(plan_.source_bytes, 1)));
    return !failed_ && !(options_.cancelled && options_.cancelled());
  }

  const QuantizePlan& plan_;
  const QuantizeOptions& options_;
  std::deque<SafetensorsWriter> files_;
  std::atomic<size_t> next_ = 0;
  std::mutex mutex_;  // of what follows
  uint64_t read_bytes_ = 0;
  std::optional<Error> failed_;
};

}  // namespace

Result<uint64_t> check_quantizable(const fs::path& source, const fs::path& destination, const QuantizeOptions& options) {
  RETURN_IF_ERROR(checked_destination(source, destination));
  ASSIGN_OR_RETURN(const auto opened, open_source(source, options));
  return opened.first.source_bytes;
}

Result<QuantizeReport> quantize_checkpoint(const fs::path& source_dir, const fs::path& destination, const QuantizeOptions& options) {
  if (options.scheme == QuantizeScheme::kStaticFp8 && !options.calibration)
    return invalid_argument("static FP8 needs a calibration: the ranges of the inputs are stored beside the weights");
  ASSIGN_OR_RETURN(const fs::path target, checked_destination(source_dir, destination));
  ASSIGN_OR_RETURN(const auto opened, open_source(source_dir, options));
  const auto& [plan, source] = opened;

  ASSIGN_OR_RETURN(PendingFolder folder, PendingFolder::create(target));
  RETURN_IF_ERROR(check_disk_space(folder.path(), plan.written_bytes));
  RETURN_IF_ERROR(copy_other_files(source_dir, folder.path()));
  WeightWriter writer(plan, options);
  RETURN_IF_ERROR(writer.write(folder.path()));
  if (plan.files.size() > 1) RETURN_IF_ERROR(write_file(folder.path() / "model.safetensors.index.json", writer.index().dump(2)));
  Json config = source.json;
  config["quantization_config"] = quantization_config(options.scheme, plan.kept, options.calibration && !options.calibration->kv.empty());
  RETURN_IF_ERROR(write_file(folder.path() / "config.json", config.dump(2) + "\n"));
  RETURN_IF_ERROR(folder.commit());

  QuantizeReport report{.source_bytes = plan.source_bytes, .written_bytes = plan.written_bytes, .num_files = plan.files.size()};
  for (const QuantizeItem& item : plan.items) ++(item.quantized ? report.num_quantized : report.num_copied);
  return report;
}

}  // namespace quern::weights
