#pragma once

#include "backends/cuda/gdn_mix_args.h"

// How kernels find S in memory: as f32, or in halves (ops::GdnStateLayout), whose upper ones are S as matrix instructions take it. Device
// code only.

namespace quern::cuda {

/// What is kept of two values whose upper halves share a word, and whose lower halves share one.
struct HalvedPair {
  uint32_t upper, lower;
};
/// The upper half: rounded to the nearest bf16. What is no number stays none, whatever its bits are.
__device__ inline uint32_t upper_half_above(uint32_t bits) {
  return min((bits & 0x7fffffffu) + 0x8000u, 0x7fffffffu) | (bits & 0x80000000u);
}
__device__ inline HalvedPair halved(float x, float y) {
  const uint32_t first = __float_as_uint(x), second = __float_as_uint(y);
  return {__byte_perm(upper_half_above(first), upper_half_above(second), 0x7632), __byte_perm(first, second, 0x5410)};
}
__device__ inline float2 joined(HalvedPair pair) {
  const auto value = [](uint32_t upper, uint32_t lower) {  // both in their words' upper half
    return __uint_as_float(upper + static_cast<uint32_t>(static_cast<int32_t>(lower) >> 16));
  };
  return {value(pair.upper << 16, pair.lower << 16), value(pair.upper & 0xffff0000u, pair.lower)};
}

/// The halves of a head's S, [d_v, d_k] each.
struct Halves {
  uint16_t *upper, *lower;
};

/// A head's S in either layout.
class StoredState {
 public:
  __device__ StoredState(const GdnArgs& g, int64_t slot, int head) : is_halved_(g.is_state_halved) {
    const int64_t size = int64_t{g.d_k} * g.d_v;
    halves_.upper = reinterpret_cast<uint16_t*>(g.state + (slot * g.num_v_heads + head) * size);
    halves_.lower = halves_.upper + size;
  }
  [[nodiscard]] __device__ float get(int at) const {
    if (!is_halved_) return as_f32()[at];
    return joined({uint32_t{halves_.upper[at]}, uint32_t{halves_.lower[at]}}).x;
  }
  __device__ void put(int at, float x) const {
    if (!is_halved_) {
      as_f32()[at] = x;
      return;
    }
    const HalvedPair pair = halved(x, 0);
    halves_.upper[at] = static_cast<uint16_t>(pair.upper);
    halves_.lower[at] = static_cast<uint16_t>(pair.lower);
  }
  /// `each` (visit) calls visit(at, first, second) for all pairs that a thread has of the elements at an even place and the next. The
  /// branch is around all accesses, so that they are under way together.
  template <class Each>
  __device__ void read_pairs(const Each& each) const {
    const auto set = [](float2 pair, float& first, float& second) {
      first = pair.x;
      second = pair.y;
    };
    if (is_halved_)
      each([&](int at, float& first, float& second) {
        set(joined({*reinterpret_cast<const uint32_t*>(halves_.upper + at), *reinterpret_cast<const uint32_t*>(halves_.lower + at)}), first,
            second);
      });
    else
      each([&](int at, float& first, float& second) { set(*reinterpret_cast<const float2*>(as_f32() + at), first, second); });
  }
  template <class Each>
  __device__ void write_pairs(const Each& each) const {
    if (is_halved_)
      each([&](int at, float first, float second) {
        const HalvedPair pair = halved(first, second);
        *reinterpret_cast<uint32_t*>(halves_.upper + at) = pair.upper;
        *reinterpret_cast<uint32_t*>(halves_.lower + at) = pair.lower;
      });
    else
      each([&](int at, float first, float second) { *reinterpret_cast<float2*>(as_f32() + at) = {first, second}; });
  }

 private:
  [[nodiscard]] __device__ float* as_f32() const { return reinterpret_cast<float*>(halves_.upper); }
  Halves halves_;
  bool is_halved_;
};

}  // namespace quern::cuda
