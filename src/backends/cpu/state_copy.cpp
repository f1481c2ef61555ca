#include <algorithm>

#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

class StateCopyKernel final : public ops::StateCopy::Kernel {
 public:
  [[nodiscard]] std::string_view arithmetic() const override { return "cpu.plain"; }
  void enqueue(std::span<const ops::StateCopy::Copy> copies, ops::Launch& launch) const override {
    for (const ops::StateCopy::Copy& copy : copies) {
      if (copy.source.buffer == nullptr)
        launch.stream.fill_zero(copy.destination);
      else
        launch.stream.copy(copy.source, copy.destination);
    }
  }

  void store_hidden(const ops::Rows& rows, const ops::TensorView& hidden, const ops::TensorView& window,
                    const ops::TensorView& boundary_hidden, ops::Launch& launch) const override {
    const int64_t length = window.shape[1];
    for (const ops::RowRun& run : rows.runs) {
      if (run.num_rows == 0) continue;  // padding
      const int64_t cursor = rows.slots.cursor.data<int32_t>()[run.slot], stored = rows.slots.boundary.data<int32_t>()[run.slot];
      const int64_t end = cursor + run.num_rows;
      const ops::TensorView slot_window = window.at(run.slot);
      const auto row_of = [&](int64_t index) { return hidden.at(run.first_row + index - cursor); };
      // The boundary first: its row may be about to leave the window.
      const int64_t boundary = (run.committed ? end : cursor) / ops::kGrid * ops::kGrid;
      if (boundary > stored) {
        const int64_t index = boundary - 1;
        launch.stream.copy(index >= cursor ? row_of(index) : slot_window.at(index % length), boundary_hidden.at(run.slot));
      }
      for (int64_t index = std::max(cursor, end - length); index < end; ++index)
        launch.stream.copy(row_of(index), slot_window.at(index % length));
    }
  }
};

}  // namespace

ops::Verdict accepts(const ops::StateCopy::Problem&, const ops::DeviceTraits&) { return ops::accept(); }

Result<std::unique_ptr<ops::StateCopy::Kernel>> make(const ops::StateCopy::Problem&, ops::Device&) {
  return std::unique_ptr<ops::StateCopy::Kernel>(std::make_unique<StateCopyKernel>());
}

}  // namespace quern::cpu::plain
