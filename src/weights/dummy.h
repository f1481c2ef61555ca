#pragma once

#include <utility>

#include "weights/source.h"

namespace quern::weights {

/// `--load-format dummy`: weights made up in memory in the schemes that the config declares, the same for equal seeds. Thread-safe.
class DummySource final : public WeightSource {
 public:
  DummySource(Inventory inventory, uint64_t seed) : inventory_(std::move(inventory)), seed_(seed) {}

  [[nodiscard]] const Inventory& inventory() const override { return inventory_; }
  Result<StagedLinear> linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  Result<StagedLinear> linear_in_fp8(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  Result<StagedTensor> vector(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  void done_with(std::string_view /*name*/) override {}

  /// The activation scale of every static layer.
  static constexpr float kInputScale = 0.0625f;

 private:
  Result<StagedLinear> make(std::string_view name, const ops::LinearShape& whole, const Slice& slice, ops::Device& device, ops::Stream& stream);

  Inventory inventory_;
  uint64_t seed_;
};

}  // namespace quern::weights
