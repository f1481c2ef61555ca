#include <algorithm>

#include "backends/cpu/collective.h"
#include "backends/cuda/collective.h"
#include "backends/opencl/collective.h"
#include "backends/platforms.h"
#include "backends/transport_trial.h"
#include "base/log.h"

namespace quern::backends {

namespace {

constexpr size_t kMinMessageBytes = size_t{256} << 10;  // a row of any model fits

std::vector<std::string_view> names_of(std::span<const ops::Transport> transports) {
  std::vector<std::string_view> names;
  for (const ops::Transport& transport : transports) names.push_back(transport.name);
  return names;
}

}  // namespace

const ops::TransportList& transports(ops::Platform platform) {
  switch (platform) {
    case ops::Platform::kCpu: return cpu::kTransports;
    case ops::Platform::kOpenCl: return opencl::kTransports;
    case ops::Platform::kCuda: return cuda::kTransports;
  }
  CHECK_UNREACHABLE();
}

Result<ops::Connection> try_transports(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, std::span<const int64_t> row_counts) {
  CHECK(!devices.empty());
  const ops::Platform platform = devices.front()->traits().platform;
  for (const ops::Device* device : devices)
    if (device->traits().platform != platform)
      return invalid_argument("ranks compute alike: devices of {} and {} cannot work on one model", ops::platform_name(platform), ops::platform_name(device->traits().platform));
  if (options.max_message_bytes < kMinMessageBytes) return invalid_argument("messages of {} bytes between ranks: at least {}", options.max_message_bytes, kMinMessageBytes);
  const ops::TransportList& list = transports(platform);
  if (list.transports().empty()) return make_error(ErrorCode::kUnsupported, "{} ranks on {}: {}", devices.size(), ops::platform_name(platform), list.why_absent());
  const std::vector<std::string_view> names = names_of(list.transports());
  if (!options.transport.empty() && std::find(names.begin(), names.end(), options.transport) == names.end())
    return invalid_argument("collective '{}': {} has {}", options.transport, ops::platform_name(platform), fmt::join(names, ", "));
  return try_list(list, devices, options, kernel_table(platform), row_counts);
}

Result<ops::Collectives> connect(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
  ASSIGN_OR_RETURN(ops::Connection connection, try_transports(devices, options, kTrialRows));
  const std::string_view platform = ops::platform_name(devices.front()->traits().platform);
  if (connection.ends.empty()) {
    std::string reasons;
    for (const ops::TransportTrial& trial : connection.trials) reasons += fmt::format("\n  {:<8} {}", trial.transport, trial.refusal);
    return make_error(ErrorCode::kUnsupported, "{} ranks on {} cannot exchange messages:{}", devices.size(), platform, reasons);
  }
  if (devices.size() > 1) {
    for (const ops::TransportTrial& trial : connection.trials) log_info("collective {:<8} {}", trial.transport, describe(trial));
    log_info("{} ranks on {} exchange messages by {}{}", devices.size(), platform, connection.chosen, options.transport.empty() ? "" : ", as asked");
  }
  if (options.wrap)
    for (auto& end : connection.ends) end = options.wrap(std::move(end));
  return std::move(connection.ends);
}

}  // namespace quern::backends
