#include <cstring>

#include "backends/cpu/plain.h"

namespace quern::cpu::plain {

namespace {

class StateCopyKernel final : public ops::StateCopy::Kernel {
 public:
  [[nodiscard]] std::string_view arithmetic() const override { return "cpu.plain"; }
  void enqueue(std::span<const ops::StateCopy::Copy> copies, ops::Launch& launch) const override {
    for (const ops::StateCopy::Copy& copy : copies) {
      if (copy.source.buffer == nullptr) launch.stream.fill_zero(copy.destination);
      else launch.stream.copy(copy.source, copy.destination);
    }
  }
};

}  // namespace

ops::Verdict accepts(const ops::StateCopy::Problem&, const ops::DeviceTraits&) { return ops::accept(); }

Result<std::unique_ptr<ops::StateCopy::Kernel>> make(const ops::StateCopy::Problem&, ops::Device&) {
  return std::unique_ptr<ops::StateCopy::Kernel>(std::make_unique<StateCopyKernel>());
}

}  // namespace quern::cpu::plain
