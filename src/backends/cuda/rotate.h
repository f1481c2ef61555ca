#pragma once

#include <vector>

#include "backends/cuda/attention_args.h"
#include "backends/cuda/stream.h"
#include "ops/attn_in.h"

namespace quern::cuda {

/// What follows the projections of attn_in. Bits do not depend on the number of rows.
class Rotate {
 public:
  /// In packed memory, one after the other: factors 1 + w of q_norm and k_norm, f32 [head_dim] each; the frequencies, f32, and which of the positions (t, h, w) each turns with.
  struct Tables {
    float *q_norm, *k_norm, *inv_freq;
    int32_t* axis;
  };

  static Result<Rotate> create(const ops::AttnIn::Problem& problem, Device& device);

  [[nodiscard]] size_t table_bytes() const { return static_cast<size_t>(2 * problem_.head_dim + 2 * num_frequencies()) * sizeof(float); }
  [[nodiscard]] Tables tables_at(const ops::Buffer& packed, size_t offset) const;
  /// Fills the tables at `offset`, but for the factors.
  void pack(ops::Buffer& packed, size_t offset, ops::Stream& stream) const;
  /// Of a step's rows; the caller adds the projected ones: first_row, q, k and v.
  [[nodiscard]] RotateArgs arguments(const ops::Rows& rows, const Tables& tables, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv) const;
  /// The `num_rows` rows from args.first_row on. `programmatic`: see LaunchShape.
  void launch(Stream& stream, const RotateArgs& args, int64_t num_rows, bool programmatic) const;

 private:
  [[nodiscard]] int64_t num_frequencies() const { return std::ssize(problem_.inv_freq); }

  ops::AttnIn::Problem problem_;
  std::vector<int32_t> axis_;
  Function<RotateArgs> rows_, heads_256_;
  bool by_warps_ = false;
};

}  // namespace quern::cuda
