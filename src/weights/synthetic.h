#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace quern::weights {

/// Made-up weights of one tensor: normal or uniform, with the spread that its role has in trained models (model-spec.md 1.6), so that
/// activations stay in range through any number of layers. Every element depends only on seed, name and position: slices, dummy weights
/// and generated checkpoints of one seed agree. About 1 GB/s a core.
class SyntheticTensor {
 public:
  /// `name` is canonical, "layers.0.mlp.up_proj.weight".
  SyntheticTensor(std::string_view name, const Shape& shape, uint64_t seed);

  /// Elements [begin, begin + count) as F32, BF16 or F16.
  void fill(DType dtype, int64_t begin, int64_t count, std::byte* out) const;
  /// The same elements as e4m3 codes, to be multiplied with scale().
  void fill_codes(int64_t begin, int64_t count, std::byte* out) const;
  /// Scale `index` of a grid of scales; neighbours differ by up to a factor of 1.7, so that a wrong order shows. Exact in bf16.
  [[nodiscard]] float scale(int64_t index) const;
  [[nodiscard]] std::vector<float> scales(int64_t count) const;

  static constexpr size_t kLevels = 256;  // different values of one tensor: equally likely ones

 private:
  template <class T>
  void fill_from(const std::array<T, kLevels>& table, int64_t begin, int64_t count, std::byte* out) const;

  std::array<float, kLevels> values_{};
  float base_scale_ = 1;
  uint64_t key_ = 0, scale_key_ = 0;
};

}  // namespace quern::weights
