#include "backends/cuda/device.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "backends/cuda/device_code.h"
#include "backends/cuda/stream.h"

namespace quern::cuda {

namespace {

constexpr int kOldestArchitecture = 80, kEmulatedArchitecture = 89;

/// What the driver takes for an allocation: pages of 2 MiB, which it shares out among smaller ones (measured: H200, driver for CUDA 13.0, 2026-11-30).
size_t taken_bytes(size_t size_bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  return size_bytes > kPage / 2 ? (size_bytes + kPage - 1) / kPage * kPage : size_bytes;
}

/// Dynamic shared memory that one block may have (CUDA programming guide, compute capabilities).
int max_shared_bytes_of(int architecture) {
  if (architecture == 90 || architecture == 100 || architecture == 103) return 227 << 10;
  return architecture == 80 || architecture == 87 ? 163 << 10 : 99 << 10;
}

/// Memory of one GPU, or host memory that it maps.
class DeviceBuffer final : public ops::Buffer {
 public:
  DeviceBuffer(std::shared_ptr<Context> context, std::byte* address, size_t size_bytes, bool on_host)
      : context_(std::move(context)), address_(address), size_bytes_(size_bytes), on_host_(on_host) {
    context_->allocated_bytes.fetch_add(taken_bytes(size_bytes_), std::memory_order_relaxed);
  }
  ~DeviceBuffer() override {
    context_->allocated_bytes.fetch_sub(taken_bytes(size_bytes_), std::memory_order_relaxed);
    if (address_ == nullptr) return;
    context_->make_current();
    if (on_host_)
      context_->driver.host_free(address_);
    else
      context_->driver.memory_free(reinterpret_cast<DeviceAddress>(address_));
  }
  [[nodiscard]] std::byte* address() const override { return address_; }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }

 private:
  std::shared_ptr<Context> context_;
  std::byte* address_;
  size_t size_bytes_;
  bool on_host_;
};

/// Page-locked host memory, not counted as the device's.
class HostBuffer final : public ops::Buffer {
 public:
  explicit HostBuffer(PinnedMemory memory, std::shared_ptr<Context> context) : context_(std::move(context)), memory_(std::move(memory)) {
    context_->add_host_memory(memory_.data(), memory_.size_bytes());
  }
  ~HostBuffer() override { context_->remove_host_memory(memory_.data()); }
  [[nodiscard]] std::byte* address() const override { return memory_.data(); }
  [[nodiscard]] size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  std::shared_ptr<Context> context_;
  PinnedMemory memory_;
};

int attribute(const Driver& driver, DeviceOrdinal device, int which) {
  int value = 0;
  return driver.device_attribute(&value, which, device) == kSuccess ? value : 0;
}

ops::DeviceTraits read_traits(const Driver& driver, DeviceOrdinal device) {
  ops::DeviceTraits traits;
  traits.platform = ops::Platform::kCuda;
  char name[256] = "";
  if (driver.device_name(name, sizeof name, device) == kSuccess) traits.name = name;
  size_t bytes = 0;
  if (driver.device_memory(&bytes, device) == kSuccess) traits.memory_bytes = bytes;
  // Two transfers a clock on a bus of so many bits.
  traits.read_bandwidth = 2e3 * attribute(driver, device, kAttributeMemoryClockKhz) * attribute(driver, device, kAttributeMemoryBusBits) / 8.0;
  traits.num_cores = attribute(driver, device, kAttributeNumSms);
  traits.architecture = attribute(driver, device, kAttributeComputeMajor) * 10 + attribute(driver, device, kAttributeComputeMinor);
  traits.fp8_matrix = traits.architecture >= 89;
  traits.overhead_bytes = kUsualContextBytes + kCodeAndGraphBytes;
  if (const auto covered = build_covers(traits.architecture); !covered) {
    traits.device_code = false;
    traits.why_no_device_code = covered.error().message;
  }
  return traits;
}

/// Of the current context's GPU, by whomever.
std::optional<uint64_t> bytes_in_use(const Driver& driver) {
  size_t free_bytes = 0, total_bytes = 0;
  if (driver.memory_info(&free_bytes, &total_bytes) != kSuccess) return std::nullopt;
  return total_bytes - free_bytes;
}

/// What a context takes of the GPU beside what is allocated in it; `context` is current and may be new.
uint64_t context_bytes(const Driver& driver, DeviceOrdinal device, ContextObject* context) {
  constexpr uint64_t kMostBytes = uint64_t{640} << 20;
  const std::optional<uint64_t> in_use = bytes_in_use(driver);
  if (!in_use) return kUsualContextBytes;
  if (*in_use <= kMostBytes) return *in_use;  // there is hardly anything else
  // Others are at work on it: a second context takes what the first did.
  ContextObject* second = nullptr;
  if (driver.context_create(&second, 0, device) != kSuccess) return kUsualContextBytes;
  driver.context_set_limit(kLimitStackBytes, kStackBytes);
  const uint64_t with_second = bytes_in_use(driver).value_or(*in_use);
  driver.context_destroy(second);
  driver.context_set(context);
  return with_second > *in_use && with_second - *in_use <= kMostBytes ? with_second - *in_use : kUsualContextBytes;
}

}  // namespace

