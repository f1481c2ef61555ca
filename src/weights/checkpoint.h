#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/faults.h"
#include "base/result.h"
#include "weights/safetensors.h"

namespace quern::weights {

/// A tensor where it lies. Valid as long as its Checkpoint.
struct TensorRef {
  const SafetensorsFile* file = nullptr;
  const StoredTensor* tensor = nullptr;
  std::string_view name;  // as stored

  explicit operator bool() const { return tensor != nullptr; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return file->bytes(*tensor); }
};

/// The safetensors files of a model directory, as its index names them, opened and mapped.
class Checkpoint {
 public:
  /// An error when DIR holds no checkpoint at all. Whatever else is wrong (shards that are missing, truncated or lie; names that leave the
  /// directory; tensors that the index names and no shard has) becomes a fault, and the rest is opened all the same.
  static Result<Checkpoint> open(const std::filesystem::path& dir, Faults& faults);

  [[nodiscard]] const std::map<std::string_view, TensorRef>& tensors() const { return tensors_; }
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

 private:
  void open_file(const std::filesystem::path& path, bool is_extra, Faults& faults);
  void follow_index(const std::filesystem::path& index, Faults& faults);
  void add_mtp_beside(const std::filesystem::path& dir, Faults& faults);

  std::deque<SafetensorsFile> files_;  // addresses stay
  std::map<std::string_view, TensorRef> tensors_;
  std::vector<std::string> notes_;
};

}  // namespace quern::weights
