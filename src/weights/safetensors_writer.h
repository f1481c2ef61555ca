#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/shape.h"

namespace quern::weights {

/// What the header says of one tensor.
struct TensorHeader {
  std::string name;
  std::string dtype_text;  // safetensors' spelling
  Shape shape;
  size_t size_bytes = 0;
};

/// One safetensors file whose header is known before its bytes are. Bytes come in any order; write() may be called from several threads.
class SafetensorsWriter {
 public:
  /// Writes the header. Tensors lie in the file in the given order.
  static Result<SafetensorsWriter> create(const std::filesystem::path& path, std::span<const TensorHeader> tensors);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  /// Puts `bytes` at byte `offset` of tensor `index`.
  [[nodiscard]] Result<void> write(size_t index, size_t offset, std::span<const std::byte> bytes) const;
  /// Waits until everything is on the disk.
  [[nodiscard]] Result<void> sync() const;

 private:
  SafetensorsWriter(std::filesystem::path path, int fd) : path_(std::move(path)), fd_(fd) {}
  [[nodiscard]] Result<void> write_at(size_t position, std::span<const std::byte> bytes) const;

  std::filesystem::path path_;
  int fd_ = -1;
  struct Extent {
    size_t begin = 0, size = 0;  // bytes of the file
  };
  std::vector<Extent> extents_;
};

/// Refused where the disk of `folder` has less than `bytes` left.
Result<void> check_disk_space(const std::filesystem::path& folder, uint64_t bytes);

}  // namespace quern::weights
