#include "backends/opencl/device.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "backends/opencl/kernel_source.h"
#include "backends/opencl/stream.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"

namespace quern::opencl {

namespace {

constexpr size_t kHostAlignment = 4096, kMostSpareBytes = size_t{1} << 28;
constexpr std::string_view kPoclPlatform = "Portable Computing Language";

/// Host memory from which copies run at full speed: shared memory of the driver, or a buffer that stays mapped. Not counted as the device's.
class HostBuffer final : public ops::Buffer {
 public:
  HostBuffer(std::shared_ptr<Context> context, QueueObject* queue, MemoryObject* mapped, std::byte* address, size_t size_bytes)
      : context_(std::move(context)), queue_(queue), mapped_(mapped), address_(address), size_bytes_(size_bytes) {}
  ~HostBuffer() override {
    if (mapped_ == nullptr) {
      context_->free_shared(context_->handle, address_);
      return;
    }
    context_->driver.unmap(queue_, mapped_, address_, 0, nullptr, nullptr);
    context_->driver.finish(queue_);
    context_->driver.memory_release(mapped_);
  }
  [[nodiscard]] std::byte* address() const override { return address_; }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }

 private:
  std::shared_ptr<Context> context_;
  QueueObject* queue_;
  MemoryObject* mapped_;  // null: shared memory
  std::byte* address_;
  size_t size_bytes_;
};

template <class T>
T number_of(const Driver& driver, DeviceObject* device, uint32_t what) {
  T value{};
  return driver.device_info(device, what, sizeof value, &value, nullptr) == kSuccess ? value : T{};
}
template <class Get>
std::string text_from(const Get& get) {
  size_t size = 0;
  if (get(0, nullptr, &size) != kSuccess || size == 0) return {};
  std::string text(size, '\0');
  if (get(size, text.data(), nullptr) != kSuccess) return {};
  text.resize(text.find('\0') == std::string::npos ? size : text.find('\0'));
  const size_t first = text.find_first_not_of(' ');
  return first == std::string::npos ? std::string() : text.substr(first, text.find_last_not_of(' ') + 1 - first);
}
std::string text_of(const Driver& driver, DeviceObject* device, uint32_t what) {
  return text_from([&](size_t size, void* value, size_t* size_out) { return driver.device_info(device, what, size, value, size_out); });
}
std::string platform_text(const Driver& driver, PlatformObject* platform, uint32_t what) {
  return text_from([&](size_t size, void* value, size_t* size_out) { return driver.platform_info(platform, what, size, value, size_out); });
}

struct Found {
  PlatformObject* platform;
  DeviceObject* device;
  bool intel_gpu;
};

/// All devices, Intel GPUs first.
Result<std::vector<Found>> find_devices(const Driver& driver) {
  uint32_t num_platforms = 0;
  const Status status = driver.platform_ids(0, nullptr, &num_platforms);
  if (status == kPlatformNotFound || (status == kSuccess && num_platforms == 0))
    return make_error(ErrorCode::kUnsupported, "the OpenCL loader finds no driver (packages such as intel-opencl-icd and pocl-opencl-icd register one in /etc/OpenCL/vendors)");
  if (status != kSuccess) return make_error(ErrorCode::kUnsupported, "the OpenCL loader does not list its drivers: {}", describe(status));
  std::vector<PlatformObject*> platforms(num_platforms);
  driver.platform_ids(num_platforms, platforms.data(), nullptr);
  std::vector<Found> found;
  for (PlatformObject* platform : platforms) {
    uint32_t num_devices = 0;
    if (driver.device_ids(platform, kDeviceTypeAll, 0, nullptr, &num_devices) != kSuccess || num_devices == 0) continue;
    std::vector<DeviceObject*> devices(num_devices);
    if (driver.device_ids(platform, kDeviceTypeAll, num_devices, devices.data(), nullptr) != kSuccess) continue;
    for (DeviceObject* device : devices)
      found.push_back({platform, device, number_of<uint32_t>(driver, device, kDeviceVendorId) == kVendorIntel && (number_of<uint64_t>(driver, device, kDeviceType) & kDeviceTypeGpu) != 0});
  }
  if (found.empty()) return make_error(ErrorCode::kUnsupported, "the OpenCL drivers find no device");
  std::stable_partition(found.begin(), found.end(), [](const Found& f) { return f.intel_gpu; });
  return found;
}

Result<Found> pick(const Driver& driver, std::optional<int> ordinal) {
  ASSIGN_OR_RETURN(const std::vector<Found> found, find_devices(driver));
  if (!ordinal) {
    if (found.front().intel_gpu) return found.front();
    return make_error(ErrorCode::kUnsupported, "none of the {} OpenCL devices is an Intel GPU; opencl:0 takes {} all the same", found.size(),
                      text_of(driver, found.front().device, kDeviceName));
  }
  if (*ordinal >= std::ssize(found))
    return make_error(ErrorCode::kUnsupported, "there {} {} OpenCL device{} here, counted from 0", found.size() == 1 ? "is" : "are", found.size(), found.size() == 1 ? "" : "s");
  return found[static_cast<size_t>(*ordinal)];
}

/// 2021 and 2031 for the chips that we know, 0 for others (ops::DeviceTraits).
int architecture_of(const Driver& driver, const Found& found) {
  if (!found.intel_gpu) return 0;
  const auto version = number_of<uint32_t>(driver, found.device, kDeviceIpVersionIntel);
  const uint32_t major = version >> 22, minor = version >> 14 & 0xff;
  return major == 20 && (minor == 1 || minor == 2) ? 2011 + 10 * static_cast<int>(minor) : 0;
}

ops::DeviceTraits read_traits(const Driver& driver, const Found& found) {
  ops::DeviceTraits traits;
  traits.platform = ops::Platform::kOpenCl;
  traits.name = text_of(driver, found.device, kDeviceName);
  traits.memory_bytes = number_of<uint64_t>(driver, found.device, kDeviceGlobalMemory);
  traits.num_cores = static_cast<int>(number_of<uint32_t>(driver, found.device, kDeviceMaxComputeUnits));
  traits.architecture = architecture_of(driver, found);
  traits.read_bandwidth = traits.architecture == 2021 ? 456e9 : traits.architecture == 2031 ? 608e9 : 0;  // datasheets; OpenCL does not say
  if (number_of<uint64_t>(driver, found.device, kDeviceDoubleFpConfig) == 0) {
    traits.device_code = false;
    traits.why_no_device_code = "the device has no double precision, which sampling needs";
  }
  const std::string version = text_of(driver, found.device, kDeviceVersion);  // "OpenCL 3.0 ..."
  if (!version.starts_with("OpenCL 3.")) {
    traits.device_code = false;
    traits.why_no_device_code = fmt::format("the device supports {}, OpenCL 3.0 is needed", version);
  }
  return traits;
}

/// The line of a build log that says what is wrong.
std::string first_fault(const std::string& log) {
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    if (line.find("error") != std::string::npos) return line;
    begin = end + 1;
  }
  return log.empty() ? "the driver gives no reason" : log.substr(0, log.find('\n'));
}

}  // namespace