void Context::add_host_memory(const std::byte* address, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  host_memory_.emplace(address, size_bytes);
}
void Context::remove_host_memory(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  host_memory_.erase(address);
}
bool Context::is_page_locked(const void* address, size_t size_bytes) const {
  const auto* begin = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex_);
  auto after = host_memory_.upper_bound(begin);
  if (after == host_memory_.begin()) return false;
  const auto& [start, size] = *--after;
  return begin + size_bytes <= start + size;
}

void Context::make_current() const {
  thread_local ContextObject* current = nullptr;
  if (current == handle) return;
  if (driver.context_set(handle) == kSuccess) current = handle;
}

Result<std::unique_ptr<Device>> Device::open(int ordinal, const DeviceOptions& options) {
  ASSIGN_OR_RETURN(const Driver* driver, Driver::load());
  int count = 0;
  if (driver->device_count(&count) != kSuccess || ordinal >= count)
    return make_error(ErrorCode::kUnsupported, "there {} {} NVIDIA GPU{} here, counted from 0", count == 1 ? "is" : "are", count, count == 1 ? "" : "s");
  DeviceOrdinal device = 0;
  if (const Status status = driver->device_get(&device, ordinal); status != kSuccess)
    return make_error(ErrorCode::kUnsupported, "the NVIDIA driver refuses the GPU: {}", driver->describe(status));
  ops::DeviceTraits traits = read_traits(*driver, device);
  traits.fp8_matrix = traits.fp8_matrix && options.quantizes_activations;
  if (traits.architecture < kOldestArchitecture)
    return make_error(ErrorCode::kUnsupported, "{} is sm_{}; sm_{} and newer are supported", traits.name, traits.architecture, kOldestArchitecture);
  if (options.emulates_workstation) {
    if (traits.architecture <= kEmulatedArchitecture) return make_error(ErrorCode::kUnsupported, "{} is sm_{}, which emulates no sm_{}", traits.name, traits.architecture, kEmulatedArchitecture);
    traits.name += fmt::format(", emulating sm_{}", kEmulatedArchitecture);
    traits.architecture = kEmulatedArchitecture;
  }
  if (!traits.device_code) return make_error(ErrorCode::kUnsupported, "{}: {}", traits.name, traits.why_no_device_code);
  ContextObject* handle = nullptr;
  if (const Status status = driver->context_retain(&handle, device); status != kSuccess)
    return make_error(ErrorCode::kUnsupported, "{} cannot be used: {}", traits.name, driver->describe(status));
  auto context = std::make_shared<Context>(*driver, device, handle, traits.name);
  context->make_current();
  driver->context_set_limit(kLimitStackBytes, kStackBytes);
  traits.overhead_bytes = context_bytes(*driver, device, handle) + kCodeAndGraphBytes;
  return std::unique_ptr<Device>(new Device(std::move(context), std::move(traits), options));
}

