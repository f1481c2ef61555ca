#pragma once

#include <filesystem>
#include <memory>

#include "weights/accounting.h"
#include "weights/checkpoint.h"
#include "weights/source.h"

namespace quern::weights {

/// Weights from safetensors files, mapped: memory of our own is a few chunks, at any size of checkpoint. Thread-safe.
class CheckpointSource final : public WeightSource {
 public:
  /// Opens DIR and accounts for every tensor in it; all faults in one error.
  static Result<std::unique_ptr<WeightSource>> open(const std::filesystem::path& model_dir, const model::ModelConfig& config,
                                                    const LoadOptions& options);

  [[nodiscard]] const Inventory& inventory() const override { return account_.inventory; }
  Result<StagedLinear> linear(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  Result<StagedLinear> linear_in_fp8(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  Result<StagedTensor> vector(std::string_view name, const Slice& slice, ops::Device& device, ops::Stream& stream) override;
  void done_with(std::string_view name) override;

 private:
  Result<StagedLinear> stage(std::string_view name, const Slice& slice, bool in_fp8, ops::Device& device, ops::Stream& stream);
  CheckpointSource(Checkpoint checkpoint, Account account) : checkpoint_(std::move(checkpoint)), account_(std::move(account)) {}
  Checkpoint checkpoint_;  // owns the mappings
  Account account_;
};

}  // namespace quern::weights
