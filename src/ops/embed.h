#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Resolves the rows of a step (tokens, indices, positions) on the device and looks up their embeddings: x [rows, hidden].
struct Embed {
  static constexpr std::string_view kName = "embed";
  struct Problem {
    int64_t vocab_size = 0, hidden = 0;  // rows of this rank's table; 0: it has none, and resolves rows only
    WeightScheme scheme = WeightScheme::kBF16;
    DType activation = DType::kBF16;
    bool tied = false;      // the head reads the packed table too
    int64_t first_id = 0;   // the id of the table's row 0
    int64_t num_ids = 0;    // of all ranks together; 0: vocab_size. An id that another rank has gives a row of zeros, so that the ranks' rows add up to the embedding
    [[nodiscard]] int64_t end_of_ids() const { return num_ids == 0 ? vocab_size : num_ids; }
  };
  class Kernel : public ops::Kernel {
   public:
    /// In which order the packed table stands; a tied head must name the same.
    [[nodiscard]] virtual std::string_view table_layout() const = 0;
    /// table [vocab_size, hidden] as stored. Not called where vocab_size is 0.
    virtual void pack(const LinearSource& table, Buffer& packed, Stream& stream) const = 0;
    /// Fills rows.tokens, rows.indices, rows.positions and x from run_table, row_runs, given_tokens and run_positions.
    virtual void enqueue(const Rows& rows, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
    /// x [n, hidden] of the ids in `tokens` i32 [n], already on the device (the MTP head's input).
    virtual void enqueue_lookup(const TensorView& tokens, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
