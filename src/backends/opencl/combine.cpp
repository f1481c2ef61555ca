#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

class CombineKernel final : public ops::Combine::Kernel {
 public:
  CombineKernel(const ops::Combine::Problem& problem, Function combine) : problem_(problem), combine_(combine) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return Scratch::size(static_cast<size_t>(max_rows * problem_.hidden) * sizeof(float)); }
  void enqueue(std::span<const ops::TensorView> partials, const ops::TensorView& x, ops::Launch& launch) const override {
    CHECK(std::ssize(partials) == problem_.num_ranks);
    if (x.empty()) return;
    const int64_t n = x.shape.num_elements();
    const Place sum = Scratch(launch.workspace).take(static_cast<size_t>(n) * sizeof(float));
    for (size_t rank = 0; rank < partials.size(); ++rank)
      opencl_stream(launch.stream)
          .launch(combine_, {{groups_for(n, kItems), 1, 1}, {kItems, 1, 1}}, partials[rank], sum, x, rank == 0 ? 1 : 0, rank + 1 == partials.size() ? 1 : 0, n);
  }

 private:
  ops::Combine::Problem problem_;
  Function combine_;
};

}  // namespace

ops::Verdict accepts(const ops::Combine::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::Combine::Kernel>> make(const ops::Combine::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const Function combine, opencl_device(device).function("combine", "combine", activation_definition(problem.activation)));
  return std::unique_ptr<ops::Combine::Kernel>(std::make_unique<CombineKernel>(problem, combine));
}

}  // namespace quern::opencl::plain
