#include "worker/rank_devices.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "backends/platforms.h"

namespace quern::worker {
namespace {

bool is_cpu(std::string_view name) { return name == "cpu" || name.starts_with("cpu:"); }

/// Whether devices of this name are numbered.
bool is_platform(std::string_view name) { return name == "cpu" || name == "cuda" || name == "opencl" || name == "opencl-emulated" || name == "cuda-emulated"; }

/// The GPU that a name of CUDA's opens: its first without a number, and an emulated one is the GPU itself. Other names are themselves.
std::string card(std::string_view name) {
  for (const std::string_view platform : {"cuda-emulated", "cuda"}) {
    if (name == platform) return "cuda:0";
    if (name.starts_with(fmt::format("{}:", platform))) return fmt::format("cuda{}", name.substr(platform.size()));
  }
  return std::string(name);
}

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> names;
  for (;;) {
    const size_t comma = list.find(',');
    names.emplace_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return names;
    list.remove_prefix(comma + 1);
  }
}

/// opencl without a number is the first Intel GPU; for several ranks, it and others of its kind.
Result<std::vector<std::string>> intel_gpus(int32_t count) {
  std::vector<std::string> names;
  std::string kind;
  if (const auto listed = backends::opencl_devices()) {
    for (size_t i = 0; i < listed->size() && std::ssize(names) < count; ++i) {
      const ops::FoundDevice& device = (*listed)[i];
      if (!device.is_intel_gpu || !device.why_not_usable.empty() || (!kind.empty() && device.name != kind)) continue;
      kind = device.name;
      names.push_back(fmt::format("opencl:{}", i));
    }
  }
  if (std::ssize(names) < count)
    return invalid_argument("--device opencl: {} ranks want as many Intel GPUs of one kind, and {} found; others have to be named, as in opencl:0,opencl:1", count,
                            names.empty() ? "none was" : fmt::format("{} {} was", names.size(), kind));
  return names;
}

}  // namespace

Result<std::vector<std::string>> rank_devices(std::string_view device, int32_t tp_size, int32_t pp_size) {
  const int32_t num_ranks = tp_size * pp_size;
  std::vector<std::string> names = split(device);
  for (const std::string& name : names)
    if (name.empty()) return invalid_argument("--device {}: a name is missing", device);
  if (names.size() == 1 && num_ranks > 1) {
    const std::string first = names[0], platform = first.substr(0, first.find(':'));
    if (first == "opencl") return intel_gpus(num_ranks);
    int32_t ordinal = 0;
    if (platform.size() < first.size()) {
      const char* end = first.data() + first.size();
      if (const auto read = std::from_chars(first.data() + platform.size() + 1, end, ordinal); read.ec != std::errc() || read.ptr != end)
        return invalid_argument("--device {}: a number is wanted after the colon", device);
    }
    names.clear();
    for (int32_t rank = 0; rank < num_ranks; ++rank) names.push_back(is_platform(platform) ? fmt::format("{}:{}", platform, ordinal + rank) : first);
    return names;
  }
  if (std::ssize(names) != num_ranks)
    return invalid_argument("--device names {} devices, but -tp {} -pp {} {} on {}", names.size(), tp_size, pp_size, num_ranks == 1 ? "runs" : "run", num_ranks);
  std::vector<std::string> cards;
  for (const std::string& name : names) cards.push_back(card(name));
  for (const std::string& name : cards)
    if (std::count(cards.begin(), cards.end(), name) > 1 && (name.starts_with("cpu:") || name.starts_with("cuda:")))
      return invalid_argument("--device {}: {} is named twice, and every rank needs a device of its own", device, name);
  return names;
}

Result<std::vector<ops::DeviceTraits>> traits_of_ranks(const std::vector<std::string>& devices, int32_t tp_size, int32_t num_processes) {
  std::map<std::string, ops::DeviceTraits> known;
  std::vector<ops::DeviceTraits> ranks;
  for (const std::string& name : devices) {
    const std::string kind = is_cpu(name) ? "cpu" : name;
    if (!known.contains(kind)) {
      ASSIGN_OR_RETURN(ops::DeviceTraits traits, backends::traits_by_name(is_cpu(name) && devices.size() == 1 ? name : kind));
      const auto named = static_cast<int>(std::count(devices.begin(), devices.end(), name));
      const int sharing = is_cpu(name) ? num_sharing_cpu(devices) * num_processes : name.starts_with("opencl") ? named : 1;  // the name of a card is of as many cards
      traits.memory_bytes /= static_cast<uint64_t>(sharing);
      traits.read_bandwidth /= sharing;
      traits.num_cores = std::max(traits.num_cores / sharing, 1);
      known.emplace(kind, std::move(traits));
    }
    ranks.push_back(known.at(kind));
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const size_t first = rank - rank % static_cast<size_t>(tp_size);
    if (ranks[rank].platform != ranks[0].platform)
      return make_error(ErrorCode::kUnsupported, "{} and {} are devices of two platforms, which cannot run one model together", devices[0], devices[rank]);
    if (ranks[rank].name != ranks[first].name || ranks[rank].architecture != ranks[first].architecture)
      return make_error(ErrorCode::kUnsupported, "ranks of tensor parallelism have to be the same kind of device, so that they draw the same tokens: {} is {}, {} is {}", devices[first],
                        ranks[first].name, devices[rank], ranks[rank].name);
  }
  return ranks;
}

int num_sharing_cpu(const std::vector<std::string>& devices) { return std::max(static_cast<int>(std::count_if(devices.begin(), devices.end(), is_cpu)), 1); }

}  // namespace quern::worker
