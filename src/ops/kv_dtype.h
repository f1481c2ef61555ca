#pragma once

#include "ops/candidate.h"

namespace quern::ops {

/// What `attn_in` writes and `attention` reads: KV in the dtype of the activations, or in e4m3. All platforms' kernels agree on it.
inline Verdict accepts_kv(DType kv, DType activation) {
  if (kv == activation || kv == DType::kE4M3) return accept();
  return refuse("KV dtype {} with {} activations is not supported; {} and e4m3 are", dtype_name(kv), dtype_name(activation), dtype_name(activation));
}

}  // namespace quern::ops