Context::~Context() {
  for (const auto& [size, spare] : spares) {
    driver.memory_release(spare.handle);
    std::free(spare.host);
  }
  driver.context_release(handle);
}

Buffer::Buffer(std::shared_ptr<Context> context, MemoryObject* handle, std::byte* host, size_t size_bytes, uint64_t extra_flags)
    : context_(std::move(context)), handle_(handle), host_(host), size_bytes_(size_bytes), extra_flags_(extra_flags) {
  context_->allocated_bytes.fetch_add(size_bytes_, std::memory_order_relaxed);
}
Buffer::~Buffer() {
  context_->allocated_bytes.fetch_sub(size_bytes_, std::memory_order_relaxed);
  if (handle_ != nullptr && host_ != nullptr && context_->spare_bytes + size_bytes_ <= kMostSpareBytes) {
    if (lent_to_ == nullptr || take_back()) {
      context_->spares.emplace(size_bytes_, Context::Spare{handle_, host_});
      context_->spare_bytes += size_bytes_;
      return;
    }
  }
  if (lent_to_ != nullptr) {
    context_->driver.finish(lent_to_);  // its work writes to host memory that goes now
    context_->driver.queue_release(lent_to_);
  }
  if (handle_ != nullptr) context_->driver.memory_release(handle_);
  std::free(host_);
}

