#pragma once

#include "backends/cuda/attention_args.h"
#include "backends/cuda/stream.h"
#include "ops/attn_in.h"

namespace quern::cuda {

/// What follows the projections of attn_in. Bits do not depend on the number of rows.
class Rotate {
 public:
  static Result<Rotate> create(const ops::AttnIn::Problem& problem, Device& device);
  /// The `num_rows` rows from args.first_row on. `programmatic`: see LaunchShape.
  void launch(Stream& stream, const RotateArgs& args, int64_t num_rows, bool programmatic) const;

 private:
  Function<RotateArgs> rows_, heads_256_;
  bool by_warps_ = false;
};

}  // namespace quern::cuda
