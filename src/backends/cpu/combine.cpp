#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

class CombineKernel final : public ops::Combine::Kernel {
 public:
  CombineKernel(const ops::Combine::Problem& problem, ThreadPool& pool) : problem_(problem), pool_(pool) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  void enqueue(std::span<const ops::TensorView> partials, const ops::TensorView& x, ops::Launch&) const override {
    CHECK(std::ssize(partials) == problem_.num_ranks);
    if (x.empty()) return;
    pool_.parallel_for(x.shape.num_elements(), 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        float sum = 0, value = 0;
        for (const ops::TensorView& partial : partials) {
          load_f32(row_address(partial, i, 1), partial.dtype, 1, &value);
          sum += value;
        }
        load_f32(row_address(x, i, 1), x.dtype, 1, &value);
        value += round_to(x.dtype, sum);
        store_f32(&value, 1, x.dtype, row_address(x, i, 1));
      }
    });
  }

 private:
  ops::Combine::Problem problem_;
  ThreadPool& pool_;
};

}  // namespace

ops::Verdict accepts(const ops::Combine::Problem& problem, const ops::DeviceTraits&) { return accepts_activation(problem.activation); }

Result<std::unique_ptr<ops::Combine::Kernel>> make(const ops::Combine::Problem& problem, ops::Device& device) {
  return std::unique_ptr<ops::Combine::Kernel>(std::make_unique<CombineKernel>(problem, pool_of(device)));
}

}  // namespace quern::cpu::plain
