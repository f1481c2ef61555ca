#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

class DraftRowsKernel final : public ops::DraftRows::Kernel {
 public:
  DraftRowsKernel(const ops::DraftRows::Problem& problem, Function clear, Function first, Function next, size_t items)
      : problem_(problem), clear_(clear), first_(first), next_(next), items_(items) {}

  [[nodiscard]] std::string_view arithmetic() const override { return items_ == kItems ? "opencl.plain" : "opencl.simd16"; }

  void enqueue_first(const ops::TensorView& runs, const ops::Rows& step, const ops::SampleOutput& sampled, const ops::Rows& rows, const ops::TensorView& last_rows,
                     ops::Launch& launch) const override {
    if (step.num_rows == 0) return;
    Stream& stream = opencl_stream(launch.stream);
    stream.launch(clear_, {{groups_for(step.num_rows, items_), 1, 1}, {items_, 1, 1}}, step.num_rows, rows.tokens, rows.indices, rows.positions);
    stream.launch(first_, {{step.runs.size(), 1, 1}, {items_, 1, 1}}, static_cast<int32_t>(problem_.k_max), runs, step.run_table, sampled.tokens, sampled.num_tokens,
                  sampled.non_finite, step.tokens, step.indices, step.positions, rows.tokens, rows.indices, rows.positions, last_rows);
  }

  void enqueue_next(const ops::TensorView& runs, int32_t pass, const ops::TensorView& ids, const ops::Rows& before, const ops::TensorView& hidden, const ops::Rows& rows,
                    const ops::TensorView& hidden_out, const ops::TensorView& last_rows, const ops::TensorView& drafts, ops::Launch& launch) const override {
    if (runs.empty()) return;
    opencl_stream(launch.stream)
        .launch(next_, {{static_cast<size_t>(runs.shape[0]), 1, 1}, {items_, 1, 1}}, pass, static_cast<int32_t>(problem_.k_max), row_stride(rows.slots.drafts),
                static_cast<int32_t>(problem_.hidden), runs, ids, before.indices, before.positions, hidden, rows.tokens, rows.indices, rows.positions, hidden_out, last_rows,
                rows.slots.drafts, drafts);
  }

 private:
  ops::DraftRows::Problem problem_;
  Function clear_, first_, next_;
  size_t items_;
};

Result<std::unique_ptr<ops::DraftRows::Kernel>> make_with(const ops::DraftRows::Problem& problem, Device& device, std::string_view definitions, size_t items) {
  ASSIGN_OR_RETURN(const Function clear, device.function("draft_rows", "clear_rows", definitions));
  ASSIGN_OR_RETURN(const Function first, device.function("draft_rows", "draft_first", definitions));
  ASSIGN_OR_RETURN(const Function next, device.function("draft_rows", "draft_next", definitions));
  return std::unique_ptr<ops::DraftRows::Kernel>(std::make_unique<DraftRowsKernel>(problem, clear, first, next, items));
}

}  // namespace

ops::Verdict plain::accepts(const ops::DraftRows::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }
Result<std::unique_ptr<ops::DraftRows::Kernel>> plain::make(const ops::DraftRows::Problem& problem, ops::Device& device) {
  return make_with(problem, opencl_device(device), activation_definition(problem.activation), kItems);
}

ops::Verdict simd16::accepts(const ops::DraftRows::Problem& problem, const ops::DeviceTraits& traits) {
  const ops::Verdict verdict = accepts_device(traits);
  return verdict.accepted ? plain::accepts(problem, traits) : verdict;
}
Result<std::unique_ptr<ops::DraftRows::Kernel>> simd16::make(const ops::DraftRows::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  return make_with(problem, d, portable_definitions(d, problem.activation), kPortableItems);
}

}  // namespace quern::opencl
