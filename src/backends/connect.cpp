#include <algorithm>

#include "backends/cpu/collective.h"
#include "backends/cuda/collective.h"
#include "backends/opencl/collective.h"
#include "backends/platforms.h"

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

Result<ops::Collectives> connect(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options) {
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
  std::string reasons;
  for (const ops::Transport& transport : list.transports()) {
    if (!options.transport.empty() && transport.name != options.transport) continue;
    const ops::Verdict verdict = transport.probe(devices);
    if (verdict.accepted) {
      auto ends = transport.connect(devices, options);
      if (ends) return ends;
      reasons += fmt::format("\n  {:<8} {}", transport.name, ends.error().message);
    } else {
      reasons += fmt::format("\n  {:<8} {}", transport.name, verdict.reason);
    }
  }
  return make_error(ErrorCode::kUnsupported, "{} ranks on {} cannot exchange messages:{}", devices.size(), ops::platform_name(platform), reasons);
}

}  // namespace quern::backends
