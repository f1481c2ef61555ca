#include "backends/platforms.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "backends/cpu/cpu_info.h"
#include "backends/cpu/device.h"
#include "backends/cpu/kernel_table.h"
#include "backends/cuda/device.h"
#include "backends/cuda/device_code.h"
#include "backends/cuda/gdn_mix.h"
#include "backends/cuda/kernel_table.h"
#include "backends/known_cards.h"
#include "backends/opencl/device.h"
#include "backends/opencl/kernel_table.h"
#include "backends/opencl/programs.h"

namespace quern::backends {

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

struct DeviceName {
  std::string platform;
  std::optional<int> ordinal;
};
/// "cuda:1" is {"cuda", 1}; "cuda" has no ordinal.
Result<DeviceName> split_device_name(std::string_view name) {
  const size_t colon = name.find(':');
  DeviceName split{lower(name.substr(0, colon)), {}};
  if (colon == std::string_view::npos) return split;
  const std::string_view digits = name.substr(colon + 1);
  int ordinal = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
  if (error != std::errc() || end != digits.data() + digits.size() || ordinal < 0)
    return invalid_argument("device '{}': expected a name such as cpu, cuda:0 or opencl:1", name);
  split.ordinal = ordinal;
  return split;
}

}  // namespace

const ops::KernelTable& kernel_table(ops::Platform platform) {
  switch (platform) {
    case ops::Platform::kCpu: return cpu::kKernelTable;
    case ops::Platform::kOpenCl: return opencl::kKernelTable;
    case ops::Platform::kCuda: return cuda::kKernelTable;
  }
  CHECK_UNREACHABLE();
}

Result<std::unique_ptr<ops::Device>> open_device(std::string_view name, const DeviceOptions& options) {
  ASSIGN_OR_RETURN(const DeviceName split, split_device_name(name));
  const std::string& platform = split.platform;
  const int ordinal = split.ordinal.value_or(0);
  if (platform == "cpu") {
    if (ordinal >= options.num_sharing) return invalid_argument("device '{}': {} CPU device{} asked for, numbered from 0", name, options.num_sharing, options.num_sharing == 1 ? " was" : "s were");
    if (options.num_threads < 0) return invalid_argument("{} threads: a positive number, or 0 for one per core", options.num_threads);
    return std::unique_ptr<ops::Device>(std::make_unique<cpu::Device>(options.num_threads, options.records, options.num_sharing));
  }
  if (platform == "cuda" || platform == "cuda-emulated") {
    auto device = cuda::Device::open(ordinal, {.quantizes_activations = options.quantizes_activations, .inspectable = options.inspectable, .emulates_workstation = platform == "cuda-emulated"});
    if (!device) return make_error(device.error().code, "device '{}': {}; --device cpu works", name, device.error().message);
    return std::unique_ptr<ops::Device>(std::move(*device));
  }
  if (platform == "opencl" || platform == "opencl-emulated") {
    const bool emulates = platform == "opencl-emulated";
    if (emulates && !split.ordinal) return invalid_argument("device '{}': which one? opencl-emulated:0 is the first", name);
    auto device = opencl::Device::open(split.ordinal, {.inspectable = options.inspectable, .emulates_xe2 = emulates});
    if (!device) return make_error(device.error().code, "device '{}': {}; --device cpu works", name, device.error().message);
    return std::unique_ptr<ops::Device>(std::move(*device));
  }
  return invalid_argument("unknown device '{}': cpu, cuda:N and opencl:N are known", name);
}

std::unique_ptr<ops::Device> imagine_device(const ops::DeviceTraits& traits, int num_threads) {
  switch (traits.platform) {
    case ops::Platform::kCpu: return cpu::Device::imagine(traits, num_threads);
    case ops::Platform::kOpenCl: return opencl::Device::imagine(traits);
    case ops::Platform::kCuda: return cuda::Device::imagine(traits);
  }
  CHECK_UNREACHABLE();
}

Result<ops::DeviceTraits> traits_by_name(std::string_view name) {
  const std::string wanted = lower(name);
  if (wanted == "cpu" || wanted == "cpu:0") {
    ops::DeviceTraits traits = cpu::host_traits();
    traits.read_bandwidth = cpu::measure_read_bandwidth(traits.num_cores);
    return traits;
  }
  for (const KnownCard& card : known_card_table())
    if (card.short_name == wanted) {
      ops::DeviceTraits traits;
      traits.platform = card.platform;
      traits.name = card.name;
      traits.memory_bytes = card.memory_bytes;
      traits.read_bandwidth = card.read_bandwidth;
      traits.num_cores = card.num_cores;
      traits.architecture = card.architecture;
      traits.fp8_matrix = card.fp8_matrix;
      if (card.platform == ops::Platform::kCuda) {
        traits.overhead_bytes = cuda::kUsualContextBytes + cuda::kCodeAndGraphBytes;
        if (const auto covered = cuda::build_covers(card.architecture); !covered) {
          traits.device_code = false;
          traits.why_no_device_code = covered.error().message;
        }
      }
      return traits;
    }
  if (wanted.starts_with("cuda") || wanted.starts_with("opencl")) {
    ASSIGN_OR_RETURN(const auto device, open_device(name, {}));
    return device->traits();
  }
  return invalid_argument("unknown device '{}': cpu, {} are known", name, fmt::join(known_cards(), ", "));
}

