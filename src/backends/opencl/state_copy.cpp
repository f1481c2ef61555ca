#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

class StateCopyKernel final : public ops::StateCopy::Kernel {
 public:
  StateCopyKernel(Function store_bf16, Function store_f32, size_t items) : store_bf16_(store_bf16), store_f32_(store_f32), items_(items) {}

  [[nodiscard]] std::string_view arithmetic() const override { return items_ == kItems ? "opencl.plain" : "opencl.simd16"; }

  void enqueue(std::span<const ops::StateCopy::Copy> copies, ops::Launch& launch) const override {
    for (const ops::StateCopy::Copy& copy : copies) {
      if (copy.destination.empty()) continue;
      if (copy.source.buffer == nullptr)
        launch.stream.fill_zero(copy.destination);
      else
        launch.stream.copy(copy.source, copy.destination);
    }
  }

  void store_hidden(const ops::Rows& rows, const ops::TensorView& hidden, const ops::TensorView& window, const ops::TensorView& boundary_hidden,
                    ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    const int64_t width = hidden.shape[1];
    opencl_stream(launch.stream)
        .launch(hidden.dtype == DType::kF32 ? store_f32_ : store_bf16_, {{groups_for(width, items_), rows.runs.size(), 1}, {items_, 1, 1}}, rows.run_table, rows.slots.cursor,
                rows.slots.boundary, static_cast<int32_t>(width), static_cast<int32_t>(window.shape[1]), hidden, window, boundary_hidden);
  }

 private:
  Function store_bf16_, store_f32_;
  size_t items_;
};

Result<std::unique_ptr<ops::StateCopy::Kernel>> make_with(Device& device, std::string_view bf16_definitions, std::string_view f32_definitions, size_t items) {
  ASSIGN_OR_RETURN(const Function bf16, device.function("state_copy", "store_hidden", bf16_definitions));
  ASSIGN_OR_RETURN(const Function f32, device.function("state_copy", "store_hidden", f32_definitions));
  return std::unique_ptr<ops::StateCopy::Kernel>(std::make_unique<StateCopyKernel>(bf16, f32, items));
}

}  // namespace

ops::Verdict plain::accepts(const ops::StateCopy::Problem&, const ops::DeviceTraits& traits) { return has_device_code(traits); }
Result<std::unique_ptr<ops::StateCopy::Kernel>> plain::make(const ops::StateCopy::Problem&, ops::Device& device) {
  return make_with(opencl_device(device), activation_definition(DType::kBF16), activation_definition(DType::kF32), kItems);
}

ops::Verdict simd16::accepts(const ops::StateCopy::Problem& problem, const ops::DeviceTraits& traits) {
  const ops::Verdict verdict = accepts_device(traits);
  return verdict.accepted ? plain::accepts(problem, traits) : verdict;
}
Result<std::unique_ptr<ops::StateCopy::Kernel>> simd16::make(const ops::StateCopy::Problem&, ops::Device& device) {
  Device& d = opencl_device(device);
  return make_with(d, portable_definitions(d, DType::kBF16), portable_definitions(d, DType::kF32), kPortableItems);
}

}  // namespace quern::opencl
