#include "synth_checkpoint/writer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "weights/safetensors_writer.h"

namespace quern::tools {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

struct Chunk {
  const weights::SafetensorsWriter* file;
  size_t index;  // of the tensor in its file
  const PlannedTensor* tensor;
  int64_t begin, count;  // elements
};

}  // namespace

Result<void> write_safetensors(const std::vector<PlannedFile>& files, const std::filesystem::path& folder, int num_threads, bool holes) {
  constexpr size_t kSmallestHole = 1'000'000;
  const auto is_hole = [&](const PlannedTensor& tensor) { return holes && tensor.size_bytes() > kSmallestHole; };
  uint64_t needed = 0;
  for (const PlannedFile& file : files)
    for (const PlannedTensor& tensor : file.tensors) needed += is_hole(tensor) ? 0 : tensor.size_bytes();
  RETURN_IF_ERROR(weights::check_disk_space(folder, needed));
  std::deque<weights::SafetensorsWriter> outputs;
  std::vector<Chunk> chunks;
  for (const PlannedFile& file : files) {
    std::vector<weights::TensorHeader> headers;
    for (const PlannedTensor& tensor : file.tensors)
      headers.push_back({tensor.name, std::string(safetensors_name(tensor.dtype)), tensor.shape, tensor.size_bytes()});
    ASSIGN_OR_RETURN(weights::SafetensorsWriter opened, weights::SafetensorsWriter::create(folder / file.name, headers));
    const weights::SafetensorsWriter& output = outputs.emplace_back(std::move(opened));
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const PlannedTensor& tensor = file.tensors[i];
      if (is_hole(tensor)) {  // the file is as long as it says, also where it ends in one
        const std::byte last{};
        RETURN_IF_ERROR(output.write(i, tensor.size_bytes() - 1, {&last, 1}));
        continue;
      }
      const auto at_once = static_cast<int64_t>(kChunkBytes / dtype_size(tensor.dtype));
      const int64_t elements = tensor.shape.num_elements();
      for (int64_t begin = 0; begin < elements; begin += at_once)
        chunks.push_back({&output, i, &tensor, begin, std::min(at_once, elements - begin)});
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
      const size_t element = dtype_size(chunk.tensor->dtype);
      const auto written = chunk.file->write(chunk.index, static_cast<size_t>(chunk.begin) * element,
                                             std::span<const std::byte>(buffer.data(), static_cast<size_t>(chunk.count) * element));
      if (written) continue;
      const std::lock_guard lock(mutex);
      if (!failed) failed = written.error();
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
