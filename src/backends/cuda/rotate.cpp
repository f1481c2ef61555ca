#include "backends/cuda/rotate.h"

#include "backends/cuda/plain.h"

namespace quern::cuda {

Result<Rotate> Rotate::create(const ops::AttnIn::Problem& problem, Device& device) {
  Rotate rotate;
  rotate.by_warps_ = problem.activation == DType::kBF16 && problem.head_dim == 256 && std::ssize(problem.inv_freq) % 8 == 0;
  ASSIGN_OR_RETURN(rotate.rows_, device.function<RotateArgs>("attention", "rotate_rows"));
  ASSIGN_OR_RETURN(rotate.heads_256_, device.function<RotateArgs>("attention", "rotate_heads_256"));
  return rotate;
}

void Rotate::launch(Stream& stream, const RotateArgs& args, int64_t num_rows, bool programmatic) const {
  constexpr int64_t kFewRows = 8;  // for which a warp would take longer for a head than a block does
  const bool by_warps = by_warps_ && num_rows >= kFewRows;
  const auto blocks = plain::blocks_for(int64_t{args.num_q_heads} + args.num_kv_heads, by_warps ? kRotatedHeads : 1);
  stream.launch(by_warps ? heads_256_ : rows_, {.grid = {static_cast<unsigned>(num_rows), blocks}, .block = {by_warps ? kRotatedHeads * 32U : 256U}, .programmatic = programmatic}, args);
}

}  // namespace quern::cuda
