#include "backends/cuda/device_code.h"
#include "backends/cuda/draft_rows_args.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

static_assert(sizeof(DraftRecord) == sizeof(ops::DraftRun));

class DraftRowsKernel final : public ops::DraftRows::Kernel {
 public:
  DraftRowsKernel(const ops::DraftRows::Problem& problem, Function<DraftFirstArgs> first, Function<DraftNextArgs> next, bool overlap)
      : problem_(problem), first_(first), next_(next), overlap_(overlap) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "cuda.plain"; }

  void enqueue_first(const ops::TensorView& runs, const ops::Rows& step, const ops::SampleOutput& sampled, const ops::Rows& rows,
                     const ops::TensorView& last_rows, ops::Launch& launch) const override {
    if (step.num_rows == 0) return;
    DraftFirstArgs args{};
    args.step = step_tables(step);
    args.k_max = static_cast<int32_t>(problem_.k_max);
    args.drafts = runs.data<const DraftRecord>();
    args.sampled = sampled.tokens.data<int32_t>();
    args.num_sampled = sampled.num_tokens.data<int32_t>();
    args.non_finite = sampled.non_finite.data<int32_t>();
    args.tokens = rows.tokens.data<int32_t>();
    args.indices = rows.indices.data<int32_t>();
    args.positions = rows.positions.data<int32_t>();
    args.last_rows = last_rows.data<int32_t>();
    cuda_stream(launch.stream).launch(first_, {.block = {1024}, .programmatic = overlap_}, args);
  }

  void enqueue_next(const ops::TensorView& runs, int32_t pass, const ops::TensorView& ids, const ops::Rows& before, const ops::TensorView& hidden,
                    const ops::Rows& rows, const ops::TensorView& hidden_out, const ops::TensorView& last_rows, const ops::TensorView& drafts,
                    ops::Launch& launch) const override {
    if (runs.empty()) return;
    DraftNextArgs args{};
    args.num_runs = static_cast<int32_t>(runs.shape[0]);
    args.pass = pass;
    args.k_max = static_cast<int32_t>(problem_.k_max);
    args.drafts_stride = static_cast<int32_t>(rows.slots.drafts.shape[1]);
    args.width = static_cast<int32_t>(problem_.hidden);
    args.activation = problem_.activation;
    args.drafts = runs.data<const DraftRecord>();
    args.ids = ids.data<int32_t>();
    args.before_indices = before.indices.data<int32_t>();
    args.before_positions = before.positions.data<int32_t>();
    args.hidden = hidden.data<void>();
    args.tokens = rows.tokens.data<int32_t>();
    args.indices = rows.indices.data<int32_t>();
    args.positions = rows.positions.data<int32_t>();
    args.hidden_out = hidden_out.data<void>();
    args.last_rows = last_rows.data<int32_t>();
    args.slot_drafts = rows.slots.drafts.data<int32_t>();
    args.proposed = drafts.data<int32_t>();
    cuda_stream(launch.stream)
        .launch(next_, {.grid = {static_cast<unsigned>(args.num_runs)}, .block = {1024}, .programmatic = overlap_}, args);
  }

 private:
  ops::DraftRows::Problem problem_;
  Function<DraftFirstArgs> first_;
  Function<DraftNextArgs> next_;
  bool overlap_;
};

}  // namespace

ops::Verdict accepts(const ops::DraftRows::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::DraftRows::Kernel>> make(const ops::DraftRows::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const auto first, cuda_device(device).function<DraftFirstArgs>("draft_rows", "draft_first"));
  ASSIGN_OR_RETURN(const auto next, cuda_device(device).function<DraftNextArgs>("draft_rows", "draft_next"));
  return std::unique_ptr<ops::DraftRows::Kernel>(
      std::make_unique<DraftRowsKernel>(problem, first, next, runs_code_for("90a", device.traits().architecture)));
}

}  // namespace quern::cuda::plain
