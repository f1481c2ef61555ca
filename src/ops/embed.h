#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Resolves the rows of a step (tokens, indices, positions) on the device and looks up their embeddings: x [rows, hidden].
struct Embed {
  static constexpr std::string_view kName = "embed";
  struct Problem {
    int64_t vocab_size = 0, hidden = 0;
    WeightScheme scheme = WeightScheme::kBF16;
    DType activation = DType::kBF16;
  };
  /// What the host knows of one run.
  struct RunInput {
    std::span<const int32_t> tokens;   // num_rows ids; empty: row 0 is last_token[slot], row i the draft i - 1
    int32_t position[3] = {0, 0, 0};   // P: the (t, h, w) of the first row, all three advance by one a row. D: ignored, index + position_delta
  };
  class Kernel : public ops::Kernel {
   public:
    /// table [vocab_size, hidden] as stored. The packing is the stored row-major table, followed at the next multiple of 256 bytes by the
    /// f32 scales: a tied head reads the same buffer.
    virtual void pack(const LinearSource& table, Buffer& packed, Stream& stream) const = 0;
    /// Fills rows.tokens, rows.indices, rows.positions and x. `inputs` is parallel to rows.runs.
    virtual void enqueue(const Rows& rows, std::span<const RunInput> inputs, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
    /// x [n, hidden] of the ids in `tokens` i32 [n], already on the device (the MTP head's input).
    virtual void enqueue_lookup(const TensorView& tokens, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
