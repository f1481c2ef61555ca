#include "backends/cuda/device_code.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/state_copy_args.h"

namespace quern::cuda::plain {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerCopy = 32;

struct Bytes {
  const std::byte *begin, *end;
  [[nodiscard]] bool meets(const Bytes& other) const { return begin < other.end && other.begin < end; }
};

class StateCopyKernel final : public ops::StateCopy::Kernel {
 public:
  StateCopyKernel(Function<CopyArgs> copy, Function<StoreHiddenArgs> store_hidden, bool overlap)
      : copy_(copy), store_hidden_(store_hidden), overlap_(overlap) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.plain"; }

  /// Copies run side by side as long as none reads or writes what an earlier one writes, or writes what an earlier one reads.
  void enqueue(std::span<const ops::StateCopy::Copy> copies, ops::Launch& launch) const override {
    CopyArgs args{};
    std::vector<Bytes> read, written;
    const auto flush = [&] {
      cuda_stream(launch.stream).launch(copy_, {.grid = {static_cast<unsigned>(args.num_copies), kBlocksPerCopy}, .block = {kThreads}}, args);
      args.num_copies = 0;
      read.clear();
      written.clear();
    };
    for (const ops::StateCopy::Copy& copy : copies) {
      if (copy.destination.empty()) continue;
      const bool clears = copy.source.buffer == nullptr;
      CHECK(clears || copy.source.size_bytes() == copy.destination.size_bytes());
      const auto size = static_cast<int64_t>(copy.destination.size_bytes());
      auto* to = copy.destination.data<std::byte>();
      const auto* from = clears ? nullptr : copy.source.data<std::byte>();
      const Bytes target{to, to + size}, source{from, clears ? from : from + size};
      const auto meets = [](const std::vector<Bytes>& pieces, const Bytes& piece) {
        return std::any_of(pieces.begin(), pieces.end(), [&](const Bytes& other) { return piece.meets(other); });
      };
      if (args.num_copies == CopyArgs::kMaxCopies || meets(written, target) || meets(read, target) || meets(written, source)) flush();
      args.copies[args.num_copies++] = {from, to, size};
      written.push_back(target);
      if (!clears) read.push_back(source);
    }
    if (args.num_copies > 0) flush();
  }

  void store_hidden(const ops::Rows& rows, const ops::TensorView& hidden, const ops::TensorView& window,
                    const ops::TensorView& boundary_hidden, ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    const StoreHiddenArgs args{step_tables(rows),     hidden.dtype,        static_cast<int32_t>(hidden.shape[1]), static_cast<int32_t>(window.shape[1]),
                               hidden.data<void>(), window.data<void>(), boundary_hidden.data<void>()};
    const Extent3 grid{static_cast<unsigned>(args.step.num_runs), blocks_for(args.width, kThreads)};
    cuda_stream(launch.stream).launch(store_hidden_, {.grid = grid, .block = {kThreads}, .programmatic = overlap_}, args);
  }

 private:
  Function<CopyArgs> copy_;
  Function<StoreHiddenArgs> store_hidden_;
  bool overlap_;
};

}  // namespace

ops::Verdict accepts(const ops::StateCopy::Problem&, const ops::DeviceTraits& traits) { return has_device_code(traits); }

Result<std::unique_ptr<ops::StateCopy::Kernel>> make(const ops::StateCopy::Problem&, ops::Device& device) {
  ASSIGN_OR_RETURN(const auto copy, cuda_device(device).function<CopyArgs>("state_copy", "copy_pieces"));
  ASSIGN_OR_RETURN(const auto store_hidden, cuda_device(device).function<StoreHiddenArgs>("state_copy", "store_hidden"));
  return std::unique_ptr<ops::StateCopy::Kernel>(
      std::make_unique<StateCopyKernel>(copy, store_hidden, runs_code_for("90a", device.traits().architecture)));
}

}  // namespace quern::cuda::plain
