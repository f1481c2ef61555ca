#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

class EmbedKernel final : public ops::Embed::Kernel {
 public:
  EmbedKernel(const ops::Embed::Problem& problem, Function resolve, Function lookup)
      : problem_(problem), table_({problem.vocab_size, problem.hidden, problem.scheme}, 0), resolve_(resolve), lookup_(lookup) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return table_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return kRowsLayout; }
  void pack(const ops::LinearSource& table, ops::Buffer& packed, ops::Stream& stream) const override { table_.pack(table, packed, opencl_stream(stream)); }

  void enqueue(const ops::Rows& rows, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    const ops::SlotTables& slots = rows.slots;
    opencl_stream(launch.stream)
        .launch(resolve_, {{groups_for(rows.num_rows, kItems), 1, 1}, {kItems, 1, 1}}, rows.num_rows, rows.run_table, rows.row_runs, rows.given_tokens, rows.run_positions,
                slots.cursor, slots.last_token, slots.position_delta, slots.drafts, row_stride(slots.drafts), rows.tokens, rows.indices, rows.positions);
    enqueue_lookup(rows.tokens.first(rows.num_rows), packed, x, launch);
  }

  void enqueue_lookup(const ops::TensorView& tokens, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (tokens.empty()) return;
    opencl_stream(launch.stream)
        .launch(lookup_, {{static_cast<size_t>(tokens.shape[0]), 1, 1}, {kItems, 1, 1}}, table_.weight_in(packed), number_of(table_.dtype()), table_.scale_in(packed),
                table_.offsets_in(packed), table_.scales(), problem_.vocab_size, problem_.first_id, problem_.end_of_ids(), static_cast<int32_t>(problem_.hidden), tokens, x);
  }

 private:
  ops::Embed::Problem problem_;
  PackedLinear table_;
  Function resolve_, lookup_;
};

/// Rows are resolved and looked up in one launch.
class Simd16Embed final : public ops::Embed::Kernel {
 public:
  Simd16Embed(const ops::Embed::Problem& problem, Function embed, Function lookup)
      : problem_(problem), table_({problem.vocab_size, problem.hidden, problem.scheme}, 0), embed_(embed), lookup_(lookup) {}

  [[nodiscard]] std::string_view arithmetic() const override { return simd16::arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return table_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return kRowsLayout; }
  void pack(const ops::LinearSource& table, ops::Buffer& packed, ops::Stream& stream) const override { table_.pack(table, packed, opencl_stream(stream)); }

  void enqueue(const ops::Rows& rows, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    const ops::SlotTables& slots = rows.slots;
    opencl_stream(launch.stream)
        .launch(embed_, {{static_cast<size_t>(rows.num_rows), 1, 1}, {simd16::kPortableItems, 1, 1}}, table_.weight_in(packed), problem_.vocab_size,
                problem_.first_id, problem_.end_of_ids(), static_cast<int32_t>(problem_.hidden), x, rows.run_table, rows.row_runs, rows.given_tokens, rows.run_positions, slots.cursor, slots.last_token,
                slots.position_delta, slots.drafts, row_stride(slots.drafts), rows.tokens, rows.indices, rows.positions);
  }
  void enqueue_lookup(const ops::TensorView& tokens, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (tokens.empty()) return;
    opencl_stream(launch.stream)
        .launch(lookup_, {{static_cast<size_t>(tokens.shape[0]), 1, 1}, {simd16::kPortableItems, 1, 1}}, table_.weight_in(packed), problem_.vocab_size,
                problem_.first_id, problem_.end_of_ids(), static_cast<int32_t>(problem_.hidden), x, tokens);
  }

 private:
  ops::Embed::Problem problem_;
  PackedLinear table_;
  Function embed_, lookup_;
};
constexpr int64_t kVector = 8;  // elements of an item

}  // namespace

ops::Verdict plain::accepts(const ops::Embed::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::Embed::Kernel>> plain::make(const ops::Embed::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  ASSIGN_OR_RETURN(const Function resolve, d.function("embed", "resolve_rows", activation_definition(problem.activation)));
  ASSIGN_OR_RETURN(const Function lookup, d.function("embed", "lookup_rows", activation_definition(problem.activation)));
  return std::unique_ptr<ops::Embed::Kernel>(std::make_unique<EmbedKernel>(problem, resolve, lookup));
}

ops::Verdict simd16::accepts(const ops::Embed::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  if (problem.scheme != ops::WeightScheme::kBF16 || problem.activation != DType::kBF16) return ops::refuse("tables and activations in bf16 are supported");
  if (problem.hidden % kVector != 0) return ops::refuse("rows of {}; multiples of {} are supported", problem.hidden, kVector);
  return plain::accepts(problem, traits);
}
Result<std::unique_ptr<ops::Embed::Kernel>> simd16::make(const ops::Embed::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  ASSIGN_OR_RETURN(const Function embed, d.function("embed", "embed_rows", portable_definitions(d, problem.activation)));
  ASSIGN_OR_RETURN(const Function lookup, d.function("embed", "lookup_rows", portable_definitions(d, problem.activation)));
  return std::unique_ptr<ops::Embed::Kernel>(std::make_unique<Simd16Embed>(problem, embed, lookup));
}

}  // namespace quern::opencl
