#include "backends/cuda/rotate.h"

#include "backends/cuda/plain.h"

namespace quern::cuda {

Result<Rotate> Rotate::create(const ops::AttnIn::Problem& problem, Device& device) {
  CHECK(2 * std::ssize(problem.inv_freq) <= problem.head_dim);
  Rotate rotate;
  rotate.problem_ = problem;
  for (size_t i = 0; i < problem.inv_freq.size(); ++i) {  // interleaved mrope
    const size_t candidate = i % 3;
    rotate.axis_.push_back(candidate > 0 && static_cast<int64_t>(i) < 3 * int64_t{problem.mrope_section[candidate]} ? static_cast<int32_t>(candidate) : 0);
  }
  rotate.by_warps_ = problem.activation == DType::kBF16 && problem.head_dim == 256 && std::ssize(problem.inv_freq) % 8 == 0;
  ASSIGN_OR_RETURN(rotate.rows_, device.function<RotateArgs>("attention", "rotate_rows"));
  ASSIGN_OR_RETURN(rotate.heads_256_, device.function<RotateArgs>("attention", "rotate_heads_256"));
  return rotate;
}

Rotate::Tables Rotate::tables_at(const ops::Buffer& packed, size_t offset) const {
  auto* q_norm = reinterpret_cast<float*>(packed.address() + offset);
  float *k_norm = q_norm + problem_.head_dim, *inv_freq = k_norm + problem_.head_dim;
  return {q_norm, k_norm, inv_freq, reinterpret_cast<int32_t*>(inv_freq + num_frequencies())};
}

void Rotate::pack(ops::Buffer& packed, size_t offset, ops::Stream& stream) const {
  if (axis_.empty()) return;
  const Tables tables = tables_at(packed, offset);
  const auto place = [&](const void* at, DType dtype) {
    return ops::TensorView{&packed, static_cast<size_t>(static_cast<const std::byte*>(at) - packed.address()), dtype, Shape{num_frequencies()}};
  };
  stream.copy_to_device(problem_.inv_freq.data(), place(tables.inv_freq, DType::kF32));
  stream.copy_to_device(axis_.data(), place(tables.axis, DType::kI32));
}

RotateArgs Rotate::arguments(const ops::Rows& rows, const Tables& tables, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv) const {
  RotateArgs args{};
  args.step = plain::step_tables(rows);
  args.num_q_heads = static_cast<int32_t>(problem_.num_q_heads);
  args.num_kv_heads = static_cast<int32_t>(problem_.num_kv_heads);
  args.head_dim = static_cast<int32_t>(problem_.head_dim);
  args.num_frequencies = static_cast<int32_t>(num_frequencies());
  args.activation = problem_.activation;
  args.eps = problem_.eps;
  args.rope_scale = problem_.rope_scale;
  args.q_norm = tables.q_norm;
  args.k_norm = tables.k_norm;
  args.inv_freq = tables.inv_freq;
  args.axis = tables.axis;
  args.query = plain::address_or_null<void>(query);
  args.gate = plain::address_or_null<void>(gate);
  args.kv = plain::kv_cache(kv);
  return args;
}

void Rotate::launch(Stream& stream, const RotateArgs& args, int64_t num_rows, bool programmatic) const {
  constexpr int64_t kFewRows = 8;  // for which a warp would take longer for a head than a block does
  const bool by_warps = by_warps_ && num_rows >= kFewRows;
  const auto blocks = plain::blocks_for(int64_t{args.num_q_heads} + args.num_kv_heads, by_warps ? kRotatedHeads : 1);
  stream.launch(by_warps ? heads_256_ : rows_, {.grid = {static_cast<unsigned>(num_rows), blocks}, .block = {by_warps ? kRotatedHeads * 32U : 256U}, .programmatic = programmatic}, args);
}

}  // namespace quern::cuda
