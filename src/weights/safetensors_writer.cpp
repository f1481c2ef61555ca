#include "weights/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/json.h"

namespace quern::weights {
namespace {

constexpr int64_t kAlignment = 8;  // of the first tensor

Error write_error(const std::filesystem::path& path, int error_number) {
  const ErrorCode code = error_number == ENOSPC || error_number == EDQUOT ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument;
  return make_error(code, "{}: cannot write: {}", path.string(), std::strerror(error_number));
}

/// Length, JSON and padding.
std::string make_header(std::span<const TensorHeader> tensors) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  size_t offset = 0;
  for (const TensorHeader& tensor : tensors) {
    json += fmt::format(R"(,{}:{{"dtype":{},"shape":[{}],"data_offsets":[{},{}]}})", dump_json(tensor.name), dump_json(tensor.dtype_text),
                        fmt::join(tensor.shape.extents(), ","), offset, offset + tensor.size_bytes);
    offset += tensor.size_bytes;
  }
  json += '}';
  json.resize(static_cast<size_t>(round_up(static_cast<int64_t>(json.size()), kAlignment)), ' ');
  const uint64_t size = json.size();
  std::string header(sizeof size, '\0');
  std::memcpy(header.data(), &size, sizeof size);
  return header + json;
}

}  // namespace

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& path, std::span<const TensorHeader> tensors) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return write_error(path, errno);
  SafetensorsWriter writer(path, fd);
  const std::string header = make_header(tensors);
  size_t position = header.size();
  for (const TensorHeader& tensor : tensors) {
    writer.extents_.push_back({position, tensor.size_bytes});
    position += tensor.size_bytes;
  }
  RETURN_IF_ERROR(writer.write_at(0, std::as_bytes(std::span(header))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), extents_(std::move(other.extents_)) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

Result<void> SafetensorsWriter::write(size_t index, size_t offset, std::span<const std::byte> bytes) const {
  const Extent& extent = extents_.at(index);
  CHECK(offset + bytes.size() <= extent.size);
  return write_at(extent.begin + offset, bytes);
}

Result<void> SafetensorsWriter::sync() const {
  if (::fsync(fd_) != 0) return write_error(path_, errno);
  return {};
}

Result<void> SafetensorsWriter::write_at(size_t position, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(position));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return write_error(path_, written < 0 ? errno : EIO);
    position += static_cast<size_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return {};
}

Result<void> check_disk_space(const std::filesystem::path& folder, uint64_t bytes) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (error || bytes <= space.available) return {};
  return make_error(ErrorCode::kResourceExhausted, "{}: the checkpoint needs {:.1f} GB, the disk has {:.1f} GB left", folder.string(),
                    static_cast<double>(bytes) * 1e-9, static_cast<double>(space.available) * 1e-9);
}

}  // namespace quern::weights