Device::Device(std::shared_ptr<Context> context, ops::DeviceTraits traits, const DeviceOptions& options)
    : context_(std::move(context)),
      traits_(std::move(traits)),
      options_(options),
      max_shared_bytes_(attribute(context_->driver, context_->device, kAttributeMaxSharedBytes)),
      shared_bytes_per_sm_(attribute(context_->driver, context_->device, kAttributeSharedBytesPerSm)),
      l2_bytes_(attribute(context_->driver, context_->device, kAttributeL2Bytes)) {
  if (!options.emulates_workstation) return;
  max_shared_bytes_ = max_shared_bytes_of(traits_.architecture);
  shared_bytes_per_sm_ = max_shared_bytes_ + kReservedSharedBytes;
}

Device::Device(ops::DeviceTraits traits)
    : traits_(std::move(traits)),
      imagined_(std::in_place),
      max_shared_bytes_(max_shared_bytes_of(traits_.architecture)),
      shared_bytes_per_sm_(max_shared_bytes_ + kReservedSharedBytes) {}

std::unique_ptr<Device> Device::imagine(ops::DeviceTraits traits) { return std::unique_ptr<Device>(new Device(std::move(traits))); }

Device::~Device() {
  if (imagined_) return;
  context_->make_current();
  for (const auto& [unit, module] : modules_) context_->driver.module_unload(module);
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate(size_t size_bytes, std::string_view purpose) {
  if (imagined_) return imagined_->allocate(size_bytes, taken_bytes(size_bytes));
  const Driver& driver = context_->driver;
  context_->make_current();
  if (size_bytes == 0) return std::unique_ptr<ops::Buffer>(std::make_unique<DeviceBuffer>(context_, nullptr, 0, false));
  void* host = nullptr;
  DeviceAddress address = 0;
  const Status status = options_.inspectable ? driver.host_allocate(&host, size_bytes, kHostPortable | kHostDeviceMapped)
                                             : driver.memory_allocate(&address, size_bytes);
  if (status == kOutOfMemory) {
    size_t free_bytes = 0, total_bytes = 0;
    driver.memory_info(&free_bytes, &total_bytes);
    return make_error(ErrorCode::kResourceExhausted, "{} needs {} bytes on {}, which has {} free; {} are already allocated", purpose, size_bytes, traits_.name,
                      free_bytes, allocated_bytes());
  }
  if (status != kSuccess)
    return make_error(ErrorCode::kInternal, "{} ({} bytes) cannot be allocated on {}: {}", purpose, size_bytes, traits_.name, driver.describe(status));
  auto* start = options_.inspectable ? static_cast<std::byte*>(host) : reinterpret_cast<std::byte*>(address);
  auto buffer = std::make_unique<DeviceBuffer>(context_, start, size_bytes, options_.inspectable);
  if (options_.inspectable) {
    std::fill_n(start, size_bytes, std::byte{0});
  } else {
    Status cleared = driver.fill(address, 0, size_bytes, nullptr);
    if (cleared == kSuccess) cleared = driver.stream_synchronize(nullptr);
    if (cleared != kSuccess) return make_error(ErrorCode::kInternal, "{} cannot be cleared on {}: {}", purpose, traits_.name, driver.describe(cleared));
  }
  return std::unique_ptr<ops::Buffer>(std::move(buffer));
}

std::optional<uint64_t> Device::used_bytes() const {
  if (imagined_) return std::nullopt;
  context_->make_current();
  return bytes_in_use(context_->driver);
}

Result<std::unique_ptr<ops::Buffer>> Device::allocate_host(size_t size_bytes, std::string_view purpose) {
  if (imagined_) return ops::CountedMemory::allocate_host(size_bytes);
  auto memory = PinnedMemory::allocate(context_, std::max<size_t>(size_bytes, 1));
  if (!memory) return memory.error().with_context(purpose);
  return std::unique_ptr<ops::Buffer>(std::make_unique<HostBuffer>(std::move(*memory), context_));
}

Result<std::unique_ptr<ops::Stream>> Device::make_stream() {
  if (imagined_) return std::unique_ptr<ops::Stream>(std::make_unique<ops::IdleStream>());
  ASSIGN_OR_RETURN(const auto copy_small, function<CopyPiece>("state_copy", "copy_small"));
  std::vector<Event> marks;
  for (int i = 0; i < ops::Stream::kMaxMarks; ++i) {
    ASSIGN_OR_RETURN(Event mark, Event::create(context_, false));
    marks.push_back(std::move(mark));
  }
  context_->make_current();
  StreamObject* stream = nullptr;
  if (const Status status = context_->driver.stream_create(&stream, kStreamNonBlocking); status != kSuccess)
    return make_error(ErrorCode::kInternal, "{} makes no stream: {}", traits_.name, context_->driver.describe(status));
  return std::unique_ptr<ops::Stream>(std::make_unique<Stream>(context_, stream, std::move(marks), options_.inspectable, copy_small));
}

Result<std::unique_ptr<ops::Buffer>> Device::upload(std::span<const int32_t> values, std::string_view purpose) {
  ASSIGN_OR_RETURN(auto buffer, allocate(values.size_bytes(), purpose));
  if (values.empty() || imagined_) return buffer;
  const Driver& driver = context_->driver;
  Status status = driver.copy_to_device(reinterpret_cast<DeviceAddress>(buffer->address()), values.data(), values.size_bytes(), nullptr);
  if (status == kSuccess) status = driver.stream_synchronize(nullptr);
  if (status != kSuccess) return make_error(ErrorCode::kInternal, "{} cannot be copied to {}: {}", purpose, traits_.name, driver.describe(status));
  return buffer;
}

Result<std::shared_ptr<ops::Buffer>> Device::shared_words(std::string_view name, size_t words, int32_t value) {
  std::weak_ptr<ops::Buffer>& known = shared_words_[std::string(name)];
  std::shared_ptr<ops::Buffer> buffer = known.lock();
  if (buffer == nullptr) {
    ASSIGN_OR_RETURN(buffer, upload(std::vector<int32_t>(words, value), name));
    known = buffer;
  }
  CHECK(buffer->size_bytes() >= words * sizeof(int32_t));
  return buffer;
}

Result<FunctionObject*> Device::find_function(std::string_view unit, const char* name, int shared_bytes) {
  if (imagined_) return static_cast<FunctionObject*>(nullptr);
  const Driver& driver = context_->driver;
  context_->make_current();
  auto module = modules_.find(unit);
  if (module == modules_.end()) {
    const auto codes = device_code();
    const auto code = std::find_if(codes.begin(), codes.end(), [&](const DeviceCode& c) { return c.unit == unit; });
    if (code == codes.end()) return make_error(ErrorCode::kUnsupported, "this build has no device code '{}'", unit);
    ModuleObject* loaded = nullptr;
    if (const Status status = driver.module_load(&loaded, code->image.data()); status != kSuccess)
      return make_error(ErrorCode::kUnsupported, "{} does not load the device code '{}': {}", traits_.name, unit, driver.describe(status));
    module = modules_.emplace(unit, loaded).first;
  }
  FunctionObject* function = nullptr;
  if (const Status status = driver.module_function(&function, module->second, name); status != kSuccess)
    return make_error(ErrorCode::kInternal, "the device code '{}' has no kernel '{}': {}", unit, name, driver.describe(status));
  int ptx_version = 0;
  if (options_.emulates_workstation && driver.function_attribute(&ptx_version, kFunctionPtxVersion, function) == kSuccess && ptx_version > kEmulatedArchitecture)
    return make_error(ErrorCode::kUnsupported, "kernel '{}' is machine code of this card and not of sm_{}: an emulation needs CUDA_FORCE_PTX_JIT=1 in the environment", name, kEmulatedArchitecture);
  int local_bytes = 0;
  if (driver.function_attribute(&local_bytes, kFunctionLocalBytes, function) == kSuccess && static_cast<size_t>(local_bytes) > stack_bytes_) {
    stack_bytes_ = static_cast<size_t>(local_bytes);
    driver.context_set_limit(kLimitStackBytes, stack_bytes_);
  }
  if (shared_bytes > 48 << 10) {
    if (shared_bytes > max_shared_bytes_)
      return make_error(ErrorCode::kUnsupported, "kernel '{}' needs {} bytes of shared memory, {} has {}", name, shared_bytes, traits_.name, max_shared_bytes_);
    if (const Status status = driver.function_set_attribute(function, kFunctionMaxDynamicSharedBytes, shared_bytes); status != kSuccess)
      return make_error(ErrorCode::kInternal, "kernel '{}' gets no {} bytes of shared memory: {}", name, shared_bytes, driver.describe(status));
  }
  return function;
}

int Device::clusters_at_a_time(FunctionObject* function, const LaunchShape& shape) const {
  if (imagined_) return 0;
  context_->make_current();
  LaunchAttribute attribute{};
  attribute.id = kLaunchCluster;
  attribute.value.cluster = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  const LaunchConfig config{{shape.cluster.x, shape.cluster.y, shape.cluster.z}, {shape.block.x, shape.block.y, shape.block.z}, shape.shared_bytes, nullptr, &attribute, 1};
  int clusters = 0;
  return context_->driver.occupancy_of_clusters(&clusters, function, &config) == kSuccess ? clusters : 0;
}

Device& cuda_device(ops::Device& device) {
  CHECK(device.traits().platform == ops::Platform::kCuda);
  return static_cast<Device&>(device);
}

std::vector<std::string> describe_devices() {
  const auto driver = Driver::load();
  if (!driver) return {fmt::format("cuda    none: {}", driver.error().message)};
  int version = 0, count = 0;
  (*driver)->driver_version(&version);
  if ((*driver)->device_count(&count) != kSuccess || count == 0) return {"cuda    none: the NVIDIA driver finds no GPU"};
  std::vector<std::string> lines;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    DeviceOrdinal device = 0;
    if ((*driver)->device_get(&device, ordinal) != kSuccess) continue;
    const ops::DeviceTraits traits = read_traits(**driver, device);
    lines.push_back(fmt::format("cuda:{}  {}, sm_{}, {} SMs, {:.1f} GiB, driver for CUDA {}.{}{}", ordinal, traits.name, traits.architecture, traits.num_cores,
                                static_cast<double>(traits.memory_bytes) / (1ull << 30), version / 1000, version % 1000 / 10,
                                traits.device_code ? ", " + code_for(code_architectures(), traits.architecture) : fmt::format(" (not usable: {})", traits.why_no_device_code)));
  }
  return lines;
}

Result<std::vector<ops::FoundDevice>> list_devices() {
  ASSIGN_OR_RETURN(const Driver* driver, Driver::load());
  int version = 0, count = 0;
  driver->driver_version(&version);
  if (driver->device_count(&count) != kSuccess || count == 0) return make_error(ErrorCode::kUnsupported, "the NVIDIA driver finds no GPU");
  std::vector<ops::FoundDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    ops::FoundDevice& device = devices.emplace_back();
    device.platform = "NVIDIA";
    device.platform_version = fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10);
    DeviceOrdinal handle = 0;
    if (const Status status = driver->device_get(&handle, ordinal); status != kSuccess) {
      device.why_not_usable = driver->describe(status);
      continue;
    }
    const ops::DeviceTraits traits = read_traits(*driver, handle);
    device.name = traits.name;
    device.memory_bytes = traits.memory_bytes;
    device.why_not_usable = traits.why_no_device_code;
    std::array<char, 32> address{};
    if (driver->device_pci_address(address.data(), static_cast<int>(address.size()), handle) == kSuccess) device.pci_address = address.data();
    std::transform(device.pci_address.begin(), device.pci_address.end(), device.pci_address.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  }
  return devices;
}

}  // namespace quern::cuda
