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
    bool tied = false;  // the head reads the packed table too
  };
  /// What the host knows of one run.
  struct RunInput {
    std::span<const int32_t> tokens;   // num_rows ids; empty: row 0 is last_token[slot], row i the draft i - 1
    int32_t position[3] = {0, 0, 0};   // P: the (t, h, w) of the first row, all three advance by one a row. D: ignored, index + position_delta
  };
  class Kernel : public ops::Kernel {
   public:
    /// In which order the packed table stands; a tied head must name the same.
    [[nodiscard]] virtual std::string_view table_layout() const = 0;
    /// table [vocab_size, hidden] as stored.
    virtual void pack(const LinearSource& table, Buffer& packed, Stream& stream) const = 0;
    /// Fills rows.tokens, rows.indices, rows.positions and x. `inputs` is parallel to rows.runs.
    virtual void enqueue(const Rows& rows, std::span<const RunInput> inputs, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
    /// x [n, hidden] of the ids in `tokens` i32 [n], already on the device (the MTP head's input).
    virtual void enqueue_lookup(const TensorView& tokens, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
