#pragma once

#include "backends/cuda/gdn_mix_args.h"
#include "backends/cuda/plain.h"

namespace quern::cuda {

/// Packing and the plain kernels of a GDN layer, shared by all its candidates. Packed, all f32: conv taps [4, channels], -exp(A_log), dt_bias, norm.
class GdnLauncher {
 public:
  static Result<GdnLauncher> create(const ops::GdnMix::Problem& problem, Device& device, ops::GdnStateLayout layout);

  [[nodiscard]] ops::GdnStateLayout state_layout() const { return layout_; }
  [[nodiscard]] size_t packed_bytes() const { return static_cast<size_t>(4 * channels_ + 2 * problem_.num_v_heads + problem_.d_v) * sizeof(float); }
  void pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, Stream& stream) const;
  /// What kernels need to know of a launch for runs of all kinds.
  [[nodiscard]] GdnArgs arguments(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state,
                                  const ops::Activation& out) const;
  /// Computes the runs of args.kinds with the plain kernels.
  void launch(Stream& stream, const GdnArgs& args) const;
  /// Of the prompt runs only what comes before the first grid point: rows, and a fold that is due.
  void launch_to_grid(Stream& stream, GdnArgs args) const;
  /// The raw columns that later steps need of the runs of args.kinds, once their rows have been computed.
  void keep_window(Stream& stream, const GdnArgs& args) const;

 private:
  GdnLauncher(const ops::GdnMix::Problem& problem, const LinearLauncher& linear, ops::GdnStateLayout layout)
      : problem_(problem), layout_(layout), linear_(linear), channels_(2 * problem.num_k_heads * problem.d_k + problem.num_v_heads * problem.d_v) {}
  struct Packed {
    float *conv, *decay, *dt_bias, *norm;
  };
  [[nodiscard]] Packed packed_in(const ops::Buffer& packed) const;
  void launch_rows(Stream& stream, const GdnArgs& args) const;

  ops::GdnMix::Problem problem_;
  ops::GdnStateLayout layout_;
  LinearLauncher linear_;
  int64_t channels_;
  Function<GdnArgs> rows_, keys_, window_;
  Function<GdnPrepareArgs> prepare_;
  std::unique_ptr<ops::Buffer> heads_;  // i32: GdnArgs::k_head [num_v_heads], then first_head [num_k_heads + 1]
};

/// How the kernels that use matrix units keep S: beside a ring of bfloat16 decode rows take its upper half as it stands.
namespace mma {
constexpr ops::GdnStateLayout gdn_state_layout(DType ring) { return ring == DType::kBF16 ? ops::GdnStateLayout::kHalves : ops::GdnStateLayout::kF32; }
}  // namespace mma

}  // namespace quern::cuda
