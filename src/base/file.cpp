#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

namespace quern {
namespace {

Error file_error(const std::filesystem::path& path, int error_number) {
  const ErrorCode code = error_number == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInvalidArgument;
  return make_error(code, "{}: {}", path.string(), std::strerror(error_number));
}

/// Whole pages inside [offset, offset + size).
std::pair<size_t, size_t> page_range(size_t offset, size_t size) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = (offset + page - 1) / page * page, end = (offset + size) / page * page;
  return {begin, end > begin ? end - begin : 0};
}

}  // namespace

Result<std::string> read_file(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return file_error(path, errno);
  std::string text;
  char buffer[1 << 16];
  ssize_t n = 0;
  while ((n = ::read(fd, buffer, sizeof buffer)) > 0) text.append(buffer, static_cast<size_t>(n));
  const int error_number = errno;
  ::close(fd);
  if (n < 0) return file_error(path, error_number);
  return text;
}

Result<void> write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::path temporary = path;
  temporary += ".partial";
  {
    std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
    if (!out) return file_error(temporary, errno);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.close();
    if (!out) return file_error(temporary, errno != 0 ? errno : EIO);
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) return invalid_argument("{}: {}", path.string(), error.message());
  return {};
}

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return file_error(path, errno);
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return invalid_argument("{}: not a regular file", path.string());
  }
  MappedFile file;
  file.path_ = path;
  file.size_ = static_cast<size_t>(info.st_size);
  if (file.size_ != 0) {
    void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int error_number = errno;
      ::close(fd);
      return file_error(path, error_number);
    }
    file.data_ = static_cast<const std::byte*>(data);
  }
  ::close(fd);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::will_need(size_t offset, size_t size) const {
  const auto [begin, length] = page_range(offset, size);
  if (length != 0) ::madvise(const_cast<std::byte*>(data_) + begin, length, MADV_WILLNEED);
}

void MappedFile::done_with(size_t offset, size_t size) const {
  const auto [begin, length] = page_range(offset, size);
  if (length != 0) ::madvise(const_cast<std::byte*>(data_) + begin, length, MADV_DONTNEED);
}

}  // namespace quern