void Buffer::lend(QueueObject* queue, const std::shared_ptr<FirstError>& error) const {
  if (host_ == nullptr || lent_to_ == queue) return;
  const Driver& driver = context_->driver;
  if (lent_to_ != nullptr) take_back();
  Status status = kSuccess;
  if (handle_ != nullptr) status = driver.unmap(queue, handle_, host_, 0, nullptr, nullptr);
  else handle_ = driver.buffer_create(context_->handle, kMemoryReadWrite | kMemoryUseHostPointer | extra_flags_, size_bytes_, host_, &status);
  if (status == kSuccess) status = driver.queue_retain(queue);
  if (status != kSuccess) {
    error->set(make_error(ErrorCode::kInternal, "giving memory to {} failed: {}", context_->device_name, describe(status)));
    return;
  }
  lent_to_ = queue;
  error_ = error;
}

bool Buffer::take_back() const {
  Status status = kSuccess;
  context_->driver.map(lent_to_, handle_, kTrue, kMapRead | kMapWrite, 0, size_bytes_, 0, nullptr, nullptr, &status);
  if (status != kSuccess) error_->set(make_error(ErrorCode::kInternal, "work on {} failed: {}", context_->device_name, describe(status)));
  context_->driver.queue_release(lent_to_);
  lent_to_ = nullptr;
  error_.reset();
  return status == kSuccess;
}

Place place_of(const ops::TensorView& view) {
  if (view.empty()) return {};
  return {static_cast<const Buffer*>(view.buffer), view.offset_bytes};
}
Place place_in(const ops::Buffer& buffer, size_t offset_bytes) {
  const auto& memory = static_cast<const Buffer&>(buffer);
  return memory.size_bytes() == 0 ? Place{} : Place{&memory, offset_bytes};
}

std::string DeviceOptions::default_program_cache() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return fmt::format("{}/quern/opencl", cache);
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? fmt::format("{}/.cache/quern/opencl", home) : std::string();
}

Result<std::unique_ptr<Device>> Device::open(std::optional<int> ordinal, const DeviceOptions& options) {
  ASSIGN_OR_RETURN(const Driver* driver, Driver::load());
  ASSIGN_OR_RETURN(const Found found, pick(*driver, ordinal));
  ops::DeviceTraits traits = read_traits(*driver, found);
  if (!traits.device_code) return make_error(ErrorCode::kUnsupported, "{}: {}", traits.name, traits.why_no_device_code);
  const bool on_intel = traits.architecture != 0;
  if (options.emulates_xe2) {
    if (text_of(*driver, found.device, kDeviceExtensions).find("cl_intel_required_subgroup_size") == std::string::npos)
      return make_error(ErrorCode::kUnsupported, "{} has no sub-groups of 16, with which matrix units are emulated; PoCL 6.0 has", traits.name);
    traits.architecture = 2021;
    traits.name += ", emulating Xe2";
  }
  Status status = kSuccess;
  ContextObject* handle = driver->context_create(nullptr, 1, &found.device, nullptr, nullptr, &status);
  if (handle == nullptr) return make_error(ErrorCode::kUnsupported, "{} cannot be used: {}", traits.name, describe(status));
  auto context = std::make_shared<Context>(*driver, found.platform, found.device, handle, traits.name);
  if (text_of(*driver, found.device, kDeviceExtensions).find("cl_intel_unified_shared_memory") != std::string::npos) {
    const auto look_up = [&](const char* name) { return driver->extension_function(found.platform, name); };
    context->allocate_host = reinterpret_cast<decltype(context->allocate_host)>(look_up("clHostMemAllocINTEL"));
    context->free_shared = reinterpret_cast<decltype(context->free_shared)>(look_up("clMemBlockingFreeINTEL"));
    if (context->free_shared == nullptr) context->allocate_host = nullptr;
  }
  QueueObject* queue = driver->queue_create(handle, found.device, nullptr, &status);
  if (queue == nullptr) return make_error(ErrorCode::kUnsupported, "{} makes no queue: {}", traits.name, describe(status));
  return std::unique_ptr<Device>(new Device(std::move(context), queue, std::move(traits), text_of(*driver, found.device, kDriverVersion), on_intel, options));
}

