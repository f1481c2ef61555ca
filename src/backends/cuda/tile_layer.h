#pragma once

#include <optional>
#include <span>
#include <vector>

#include "backends/cuda/linear_sm90.h"
#include "backends/cuda/stream.h"
#include "ops/candidate.h"
#include "ops/linear.h"

namespace quern::cuda::sm90 {

/// Kernels that pack weights on the device.
struct Packers {
  Function<PackArgs> tiles;
  Function<PackScalesArgs> scales;
  Function<PackNormArgs> norm;
  static Result<Packers> load(Device& device);
  /// Factors 1 + w in f32.
  void pack_norm(Stream& stream, const ops::TensorView& weight, float* factors) const;
};

/// Linear layers over the same input, packed as the tiles of one launch; with the norm of the input and the counters of blocks that wait for each other.
class TileLayer {
 public:
  struct Spec {
    std::vector<ops::LinearShape> parts;      // one after the other; where `gate_and_up`, two that are interleaved
    bool gate_and_up = false;
    int64_t norm_width = 0;                   // 0: no norm
    std::vector<ops::LinearShape> side;       // in_proj_b and in_proj_a, or nothing
  };
  struct Sources {
    std::vector<const ops::LinearSource*> parts;
    ops::TensorView norm;
    std::vector<const ops::LinearSource*> side;
  };

  static ops::Verdict accepts(const Spec& spec, const ops::DeviceTraits& traits);
  TileLayer(Spec spec, size_t offset_bytes);

  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] bool is_e4m3() const { return ops::is_fp8(spec_.parts[0].scheme); }
  [[nodiscard]] bool has_side() const { return !spec_.side.empty(); }
  [[nodiscard]] int num_side_units() const;
  [[nodiscard]] int64_t in_features() const { return spec_.parts[0].in_features; }
  [[nodiscard]] int k_blocks() const { return static_cast<int>(in_features() / (is_e4m3() ? 128 : 64)); }
  void pack(const Sources& sources, ops::Buffer& packed, const Packers& packers, Stream& stream) const;

  /// Everything but input, outputs and epilogue; one segment a part.
  [[nodiscard]] LinearLayer linear(const ops::Buffer& packed) const;
  /// The side rows as a layer of their own, for prompt rows.
  [[nodiscard]] LinearLayer side_linear(const ops::Buffer& packed) const;
  [[nodiscard]] int32_t* arrivals(const ops::Buffer& packed) const { return reinterpret_cast<int32_t*>(packed.address() + arrivals_at_); }
  [[nodiscard]] const float* norm(const ops::Buffer& packed) const {
    return spec_.norm_width == 0 ? nullptr : reinterpret_cast<const float*>(packed.address() + norm_at_);
  }

 private:
  [[nodiscard]] int part_tiles(size_t part) const;

  Spec spec_;
  int tiles_ = 0;
  size_t weight_at_, scale_at_, row_scale_at_, side_at_, norm_at_, arrivals_at_, end_;
};

}  // namespace quern::cuda::sm90
