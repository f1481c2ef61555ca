#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/hash.h"
#include "ops/linear.h"

namespace quern {

/// A device with tensors on it, for programs that time kernels.
class BenchTensors {
 public:
  explicit BenchTensors(std::unique_ptr<ops::Device> device) : device_(std::move(device)), stream_(device_->make_stream().value()) {}

  ops::Device& device() { return *device_; }
  ops::Stream& stream() { return *stream_; }
  ops::TensorView tensor(DType dtype, const Shape& shape) {
    buffers_.push_back(device_->allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), "bench").value());
    return {buffers_.back().get(), 0, dtype, shape};
  }
  /// Random bytes, without the NaN of e4m3 and with bf16 below 4; the bits of `always` are set in every eight bytes.
  ops::TensorView random(DType dtype, const Shape& shape, uint64_t always = 0) {
    const ops::TensorView view = tensor(dtype, shape);
    std::vector<uint64_t> values((view.size_bytes() + 7) / 8);
    SplitMix64 bits(values.size());
    const uint64_t mask = dtype == DType::kBF16 ? 0xbfffbfffbfffbfffu : 0xbfbfbfbfbfbfbfbfu;
    for (uint64_t& value : values) value = (bits.next() & mask) | always;
    return filled_from(values.data(), view);
  }
  ops::TensorView ints(const Shape& shape, const std::vector<int32_t>& values) { return filled_from(values.data(), tensor(DType::kI32, shape)); }
  ops::TensorView filled(const Shape& shape, float value) {
    const std::vector<float> values(static_cast<size_t>(shape.num_elements()), value);
    return filled_from(values.data(), tensor(DType::kF32, shape));
  }
  /// Of e4m3 codes `always` has bits set: 0x20 in each leaves no subnormal, which weights hardly have and Intel's multipliers take hundreds of cycles for.
  ops::LinearSource weight(int64_t out, int64_t in, ops::WeightScheme scheme, uint64_t always = 0) {
    ops::LinearSource source{{out, in, scheme}, random(stored_dtype(scheme), {out, in}, always), {}};
    if (ops::is_fp8(scheme)) source.scale = filled({(out + 127) / 128, (in + 127) / 128}, 1e-4f);
    return source;
  }
  /// Gives back all tensors.
  void release() { buffers_.clear(); }

 private:
  ops::TensorView filled_from(const void* values, const ops::TensorView& view) {
    stream_->copy_to_device(values, view);
    CHECK(stream_->finish().has_value());
    return view;
  }

  std::unique_ptr<ops::Device> device_;
  std::unique_ptr<ops::Stream> stream_;
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
};

/// Of an odd number of values, the middle one; of an even number, the one above.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace quern