std::vector<std::string_view> known_cards() {
  std::vector<std::string_view> names;
  for (const KnownCard& card : known_card_table()) names.push_back(card.short_name);
  return names;
}

double issue_rate(const ops::DeviceTraits& traits) {
  for (const KnownCard& card : known_card_table())
    if (card.platform == traits.platform && card.architecture == traits.architecture && traits.architecture != 0) return card.issue_rate;
  return 0;
}

namespace {
/// As programs.txt has it.
std::string upper_case_name(DType dtype) {
  std::string name(dtype_name(dtype));
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return name;
}
}  // namespace

std::optional<WeightPass> weight_pass(std::string_view candidate, DType weight, ops::RowKind kind, int64_t num_rows) {
  if (!candidate.starts_with("opencl.dpas")) return std::nullopt;
  const auto pass = opencl::weight_pass(upper_case_name(weight), kind == ops::RowKind::kDecode, num_rows);
  if (!pass) return std::nullopt;
  return WeightPass{pass->slots_per_byte, pass->turn_rows, pass->read_rows};
}

std::optional<ChunkPass> gdn_chunk_pass(std::string_view candidate, DType ring) {
  if (!candidate.starts_with("opencl.dpas")) return std::nullopt;
  const auto pass = opencl::gdn_chunk_pass(upper_case_name(ring));
  if (!pass) return std::nullopt;
  return ChunkPass{pass->rows, pass->slots_per_head, pass->slots_per_value_head, pass->walk_slots_per_value_head};
}

std::optional<RowPass> gdn_row_pass(std::string_view candidate, DType ring, ops::RowKind kind, int64_t rows_each) {
  if (candidate != "opencl.dpas" && candidate != "opencl.simd16") return std::nullopt;
  const bool with_keys = kind == ops::RowKind::kDecode && rows_each <= opencl::kGdnShortRun, keeps = with_keys && rows_each == 1;
  const auto pass = opencl::gdn_row_pass(upper_case_name(ring), with_keys);
  if (!pass) return std::nullopt;
  return RowPass{pass->slots_per_run, pass->slots_per_row, pass->slots_per_row_of_head, keeps ? 0 : pass->slots_per_channel, kind == ops::RowKind::kDecode ? (keeps ? 0 : 1) + (with_keys ? 0 : 1) : 0};
}

ops::GdnStateLayout gdn_state_layout(std::string_view candidate, DType ring) {
  return candidate.starts_with("cuda.mma") ? cuda::mma::gdn_state_layout(ring) : ops::GdnStateLayout::kF32;
}

std::optional<AttentionPass> attention_decode_pass(std::string_view candidate, DType cache, int64_t keys) {
  if (candidate != "opencl.dpas" || keys <= 0) return std::nullopt;
  const auto pass = opencl::attention_decode_pass(upper_case_name(cache));
  if (!pass) return std::nullopt;
  const int64_t turns = ceil_div(keys, int64_t{opencl::kAttentionKeys}), groups = std::min<int64_t>(ceil_div(turns, int64_t{opencl::kAttentionSplits}), opencl::kAttentionShares);
  const int64_t turns_each = ceil_div(turns, groups * opencl::kAttentionSplits);
  return AttentionPass{std::min(turns, groups * opencl::kAttentionSplits), pass->slots + static_cast<double>(turns_each) * pass->slots_per_turn + static_cast<double>(groups) * pass->slots_per_group};
}

Result<std::optional<bool>> flushes_half_subnormals(ops::Device& device) {
  if (device.traits().platform != ops::Platform::kOpenCl || device.traits().architecture == 0) return std::optional<bool>();
  ASSIGN_OR_RETURN(const bool flushed, opencl::opencl_device(device).flushes_half_subnormals());
  return std::optional<bool>(flushed);
}

std::vector<std::string> describe_devices() {
  const ops::DeviceTraits cpu = cpu::host_traits();
  std::vector<std::string> features;
  for (const auto& [present, name] : {std::pair{cpu.avx2, "avx2"},
                                      {cpu.avx512, "avx512"},
                                      {cpu.avx512_vbmi, "vbmi"},
                                      {cpu.avx512_bf16, "avx512_bf16"},
                                      {cpu.amx_bf16, "amx_bf16"}})
    if (present) features.emplace_back(name);
  std::vector<std::string> lines{fmt::format("cpu     {}, {} threads, {:.1f} GiB, {}", cpu.name, cpu.num_cores,
                                             static_cast<double>(cpu.memory_bytes) / (1ull << 30), fmt::join(features, " "))};
  for (std::string& line : cuda::describe_devices()) lines.push_back(std::move(line));
  for (std::string& line : opencl::describe_devices()) lines.push_back(std::move(line));
  return lines;
}

Result<std::vector<ops::FoundDevice>> cuda_devices() { return cuda::list_devices(); }

Result<std::vector<ops::FoundDevice>> opencl_devices() { return opencl::list_devices(); }

}  // namespace quern::backends
