#include "worker/devices.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <charconv>
#include <map>

#include "backends/platforms.h"
#include "worker/rank_devices.h"

namespace quern::worker {

namespace {

constexpr size_t kCopyBytes = size_t{64} << 20;
constexpr int64_t kRows[] = {1, 64, 512, 4000};

/// Bytes a second of copies of a stream: the median of some.
Result<double> copy_speed(ops::Stream& stream, const auto& enqueue_copy) {
  std::array<double, 6> seconds{};
  for (double& one : seconds) {  // the first warms up
    const auto begin = std::chrono::steady_clock::now();
    enqueue_copy();
    RETURN_IF_ERROR(stream.finish());
    one = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::sort(seconds.begin() + 1, seconds.end());
  return static_cast<double>(kCopyBytes) / seconds[1 + (seconds.size() - 1) / 2];
}

Result<void> measure_copies(ops::Device& device, MeasuredDevice& measured) {
  ASSIGN_OR_RETURN(const auto stream, device.make_stream());
  ASSIGN_OR_RETURN(const auto host, device.allocate_host(kCopyBytes, "measuring copies"));
  ASSIGN_OR_RETURN(const auto memory, device.allocate(kCopyBytes, "measuring copies"));
  const ops::TensorView view{memory.get(), 0, DType::kU8, {static_cast<int64_t>(kCopyBytes)}};
  std::fill_n(host->address(), kCopyBytes, std::byte{1});
  ASSIGN_OR_RETURN(measured.bytes_to_device, copy_speed(*stream, [&] { stream->copy_to_device(host->address(), view); }));
  ASSIGN_OR_RETURN(measured.bytes_to_host, copy_speed(*stream, [&] { stream->copy_to_host(view, host->address()); }));
  return {};
}

/// Of "cuda:1" or "opencl:0" as its driver lists it.
std::string pci_address(const std::string& name, const ops::DeviceTraits& traits) {
  if (traits.platform == ops::Platform::kCpu) return {};
  const auto found = traits.platform == ops::Platform::kCuda ? backends::cuda_devices() : backends::opencl_devices();
  size_t ordinal = 0;
  if (const size_t colon = name.find(':'); colon != std::string::npos) std::from_chars(name.data() + colon + 1, name.data() + name.size(), ordinal);
  return found && ordinal < found->size() ? (*found)[ordinal].pci_address : std::string();
}

DeviceGroup measure_group(const std::vector<size_t>& places, const std::vector<std::unique_ptr<ops::Device>>& devices, const std::string& transport) {
  DeviceGroup group;
  group.devices = places;
  const auto pointers = [&](const std::vector<size_t>& of) {
    std::vector<ops::Device*> result;
    for (const size_t place : of) result.push_back(devices[place].get());
    return result;
  };
  const std::vector<ops::Device*> all = pointers(places);
  const ops::Platform platform = all.front()->traits().platform;
  group.platform = ops::platform_name(platform);
  auto connection = backends::try_transports(all, {.transport = transport}, kRows);
  if (!connection) {
    group.error = connection.error().message;
    return group;
  }
  group.transports = std::move(connection->trials);
  group.chosen = std::move(connection->chosen);
  connection->ends.clear();
  const auto list = backends::transports(platform).transports();
  const auto direct = std::find_if(list.begin(), list.end(), [](const ops::Transport& t) { return t.name == "direct"; });
  if (direct == list.end()) return group;
  for (size_t a = 0; a < places.size(); ++a)
    for (size_t b = a + 1; b < places.size(); ++b) {
      DevicePair& pair = group.pairs.emplace_back(DevicePair{places[a], places[b], {}, {}, 0});
      const std::vector<ops::Device*> both = pointers({places[a], places[b]});
      const ops::Verdict verdict = direct->probe(both);
      if (!verdict.accepted) {
        pair.refusal = verdict.reason;
        continue;
      }
      const auto tried = backends::try_transports(both, {.transport = "direct"}, std::span(kRows).first(1));
      if (!tried) {
        pair.failure = tried.error().message;
      } else {
        pair.failure = tried->trials.front().refusal;
        if (!tried->trials.front().times.empty()) pair.seconds = tried->trials.front().times.front().seconds;
      }
    }
  return group;
}

}  // namespace

std::vector<std::string> default_devices() {
  std::vector<std::string> names;
  if (const auto found = backends::cuda_devices())
    for (size_t i = 0; i < found->size(); ++i)
      if ((*found)[i].why_not_usable.empty()) names.push_back(fmt::format("cuda:{}", i));
  if (!names.empty()) return names;
  if (const auto found = backends::opencl_devices())
    for (size_t i = 0; i < found->size(); ++i)
      if ((*found)[i].is_intel_gpu && (*found)[i].why_not_usable.empty()) names.push_back(fmt::format("opencl:{}", i));
  if (!names.empty()) return names;
  return {"cpu"};
}

DevicesReport measure_devices(const std::vector<std::string>& names, const std::string& transport) {
  DevicesReport report;
  std::vector<std::unique_ptr<ops::Device>> devices;
  std::map<ops::Platform, std::vector<size_t>> groups;
  for (const std::string& name : names) {
    MeasuredDevice& measured = report.devices.emplace_back();
    measured.name = name;
    auto device = backends::open_device(name, {.num_sharing = num_sharing_cpu(names)});
    if (!device) {
      measured.error = device.error().message;
      devices.push_back(nullptr);
      continue;
    }
    const ops::DeviceTraits& traits = (*device)->traits();
    measured.product = traits.name;
    measured.platform = ops::platform_name(traits.platform);
    measured.memory_bytes = traits.memory_bytes;
    measured.pci_address = pci_address(name, traits);
    if (const auto copied = measure_copies(**device, measured); !copied) measured.error = copied.error().message;
    groups[traits.platform].push_back(devices.size());
    devices.push_back(std::move(*device));
  }
  for (const auto& [platform, places] : groups)
    if (places.size() > 1) report.groups.push_back(measure_group(places, devices, transport));
  return report;
}

}  // namespace quern::worker
