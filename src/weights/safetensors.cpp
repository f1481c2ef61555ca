#include "weights/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "base/json.h"

namespace quern::weights {
namespace {

constexpr size_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kLengthBytes = 8;

/// Bytes of one element for the types of the format; 0 for unknown ones.
size_t element_size(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype.starts_with("F8_")) return 1;
  return 0;
}

/// Receives the header's JSON event by event: headers have thousands of members, and a tree would drop the second of two equal names.
/// Depth 1 holds the tensors, depth 2 the fields of one tensor, depth 3 its lists.
class HeaderReader final : public SortedJson::json_sax_t {
 public:
  HeaderReader(size_t data_begin, size_t file_size) : data_begin_(data_begin), data_size_(file_size - data_begin) {}

  [[nodiscard]] const std::string& fault() const { return fault_; }
  TensorMap take() && { return std::move(tensors_); }

  bool null() override { return scalar(); }
  bool boolean(bool /*value*/) override { return scalar(); }
  bool number_integer(number_integer_t value) override { return number(value >= 0 ? std::optional<uint64_t>(value) : std::nullopt); }
  bool number_unsigned(number_unsigned_t value) override { return number(value); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return number(std::nullopt); }
  bool binary(binary_t& /*value*/) override { return scalar(); }
  bool string(string_t& value) override {
    if (metadata_) return true;
    if (depth_ == 2 && field_ == "dtype") {
      current_.dtype_text = value;
      return true;
    }
    return scalar();
  }
  bool start_object(size_t /*elements*/) override {
    ++depth_;
    if (metadata_) return depth_ <= 2 || fail("__metadata__ is nested");
    if (depth_ > 2) return fail("unexpected object");
    if (depth_ == 2) {
      current_ = {};
      shape_.clear();
      offsets_.clear();
    }
    return true;
  }
  bool key(string_t& value) override {
    if (depth_ == 1) {
      name_ = value;
      metadata_ = value == "__metadata__";
    } else if (depth_ == 2) {
      field_ = value;
    }
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ != 1) return true;
    if (metadata_) {
      metadata_ = false;
      return true;
    }
    return finish_tensor();
  }
  bool start_array(size_t /*elements*/) override {
    ++depth_;
    if (metadata_) return fail("__metadata__ is nested");
    if (depth_ != 3 || (field_ != "shape" && field_ != "data_offsets")) return fail("unexpected list");
    list_ = field_ == "shape" ? &shape_ : &offsets_;
    list_->clear();
    return true;
  }
  bool end_array() override {
    --depth_;
    list_ = nullptr;
    return true;
  }
  bool parse_error(size_t position, const std::string& /*token*/, const SortedJson::exception& /*error*/) override {
    fault_ = fmt::format("the header is not valid JSON at byte {}", position);
    return false;
  }

 private:
  bool fail(std::string_view reason) {
    fault_ = name_.empty() ? std::string(reason) : fmt::format("{}: {}", name_, reason);
    return false;
  }
  bool scalar() {
    return metadata_ || (depth_ == 2 && field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") || fail("unexpected value");
  }
  bool number(std::optional<uint64_t> value) {
    if (list_ == nullptr) return scalar();
    if (!value) return fail("negative or fractional number in shape or data_offsets");
    if (list_->size() >= 64) return fail("endless shape or data_offsets");
    list_->push_back(*value);
    return true;
  }

  bool finish_tensor() {
    StoredTensor& t = current_;
    if (t.dtype_text.empty()) return fail("has no dtype");
    if (shape_.size() > Shape::kMaxRank) return fail("has more than five extents");
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1]) return fail("data_offsets are not [begin, end]");
    if (offsets_[1] > data_size_) {
      return fail(fmt::format("its data ends at byte {} but the file ends at byte {}; is it truncated?", offsets_[1] + data_begin_,
                              data_size_ + data_begin_));
    }
    t.dtype = dtype_from_safetensors(t.dtype_text);
    t.offset = data_begin_ + offsets_[0];
    t.size = offsets_[1] - offsets_[0];

    const size_t element = element_size(t.dtype_text);
    uint64_t bytes = element;
    std::array<int64_t, Shape::kMaxRank> extents{};
    for (size_t i = 0; i < shape_.size(); ++i) {
      if (shape_[i] > (uint64_t{1} << 40)) return fail(fmt::format("extent {} is not a sane one", shape_[i]));
      extents[i] = static_cast<int64_t>(shape_[i]);
      if (__builtin_mul_overflow(bytes, shape_[i], &bytes)) return fail("shape is too large");
    }
    t.shape = Shape(std::span<const int64_t>(extents.data(), shape_.size()));
    if (element != 0 && bytes != t.size) {
      return fail(fmt::format("{} {} needs {} bytes, the header gives it {}", t.dtype_text, t.shape.to_string(), bytes, t.size));
    }
    if (!tensors_.emplace(name_, std::move(t)).second) return fail("occurs twice in the header");
    return true;
  }

  const size_t data_begin_, data_size_;
  TensorMap tensors_;
  std::string fault_;
  int depth_ = 0;
  bool metadata_ = false;
  std::string name_, field_;
  StoredTensor current_;
  std::vector<uint64_t> shape_, offsets_;
  std::vector<uint64_t>* list_ = nullptr;
};

/// The names of two tensors that share bytes, if there are any.
std::optional<std::pair<std::string, std::string>> find_overlap(const TensorMap& tensors) {
  std::vector<const TensorMap::value_type*> by_offset;
  for (const auto& entry : tensors)
    if (entry.second.size != 0) by_offset.push_back(&entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const auto* a, const auto* b) { return a->second.offset < b->second.offset; });
  for (size_t i = 1; i < by_offset.size(); ++i) {
    const auto& [name, before] = *by_offset[i - 1];
    if (by_offset[i]->second.offset < before.offset + before.size) return std::pair(name, by_offset[i]->first);
  }
  return std::nullopt;
}

}  // namespace

Result<TensorMap> parse_safetensors_header(std::span<const std::byte> bytes, size_t file_size, std::string_view what) {
  constexpr std::string_view kLfs = "version https://git-lfs";
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with(kLfs)) return invalid_argument("{}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`", what);
  if (bytes.size() < kLengthBytes)
    return invalid_argument("{}: {} bytes are too few for a safetensors file; is the download complete?", what, file_size);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return invalid_argument("{}: a header of {} bytes is over the limit of {}; is this a safetensors file?", what, header_bytes,
                            kMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - kLengthBytes) {
    return invalid_argument("{}: the header has {} bytes but the file only {}; is the download complete?", what, header_bytes, file_size);
  }
  HeaderReader reader(kLengthBytes + header_bytes, file_size);
  const std::string_view header = text.substr(kLengthBytes, header_bytes);
  if (header.empty() || header.front() != '{') return invalid_argument("{}: the header is not a JSON object", what);
  if (!SortedJson::sax_parse(header.begin(), header.end(), &reader)) return invalid_argument("{}: {}", what, reader.fault());
  TensorMap tensors = std::move(reader).take();
  if (const auto overlap = find_overlap(tensors))
    return invalid_argument("{}: {} and {} share bytes", what, overlap->first, overlap->second);
  return tensors;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  ASSIGN_OR_RETURN(TensorMap tensors, parse_safetensors_header(file.bytes(), file.bytes().size(), path.string()));
  return SafetensorsFile(std::move(file), std::move(tensors));
}

}  // namespace quern::weights
