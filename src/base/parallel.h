#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace quern {

/// Threads that read and move large pieces of host memory while weights are loaded: more do not read faster.
inline int64_t num_loading_threads() { return std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 8); }

/// work(begin, end, thread) for pieces that cover [0, n) once; as many threads as there are pieces of `grain`, at most num_loading_threads(), the caller's among them. Threads are made for the
/// call: a piece should take a good part of a millisecond.
template <class Work>
void parallel_pieces(int64_t n, int64_t grain, const Work& work) {
  if (n <= 0) return;
  const int64_t threads = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, num_loading_threads());
  const auto piece = [&](int64_t t) { work(n * t / threads, n * (t + 1) / threads, t); };
  std::vector<std::jthread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(piece, t);
  piece(0);
}

}  // namespace quern
