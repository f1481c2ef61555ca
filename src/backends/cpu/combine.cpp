#include <algorithm>
#include <array>

#include "backends/cpu/numeric.h"
#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

constexpr int64_t kChunk = 512;  // elements at a time, in f32 on the stack

class CombineKernel final : public ops::Combine::Kernel {
 public:
  CombineKernel(const ops::Combine::Problem& problem, ThreadPool& pool) : problem_(problem), pool_(pool) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  void enqueue(std::span<const ops::TensorView> partials, const ops::TensorView& x, ops::Launch&) const override {
    CHECK(std::ssize(partials) == problem_.num_ranks);
    if (x.empty()) return;
    pool_.parallel_for(x.shape.num_elements(), std::ssize(partials) + 1, [&](int64_t begin, int64_t end, int) {
      std::array<float, kChunk> sum{}, values{};
      for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t n = std::min(kChunk, end - first);
        sum.fill(0);
        for (const ops::TensorView& partial : partials) {
          load_f32(row_address(partial, first, 1), partial.dtype, n, values.data());
          for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += values[static_cast<size_t>(i)];
        }
        round_to(x.dtype, sum.data(), n);
        load_f32(row_address(x, first, 1), x.dtype, n, values.data());
        for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] += sum[static_cast<size_t>(i)];
        store_f32(values.data(), n, x.dtype, row_address(x, first, 1));
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