Device::Device(std::shared_ptr<Context> context, QueueObject* queue, ops::DeviceTraits traits, std::string driver_version, bool on_intel, const DeviceOptions& options)
    : context_(std::move(context)), queue_(queue), traits_(std::move(traits)), driver_version_(std::move(driver_version)), on_intel_(on_intel), options_(options) {
  const Driver& driver = context_->driver;
  largest_allocation_ = number_of<uint64_t>(driver, context_->device, kDeviceMaxAllocation);
  if (on_intel_) largest_allocation_ = traits_.memory_bytes;  // kMemoryUnrestrictedSizeIntel
  // PoCL keeps what it compiles, kernel by kernel as they are launched; for a binary it would compile them all once more.
  if (platform_text(driver, context_->platform, kPlatformName) == kPoclPlatform && options_.program_cache == DeviceOptions::default_program_cache()) options_.program_cache.clear();
  exact_division_ = (number_of<uint64_t>(driver, context_->device, kDeviceSingleFpConfig) & kFpCorrectlyRoundedDivide) != 0;
}

std::unique_ptr<Device> Device::imagine(ops::DeviceTraits traits) { return std::unique_ptr<Device>(new Device(std::move(traits))); }

Device::~Device() {
  if (imagined_) return;
  for (const auto& [key, program] : programs_) {
    for (const auto& [name, kernel] : program.kernels) context_->driver.kernel_release(kernel);
    context_->driver.program_release(program.handle);
  }
  context_->driver.queue_release(queue_);
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate(size_t size_bytes, std::string_view purpose) {
  if (imagined_) return imagined_->allocate(size_bytes, size_bytes);
  const Driver& driver = context_->driver;
  if (size_bytes == 0) return std::unique_ptr<ops::Buffer>(std::make_unique<Buffer>(context_, nullptr, nullptr, 0));
  if (size_bytes > traits_.memory_bytes - std::min<uint64_t>(allocated_bytes(), traits_.memory_bytes))
    return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes on {}, which has {} in all; {} are already allocated", purpose, size_bytes, traits_.name,
                      traits_.memory_bytes, allocated_bytes());
  if (size_bytes > largest_allocation_)
    return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes in one piece, {} gives {} at most", purpose, size_bytes, traits_.name, largest_allocation_);
  const uint64_t extra_flags = on_intel_ ? kMemoryUnrestrictedSizeIntel : 0;
  if (options_.inspectable) {
    if (const auto spare = context_->spares.find(size_bytes); spare != context_->spares.end()) {
      const auto [handle, host] = spare->second;
      context_->spares.erase(spare);
      context_->spare_bytes -= size_bytes;
      std::fill_n(host, size_bytes, std::byte{0});
      return std::unique_ptr<ops::Buffer>(std::make_unique<Buffer>(context_, handle, host, size_bytes));
    }
    auto* host = static_cast<std::byte*>(std::aligned_alloc(kHostAlignment, (size_bytes + kHostAlignment - 1) / kHostAlignment * kHostAlignment));
    if (host == nullptr) return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes of host memory, which are not there", purpose, size_bytes);
    std::fill_n(host, size_bytes, std::byte{0});
    return std::unique_ptr<ops::Buffer>(std::make_unique<Buffer>(context_, nullptr, host, size_bytes, extra_flags));
  }
  Status status = kSuccess;
  MemoryObject* handle = driver.buffer_create(context_->handle, kMemoryReadWrite | extra_flags, size_bytes, nullptr, &status);
  const auto failed = [&](const char* what) {
    return make_error(status == kMemoryAllocationFailure || status == kOutOfResources || status == kOutOfHostMemory ? ErrorCode::kResourceExhausted : ErrorCode::kInternal,
                      "{} ({} bytes) cannot be {} on {}, where {} are already allocated: {}", purpose, size_bytes, what, traits_.name, allocated_bytes(), describe(status));
  };
  if (handle == nullptr) return failed("allocated");
  auto buffer = std::make_unique<Buffer>(context_, handle, nullptr, size_bytes);
  constexpr unsigned char kZero = 0;
  status = driver.fill(queue_, handle, &kZero, sizeof kZero, 0, size_bytes, 0, nullptr, nullptr);
  if (status == kSuccess) status = driver.finish(queue_);
  if (status != kSuccess) return failed("cleared");
  return std::unique_ptr<ops::Buffer>(std::move(buffer));
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate_host(size_t size_bytes, std::string_view purpose) {
  if (imagined_) return ops::CountedMemory::allocate_host(size_bytes);
  const size_t size = std::max<size_t>(size_bytes, 1);
  Status status = kSuccess;
  if (context_->allocate_host != nullptr) {
    void* memory = context_->allocate_host(context_->handle, nullptr, size, 0, &status);
    if (memory != nullptr && status == kSuccess)
      return std::unique_ptr<ops::Buffer>(std::make_unique<HostBuffer>(context_, queue_, nullptr, static_cast<std::byte*>(memory), size));
  }
  MemoryObject* mapped = context_->driver.buffer_create(context_->handle, kMemoryReadWrite | kMemoryAllocHostPointer, size, nullptr, &status);
  void* memory = mapped == nullptr ? nullptr : context_->driver.map(queue_, mapped, kTrue, kMapRead | kMapWrite, 0, size, 0, nullptr, nullptr, &status);
  if (memory == nullptr) {
    if (mapped != nullptr) context_->driver.memory_release(mapped);
    return make_error(ErrorCode::kResourceExhausted, "{}: {} bytes of host memory cannot be had from the driver of {}: {}", purpose, size_bytes, traits_.name, describe(status));
  }
  return std::unique_ptr<ops::Buffer>(std::make_unique<HostBuffer>(context_, queue_, mapped, static_cast<std::byte*>(memory), size));
}

Result<std::unique_ptr<ops::Stream>> Device::make_stream() {
  if (imagined_) return std::unique_ptr<ops::Stream>(std::make_unique<ops::IdleStream>());
  Status status = kSuccess;
  QueueObject* queue = context_->driver.queue_create(context_->handle, context_->device, nullptr, &status);
  if (queue == nullptr) return make_error(ErrorCode::kInternal, "{} makes no queue: {}", traits_.name, describe(status));
  return std::unique_ptr<ops::Stream>(std::make_unique<Stream>(context_, queue));
}

Result<std::unique_ptr<ops::Buffer>> Device::upload(std::span<const int32_t> values, std::string_view purpose) {
  ASSIGN_OR_RETURN(auto buffer, allocate(values.size_bytes(), purpose));
  if (values.empty() || imagined_) return buffer;
  if (options_.inspectable) {
    std::copy_n(reinterpret_cast<const std::byte*>(values.data()), values.size_bytes(), buffer->address());
    return buffer;
  }
  const Status status =
      context_->driver.write(queue_, static_cast<Buffer&>(*buffer).handle(), kTrue, 0, values.size_bytes(), values.data(), 0, nullptr, nullptr);
  if (status != kSuccess) return make_error(ErrorCode::kInternal, "{} cannot be copied to {}: {}", purpose, traits_.name, describe(status));
  return buffer;
}

Result<bool> Device::flushes_half_subnormals() {
  if (imagined_) return false;
  if (flushes_half_subnormals_) return *flushes_half_subnormals_;
  ASSIGN_OR_RETURN(const Function probe, function("dpas_probe", "half_subnormals", fmt::format("-cl-std=CL3.0 -DACTIVATION_BF16{}", emulation())));
  ASSIGN_OR_RETURN(const auto buffer, allocate(sizeof(int32_t), "the probe of half subnormals"));
  ASSIGN_OR_RETURN(const auto stream, make_stream());
  opencl_stream(*stream).launch(probe, {{1, 1, 1}, {16, 1, 1}}, place_in(*buffer, 0));
  int32_t flushed = 0;
  stream->copy_to_host({buffer.get(), 0, DType::kI32, Shape{1}}, &flushed);
  RETURN_IF_ERROR(stream->finish());
  if (flushed != 0) log_warning("the matrix units of {} take half subnormals for zeros: FP8 weights are scaled before they are multiplied", traits_.name);
  flushes_half_subnormals_ = flushed != 0;
  return *flushes_half_subnormals_;
}

Result<Function> Device::function(std::string_view unit, const char* name, std::string_view definitions) {
  if (imagined_) return Function{nullptr, name};
  const std::string key = fmt::format("{} {}", unit, definitions);
  auto program = programs_.find(key);
  if (program == programs_.end()) {
    ASSIGN_OR_RETURN(ProgramObject * handle, build(unit, definitions));
    program = programs_.emplace(key, Program{handle, {}}).first;
  }
  auto& kernels = program->second.kernels;
  auto found = kernels.find(name);
  if (found == kernels.end()) {
    Status status = kSuccess;
    KernelObject* handle = context_->driver.kernel_create(program->second.handle, name, &status);
    if (handle == nullptr) return make_error(ErrorCode::kInternal, "the OpenCL source '{}' has no kernel '{}': {}", unit, name, describe(status));
    found = kernels.emplace(name, handle).first;
  }
  return Function{found->second, found->first.c_str()};
}

std::vector<std::string> Device::programs() const {
  std::vector<std::string> names;
  for (const auto& [name, program] : programs_) names.push_back(name);
  return names;
}

namespace {
/// The version that is meant where definitions name none.
std::string_view version_beside(std::string_view definitions) { return definitions.find("-cl-std=") == std::string_view::npos ? "-cl-std=CL1.2" : ""; }
}  // namespace

Result<ProgramObject*> Device::build(std::string_view unit, std::string_view definitions) {
  ASSIGN_OR_RETURN(std::string source, unit_source(unit));
  if (options_.edit_source) options_.edit_source(unit, source);
  std::string options(version_beside(definitions));
  if (exact_division_) options += " -cl-fp32-correctly-rounded-divide-sqrt";
  if (!definitions.empty()) options += fmt::format("{}{}", options.empty() ? "" : " ", definitions);
  if (const std::string_view binary = binary_of(unit, definitions); !binary.empty()) {
    if (ProgramObject* program = take_binary(binary, options); program != nullptr) return program;
    if (!std::exchange(binary_refused_, true))
      log_warning("{} takes no machine code that this program brings along, of '{}' first (driver {}); the driver compiles what it does not take", traits_.name, unit, driver_version_);
  }
  if (options_.program_cache.empty()) return build_from(source, options, unit);
  const std::string made_for = fmt::format("{}\n{}\n{}\n{}\n", platform_text(context_->driver, context_->platform, kPlatformVersion), traits_.name, driver_version_, options);
  const uint64_t high = fnv1a(source, fnv1a(made_for)), low = hash_combine(fnv1a(made_for, high), source.size());
  const std::string path = fmt::format("{}/{}-{:016x}{:016x}.bin", options_.program_cache, unit, high, low);
  if (ProgramObject* cached = load_cached(path, options); cached != nullptr) return cached;
  ASSIGN_OR_RETURN(ProgramObject * program, build_from(source, options, unit));
  store_cached(path, program);
  return program;
}

Result<ProgramObject*> Device::build_from(const std::string& source, const std::string& options, std::string_view unit) {
  const Driver& driver = context_->driver;
  Status status = kSuccess;
  const char* text = source.c_str();
  const size_t length = source.size();
  ProgramObject* program = driver.program_from_source(context_->handle, 1, &text, &length, &status);
  if (program == nullptr) return make_error(ErrorCode::kInternal, "{} takes no source of '{}': {}", traits_.name, unit, describe(status));
  status = driver.program_build(program, 1, &context_->device, options.c_str(), nullptr, nullptr);
  if (status == kSuccess) return program;
  const std::string log = text_from(
      [&](size_t size, void* value, size_t* size_out) { return driver.program_build_info(program, context_->device, kProgramBuildLog, size, value, size_out); });
  driver.program_release(program);
  log_debug("build log of '{}' ({}):\n{}", unit, options, log);
  return make_error(ErrorCode::kUnsupported, "{} does not build the OpenCL source '{}' ({}): {}", traits_.name, unit, describe(status), first_fault(log));
}

std::string_view Device::binary_of(std::string_view unit, std::string_view definitions) const {
  if (options_.binary) return options_.binary(unit, definitions);
  if (!on_intel_ || options_.emulates_xe2 || options_.edit_source || !exact_division_) return {};  // programs are compiled for devices that divide exactly
  const std::string_view version = version_beside(definitions);
  const std::string wanted = fmt::format("{}{}{}", version, version.empty() || definitions.empty() ? "" : " ", definitions);
  for (const ProgramBinary& program : program_binaries())
    if (program.unit == unit && program.definitions == wanted) return program.bytes;
  return {};
}

ProgramObject* Device::take_binary(std::string_view binary, const std::string& options) const {
  const Driver& driver = context_->driver;
  const size_t length = binary.size();
  const auto* bytes = reinterpret_cast<const unsigned char*>(binary.data());
  Status accepted = kSuccess, status = kSuccess;
  ProgramObject* program = driver.program_from_binary(context_->handle, 1, &context_->device, &length, &bytes, &accepted, &status);
  if (program == nullptr) return nullptr;
  if (accepted == kSuccess && driver.program_build(program, 1, &context_->device, options.c_str(), nullptr, nullptr) == kSuccess) return program;
  driver.program_release(program);
  return nullptr;
}

// A cached program is a file of a checksum and the driver's binary. Whatever is wrong with it, it is built again.

ProgramObject* Device::load_cached(const std::string& path, const std::string& options) const {
  auto file = read_file(path);
  if (!file || file->size() <= sizeof(uint64_t)) return nullptr;
  const std::string_view binary = std::string_view(*file).substr(sizeof(uint64_t));
  uint64_t checksum = 0;
  std::copy_n(file->data(), sizeof checksum, reinterpret_cast<char*>(&checksum));
  if (checksum != fnv1a(binary)) {
    log_warning("{} is damaged; the program is built again", path);
    return nullptr;
  }
  return take_binary(binary, options);
}

void Device::store_cached(const std::string& path, ProgramObject* program) const {
  const Driver& driver = context_->driver;
  size_t size = 0;
  if (driver.program_info(program, kProgramBinarySizes, sizeof size, &size, nullptr) != kSuccess || size == 0) return;
  std::string file(sizeof(uint64_t) + size, '\0');
  auto* binary = reinterpret_cast<unsigned char*>(file.data() + sizeof(uint64_t));
  if (driver.program_info(program, kProgramBinaries, sizeof(unsigned char*), &binary, nullptr) != kSuccess) return;
  const uint64_t checksum = fnv1a(std::string_view(file).substr(sizeof(uint64_t)));
  std::copy_n(reinterpret_cast<const char*>(&checksum), sizeof checksum, file.data());
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (const auto written = write_file(path, file); !written) log_debug("the built program is not kept: {}", written.error().message);
}

Device& opencl_device(ops::Device& device) {
  CHECK(device.traits().platform == ops::Platform::kOpenCl);
  return static_cast<Device&>(device);
}

Result<ops::DeviceTraits> traits_of(std::optional<int> ordinal) {
  ASSIGN_OR_RETURN(const Driver* driver, Driver::load());
  ASSIGN_OR_RETURN(const Found found, pick(*driver, ordinal));
  return read_traits(*driver, found);
}

Result<std::vector<ops::FoundDevice>> list_devices() {
  ASSIGN_OR_RETURN(const Driver* driver, Driver::load());
  ASSIGN_OR_RETURN(const std::vector<Found> found, find_devices(*driver));
  std::vector<ops::FoundDevice> devices;
  for (const Found& f : found) {
    const ops::DeviceTraits traits = read_traits(*driver, f);
    ops::FoundDevice& device = devices.emplace_back();
    device.platform = platform_text(*driver, f.platform, kPlatformName);
    device.platform_version = platform_text(*driver, f.platform, kPlatformVersion);
    device.name = traits.name;
    device.driver_version = text_of(*driver, f.device, kDriverVersion);
    device.is_intel_gpu = f.intel_gpu;
    device.memory_bytes = traits.memory_bytes;
    device.largest_allocation_bytes = number_of<uint64_t>(*driver, f.device, kDeviceMaxAllocation);
    device.why_not_usable = traits.why_no_device_code;
    if (text_of(*driver, f.device, kDeviceExtensions).find("cl_khr_pci_bus_info") == std::string::npos) continue;
    const auto at = number_of<PciBusInfo>(*driver, f.device, kDevicePciBusInfo);
    device.pci_address = fmt::format("{:04x}:{:02x}:{:02x}.{:x}", at.domain, at.bus, at.device, at.function);
  }
  return devices;
}

std::vector<std::string> describe_devices() {
  const auto driver = Driver::load();
  if (!driver) return {fmt::format("opencl  none: {}", driver.error().message)};
  const auto found = find_devices(**driver);
  if (!found) return {fmt::format("opencl  none: {}", found.error().message)};
  std::vector<std::string> lines;
  for (size_t ordinal = 0; ordinal < found->size(); ++ordinal) {
    const Found& f = (*found)[ordinal];
    const ops::DeviceTraits traits = read_traits(**driver, f);
    lines.push_back(fmt::format("opencl:{}  {}, {} compute units, {:.1f} GiB, {}, driver {}{}", ordinal, traits.name, traits.num_cores,
                                static_cast<double>(traits.memory_bytes) / (1ull << 30), platform_text(**driver, f.platform, kPlatformName),
                                text_of(**driver, f.device, kDriverVersion), traits.device_code ? std::string() : fmt::format(" (not usable: {})", traits.why_no_device_code)));
  }
  return lines;
}

}  // namespace quern::opencl
