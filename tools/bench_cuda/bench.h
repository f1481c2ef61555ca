#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "backends/cuda/stream.h"
#include "base/hash.h"
#include "base/json.h"
#include "ops/linear.h"
#include "ops/select.h"

namespace quern {

/// A GPU with tensors on it, and the time that recorded launches take.
class Bench {
 public:
  explicit Bench(std::unique_ptr<ops::Device> device) : device_(std::move(device)), stream_(device_->make_stream().value()) {}

  ops::Device& device() { return *device_; }
  cuda::Stream& stream() { return cuda::cuda_stream(*stream_); }
  ops::TensorView tensor(DType dtype, const Shape& shape) {
    buffers_.push_back(device_->allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), "bench").value());
    return {buffers_.back().get(), 0, dtype, shape};
  }
  /// Random bytes, without the NaN of e4m3 and with bf16 below 4.
  ops::TensorView random(DType dtype, const Shape& shape) {
    const ops::TensorView view = tensor(dtype, shape);
    std::vector<uint64_t> values((view.size_bytes() + 7) / 8);
    SplitMix64 bits(values.size());
    const uint64_t mask = dtype == DType::kBF16 ? 0xbfffbfffbfffbfffu : 0xbfbfbfbfbfbfbfbfu;
    for (uint64_t& value : values) value = bits.next() & mask;
    stream().copy_to_device(values.data(), view);
    CHECK(stream().finish().has_value());
    return view;
  }
  ops::TensorView ints(const Shape& shape, const std::vector<int32_t>& values) {
    const ops::TensorView view = tensor(DType::kI32, shape);
    stream().copy_to_device(values.data(), view);
    CHECK(stream().finish().has_value());
    return view;
  }
  ops::TensorView filled(const Shape& shape, float value) {
    const ops::TensorView view = tensor(DType::kF32, shape);
    const std::vector<float> values(static_cast<size_t>(shape.num_elements()), value);
    stream().copy_to_device(values.data(), view);
    CHECK(stream().finish().has_value());
    return view;
  }
  ops::LinearSource weight(int64_t out, int64_t in, ops::WeightScheme scheme) {
    ops::LinearSource source{{out, in, scheme}, random(stored_dtype(scheme), {out, in}), {}};
    if (ops::is_fp8(scheme)) source.scale = filled({(out + 127) / 128, (in + 127) / 128}, 1e-4f);
    return source;
  }
  /// Gives back all tensors.
  void release() { buffers_.clear(); }
  /// Median seconds of what `enqueue` enqueues.
  template <class Enqueue>
  double seconds(const Enqueue& enqueue) {
    stream().begin_recording();
    enqueue();
    const auto graph = stream().end_recording().value();
    auto begin = cuda::Event::create(stream().context(), true).value(), end = cuda::Event::create(stream().context(), true).value();
    std::vector<double> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      stream().record(begin);
      stream().replay(*graph);
      stream().record(end);
      const double time = stream().seconds_between(begin, end).value();
      if (i >= 2) times.push_back(time);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  static constexpr int kRepeats = 7;
  std::unique_ptr<ops::Device> device_;
  std::unique_ptr<ops::Stream> stream_;
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
};

/// attention, gdn_mix and sample of Qwen3.6-27B, decode and prompt rows, as `rules` choose their candidates; results are added to `results`.
void bench_mixers(Bench& bench, double read_limit, const ops::SelectionRules& rules, Json& results);

}  // namespace quern
