#include "backends/cuda/async.cuh"
#include "backends/cuda/numeric.cuh"
#include "backends/cuda/state_copy_args.h"

namespace quern::cuda {

namespace {

/// What one of `threads` threads has of a copy.
__device__ void copy_share(const CopyPiece& copy, int64_t thread, int64_t threads) {
  const auto source = reinterpret_cast<uint64_t>(copy.source), destination = reinterpret_cast<uint64_t>(copy.destination);
  int64_t done = 0;
  if ((source | destination) % 16 == 0) {
    const int64_t pieces = copy.size_bytes / 16;
    const auto* from = static_cast<const uint4*>(copy.source);
    auto* to = static_cast<uint4*>(copy.destination);
    for (int64_t i = thread; i < pieces; i += threads) to[i] = from == nullptr ? make_uint4(0, 0, 0, 0) : from[i];
    done = pieces * 16;
  }
  const auto* from = static_cast<const uint8_t*>(copy.source);
  auto* to = static_cast<uint8_t*>(copy.destination);
  for (int64_t i = done + thread; i < copy.size_bytes; i += threads) to[i] = from == nullptr ? uint8_t{0} : from[i];
}

}  // namespace

/// blockIdx.x: the copy; the blocks along y share it.
extern "C" __global__ void copy_pieces(const __grid_constant__ CopyArgs args) {
  copy_share(args.copies[blockIdx.x], int64_t{blockIdx.y} * blockDim.x + threadIdx.x, int64_t{gridDim.y} * blockDim.x);
}

/// From or to page-locked host memory.
extern "C" __global__ void copy_small(const __grid_constant__ CopyPiece copy) {
  copy_share(copy, int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
}

/// A thread per run and element of the hidden: the boundary first, since its row may be about to leave the window.
extern "C" __global__ void store_hidden(const __grid_constant__ StoreHiddenArgs args) {
  release_successor();
  await_predecessor();
  const RunRecord run = args.step.runs[blockIdx.x];
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x, width = args.width, length = args.window_length;
  if (run.slot < 0 || run.num_rows == 0 || i >= width) return;
  const int64_t cursor = args.step.cursor[run.slot], end = cursor + run.num_rows;
  const auto row = [&](int64_t index) { return load(args.hidden, args.activation, (run.first_row + index - cursor) * width + i); };
  const auto place = [&](int64_t index) { return (run.slot * length + index % length) * width + i; };
  const int64_t boundary = ((run.flags & kIsCommitted) != 0 ? end : cursor) / kGrid * kGrid;
  if (boundary > args.step.boundary[run.slot]) {
    const int64_t index = boundary - 1;
    store(args.boundary_hidden, args.activation, run.slot * width + i, index >= cursor ? row(index) : load(args.window, args.activation, place(index)));
  }
  for (int64_t index = end - length > cursor ? end - length : cursor; index < end; ++index) store(args.window, args.activation, place(index), row(index));
}

}  // namespace quern::cuda
