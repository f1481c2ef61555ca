#include "backends/cuda/combine_args.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

constexpr unsigned kThreads = 256;

class CombineKernel final : public ops::Combine::Kernel {
 public:
  CombineKernel(const ops::Combine::Problem& problem, Function<CombineArgs> combine) : problem_(problem), combine_(combine) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  void enqueue(std::span<const ops::TensorView> partials, const ops::TensorView& x, ops::Launch& launch) const override {
    CHECK(std::ssize(partials) == problem_.num_ranks);
    if (x.empty()) return;
    CombineArgs args{};
    for (size_t rank = 0; rank < partials.size(); ++rank) args.partials[rank] = partials[rank].data<void>();
    args.num_ranks = problem_.num_ranks;
    args.dtype = x.dtype;
    args.x = x.data<void>();
    args.num_elements = x.shape.num_elements();
    cuda_stream(launch.stream).launch(combine_, {.grid = {blocks_for(args.num_elements, kThreads)}, .block = {kThreads}}, args);
  }

 private:
  ops::Combine::Problem problem_;
  Function<CombineArgs> combine_;
};

}  // namespace

ops::Verdict accepts(const ops::Combine::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.num_ranks > CombineArgs::kMaxRanks) return ops::refuse("{} ranks; up to {} are supported", problem.num_ranks, CombineArgs::kMaxRanks);
  return accepts_activation(traits, problem.activation);
}

Result<std::unique_ptr<ops::Combine::Kernel>> make(const ops::Combine::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const auto combine, cuda_device(device).function<CombineArgs>("combine", "combine"));
  return std::unique_ptr<ops::Combine::Kernel>(std::make_unique<CombineKernel>(problem, combine));
}

}  // namespace quern::cuda::plain
