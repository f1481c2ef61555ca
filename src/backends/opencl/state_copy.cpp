#include "backends/opencl/plain.h"

namespace quern::opencl::plain {

namespace {

class StateCopyKernel final : public ops::StateCopy::Kernel {
 public:
  StateCopyKernel(Function store_bf16, Function store_f32) : store_bf16_(store_bf16), store_f32_(store_f32) {}

  [[nodiscard]] std::string_view arithmetic() const override { return "opencl.plain"; }

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
        .launch(hidden.dtype == DType::kF32 ? store_f32_ : store_bf16_, {{groups_for(width, kItems), rows.runs.size(), 1}, {kItems, 1, 1}}, rows.run_table, rows.slots.cursor,
                rows.slots.boundary, static_cast<int32_t>(width), static_cast<int32_t>(window.shape[1]), hidden, window, boundary_hidden);
  }

 private:
  Function store_bf16_, store_f32_;
};

}  // namespace

ops::Verdict accepts(const ops::StateCopy::Problem&, const ops::DeviceTraits& traits) { return has_device_code(traits); }

Result<std::unique_ptr<ops::StateCopy::Kernel>> make(const ops::StateCopy::Problem&, ops::Device& device) {
  Device& d = opencl_device(device);
  ASSIGN_OR_RETURN(const Function bf16, d.function("state_copy", "store_hidden", activation_definition(DType::kBF16)));
  ASSIGN_OR_RETURN(const Function f32, d.function("state_copy", "store_hidden", activation_definition(DType::kF32)));
  return std::unique_ptr<ops::StateCopy::Kernel>(std::make_unique<StateCopyKernel>(bf16, f32));
}

}  // namespace quern::opencl::plain
