#include <array>

#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

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

constexpr size_t kMostRanks = 8;
constexpr int64_t kVector = 8;  // elements of an item

/// All ranks in one launch.
class Simd16Combine final : public ops::Combine::Kernel {
 public:
  Simd16Combine(const ops::Combine::Problem& problem, Function combine) : problem_(problem), combine_(combine) {}

  [[nodiscard]] std::string_view arithmetic() const override { return simd16::arithmetic_id(problem_.activation); }
  void enqueue(std::span<const ops::TensorView> partials, const ops::TensorView& x, ops::Launch& launch) const override {
    CHECK(std::ssize(partials) == problem_.num_ranks);
    if (x.empty()) return;
    std::array<Place, kMostRanks> p;
    for (size_t rank = 0; rank < partials.size(); ++rank) p[rank] = place_of(partials[rank]);
    const int64_t n = x.shape.num_elements();
    opencl_stream(launch.stream)
        .launch(combine_, {{groups_for(n / kVector, simd16::kPortableItems), 1, 1}, {simd16::kPortableItems, 1, 1}}, problem_.num_ranks, p[0], p[1], p[2], p[3], p[4], p[5], p[6],
                p[7], x, n);
  }

 private:
  ops::Combine::Problem problem_;
  Function combine_;
};

}  // namespace

ops::Verdict plain::accepts(const ops::Combine::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }
Result<std::unique_ptr<ops::Combine::Kernel>> plain::make(const ops::Combine::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const Function combine, opencl_device(device).function("combine", "combine", activation_definition(problem.activation)));
  return std::unique_ptr<ops::Combine::Kernel>(std::make_unique<CombineKernel>(problem, combine));
}

ops::Verdict simd16::accepts(const ops::Combine::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  if (problem.activation != DType::kBF16) return ops::refuse("activation dtype {} is not supported; bf16 is", dtype_name(problem.activation));
  if (problem.num_ranks > static_cast<int32_t>(kMostRanks)) return ops::refuse("{} ranks; up to {} are supported", problem.num_ranks, kMostRanks);
  if (problem.hidden % kVector != 0) return ops::refuse("rows of {}; multiples of {} are supported", problem.hidden, kVector);
  return plain::accepts(problem, traits);
}
Result<std::unique_ptr<ops::Combine::Kernel>> simd16::make(const ops::Combine::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  ASSIGN_OR_RETURN(const Function combine, d.function("combine", "combine", portable_definitions(d, problem.activation)));
  return std::unique_ptr<ops::Combine::Kernel>(std::make_unique<Simd16Combine>(problem, combine));
}

}  // namespace quern::opencl
