#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace quern {

/// The whole file as bytes. Errors: kNotFound when it does not exist, kInvalidArgument when it cannot be read.
Result<std::string> read_file(const std::filesystem::path& path);
/// Writes `bytes` to a temporary neighbour and renames it over `path`.
Result<void> write_file(const std::filesystem::path& path, std::string_view bytes);

/// A file mapped read-only. Pages are the page cache's, not ours; closing releases the mapping.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  /// Tells the kernel that [offset, offset + size) will be read soon, or will not be needed again.
  void will_need(size_t offset, size_t size) const;
  void done_with(size_t offset, size_t size) const;

 private:
  MappedFile() = default;
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace quern
