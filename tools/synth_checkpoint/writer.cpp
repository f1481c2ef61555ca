#include "synth_checkpoint/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace quern::tools {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

/// A file that is being written; closed when destroyed.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path)
      : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {}
  ~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] Error error() const { return invalid_argument("{}: cannot write: {}", path_.string(), std::strerror(errno)); }
  [[nodiscard]] bool write_at(const void* bytes, size_t size, size_t offset) const {
    const char* at = static_cast<const char*>(bytes);
    while (size != 0) {
      const ssize_t written = ::pwrite(fd_, at, size, static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      at += written;
      offset += static_cast<size_t>(written);
      size -= static_cast<size_t>(written);
    }
    return true;
  }

 private:
  std::filesystem::path path_;
  int fd_;
};

struct Chunk {
  const OutputFile* file;
  const PlannedTensor* tensor;
  int64_t begin, count;  // elements
  size_t offset;         // in the file
};

/// Length, JSON and padding.
std::string make_header(const PlannedFile& file) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  size_t offset = 0;
  for (const PlannedTensor& tensor : file.tensors) {
    json += fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", tensor.name, safetensors_name(tensor.dtype),
                        fmt::join(tensor.shape.extents(), ","), offset, offset + tensor.size_bytes());
    offset += tensor.size_bytes();
  }
  json += '}';
  json.resize(static_cast<size_t>(round_up(static_cast<int64_t>(json.size()), 8)), ' ');
  const uint64_t size = json.size();
  std::string header(sizeof size, '\0');
  std::memcpy(header.data(), &size, sizeof size);
  return header + json;
}

Result<void> check_space(const std::vector<PlannedFile>& files, const std::filesystem::path& folder) {
  uint64_t needed = 0;
  for (const PlannedFile& file : files)
    for (const PlannedTensor& tensor : file.tensors) needed += tensor.size_bytes();
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (error || needed <= space.available) return {};
  return make_error(ErrorCode::kResourceExhausted, "{}: the checkpoint needs {:.1f} GB, the disk has {:.1f} GB left", folder.string(),
                    static_cast<double>(needed) * 1e-9, static_cast<double>(space.available) * 1e-9);
}

}  // namespace

Result<void> write_safetensors(const std::vector<PlannedFile>& files, const std::filesystem::path& folder, int num_threads) {
  RETURN_IF_ERROR(check_space(files, folder));
  std::deque<OutputFile> outputs;
  std::vector<Chunk> chunks;
  for (const PlannedFile& file : files) {
    const OutputFile& output = outputs.emplace_back(folder / file.name);
    if (!output.is_open()) return output.error();
    const std::string header = make_header(file);
    if (!output.write_at(header.data(), header.size(), 0)) return output.error();
    size_t offset = header.size();
    for (const PlannedTensor& tensor : file.tensors) {
      const auto at_once = static_cast<int64_t>(kChunkBytes / dtype_size(tensor.dtype));
      const int64_t elements = tensor.shape.num_elements();
      for (int64_t begin = 0; begin < elements; begin += at_once) {
        chunks.push_back(
            {&output, &tensor, begin, std::min(at_once, elements - begin), offset + static_cast<size_t>(begin) * dtype_size(tensor.dtype)});
      }
      offset += tensor.size_bytes();
    }
  }

  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::optional<Error> failed;
  const auto work = [&] {
    std::vector<std::byte> buffer(kChunkBytes);
    for (size_t i = next++; i < chunks.size(); i = next++) {
      const Chunk& chunk = chunks[i];
      chunk.tensor->fill(chunk.begin, chunk.count, buffer.data());
      if (chunk.file->write_at(buffer.data(), static_cast<size_t>(chunk.count) * dtype_size(chunk.tensor->dtype), chunk.offset)) continue;
      const std::lock_guard lock(mutex);
      if (!failed) failed = chunk.file->error();
      next = chunks.size();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
    work();
  }
  if (failed) return *std::move(failed);
  return {};
}

}  // namespace quern::tools
