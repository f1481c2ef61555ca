#include "worker/start.h"

#include "backends/platforms.h"
#include "base/log.h"
#include "worker/device_worker.h"
#include "worker/model_runner.h"
#include "worker/selftest.h"

namespace quern::worker {

Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress, ActivationRanges* ranges) {
  if (const std::string refusals = plan.refusals(); !refusals.empty()) return make_error(ErrorCode::kUnsupported, "{}", refusals);
  if (!plan.fits) return make_error(ErrorCode::kResourceExhausted, "{} {}", plan.config.name, plan.verdict);

  ASSIGN_OR_RETURN(std::unique_ptr<ops::Device> device, backends::open_device(plan.options.device, {.num_threads = plan.options.num_threads, .quantizes_activations = plan.options.quantize_activations}));
  const ops::KernelTable& table = backends::kernel_table(device->traits().platform);
  ops::SelectionRules rules;
  rules.forced = plan.options.kernels;
  ASSIGN_OR_RETURN(const SelfTestReport report, self_test(plan, table, rules, *device));
  for (const SelfTestReport::Fault& fault : report.faults) {
    log_error("self-test: {} {} failed on {} and is not used: {}", fault.op, fault.candidate, device->traits().name, fault.reason);
    rules.disabled.emplace(fmt::format("{} {}", fault.op, fault.candidate), fmt::format("its self-test failed: {}", fault.reason));
  }

  ASSIGN_OR_RETURN(const auto source, weights::open_weights(plan.options.model_dir, plan.config, plan.options.load));
  ASSIGN_OR_RETURN(auto runner, ModelRunner::create(plan, *source, table, rules, *device, progress));
  if (ranges != nullptr) {
    ASSIGN_OR_RETURN(const auto stream, device->make_stream());
    RETURN_IF_ERROR(ranges->prepare(plan, *source, *device, *stream));
    runner->observe(*ranges);
  }
  log_info("{} loaded on {}: {:.2f} GiB of device memory, {:.2f} GiB planned", plan.config.name, device->traits().name,
           static_cast<double>(device->allocated_bytes()) / (1ull << 30), static_cast<double>(plan.memory.total_bytes()) / (1ull << 30));
  return std::unique_ptr<WorkerGroup>(std::make_unique<DeviceWorker>(plan.limits, std::move(device), std::move(runner)));
}

std::vector<std::string> describe_devices() { return backends::describe_devices(); }

}  // namespace quern::worker
