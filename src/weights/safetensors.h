#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/file.h"
#include "base/result.h"
#include "base/shape.h"

namespace quern::weights {

/// One entry of a safetensors header.
struct StoredTensor {
  std::string dtype_text;      // as the file spells it: "BF16", "F8_E4M3", "I8", ...
  std::optional<DType> dtype;  // empty: a type that we have no use for
  Shape shape;
  size_t offset = 0, size = 0;  // bytes, from the start of the file
};

using TensorMap = std::map<std::string, StoredTensor, std::less<>>;

/// Reads the header of a safetensors file of `file_size` bytes that starts with `bytes`. Refused, naming the tensor: headers that are
/// longer than the file or 100 MB, names that occur twice, data outside the file, data that overlaps, sizes that are not shape times dtype,
/// more than five extents. `what` names the file in errors.
Result<TensorMap> parse_safetensors_header(std::span<const std::byte> bytes, size_t file_size, std::string_view what);

/// A safetensors file, mapped. Immutable, so that several threads may read it.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::filesystem::path& path);

  [[nodiscard]] const TensorMap& tensors() const { return tensors_; }
  [[nodiscard]] const std::filesystem::path& path() const { return file_.path(); }
  [[nodiscard]] std::span<const std::byte> bytes(const StoredTensor& tensor) const {
    return file_.bytes().subspan(tensor.offset, tensor.size);
  }
  void will_need(const StoredTensor& tensor) const { file_.will_need(tensor.offset, tensor.size); }
  void done_with(const StoredTensor& tensor) const { file_.done_with(tensor.offset, tensor.size); }

 private:
  SafetensorsFile(MappedFile file, TensorMap tensors) : file_(std::move(file)), tensors_(std::move(tensors)) {}
  MappedFile file_;
  TensorMap tensors_;
};

}  // namespace quern::weights
