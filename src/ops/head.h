#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Final norm and lm_head. Logits stay on the device, in f32.
struct Head {
  static constexpr std::string_view kName = "head";
  struct Problem {
    int64_t hidden = 0, vocab_size = 0;
    LinearShape lm_head;   // [vocab_size, hidden]
    bool tied = false;     // the packed buffer is Embed's; pack is not called
    float eps = 1e-6f;
    DType activation = DType::kBF16;
  };
  class Kernel : public ops::Kernel {
   public:
    /// The order of a tied table that it reads: Embed::Kernel::table_layout().
    [[nodiscard]] virtual std::string_view table_layout() const = 0;
    virtual void pack(const LinearSource& lm_head, Buffer& packed, Stream& stream) const = 0;
    /// hidden [rows, hidden] = RMSNorm1p(x, norm); x [rows, hidden] in the activation dtype, norm f32 [hidden] zero-centred.
    /// logits [n, vocab_size] f32 of the rows named in `logit_rows` i32 [n], with one arithmetic for rows of both kinds; where that is -1, they mean nothing.
    virtual void enqueue(const Rows& rows, const TensorView& x, const TensorView& norm, const TensorView& logit_rows, const Buffer& packed,
                         const TensorView& hidden, const TensorView& logits, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
