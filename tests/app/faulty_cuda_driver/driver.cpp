#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "backends/cuda/driver.h"

// A libcuda.so.1 with faults, for machines without a GPU. It finds one of sm_80, whose memory is the host's and whose kernels do nothing. QUERN_CUDA_FAULT says what is wrong with it; each fault stands at the
// function that shows it. Functions that have no body here succeed and do nothing (rest.cpp); a library without those is a driver that lacks functions.

namespace quern::cuda {
namespace {

constexpr size_t kMemoryBytes = size_t{8} << 30;
constexpr Status kDeviceUnavailable = 46, kIllegalAddress = 700, kLaunchOutOfResources = 701;

bool is(std::string_view fault) {
  const char* chosen = std::getenv("QUERN_CUDA_FAULT");
  return chosen != nullptr && fault == chosen;
}

std::atomic<bool> has_launched = false;
Status at_fence() { return has_launched && is("hang-up") ? kIllegalAddress : kSuccess; }

/// Something to point at: nobody looks into the driver's objects.
template <class Object>
void give(Object** object) {
  static char nothing;
  *object = reinterpret_cast<Object*>(&nothing);
}
void* take_memory(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

Status cuInit(unsigned) { return is("no-gpu") ? kNoDevice : is("mismatch") ? kSystemDriverMismatch : kSuccess; }
Status cuDriverGetVersion(int* version) {
  *version = is("old-driver") ? 11040 : 20000;
  return kSuccess;
}
Status cuGetErrorName(Status status, const char** name) {
  *name = status == kOutOfMemory            ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == kDeviceUnavailable    ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
          : status == kNoBinaryForGpu       ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : status == kIllegalAddress       ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : status == kLaunchOutOfResources ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
          : status == kSystemDriverMismatch ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
                                            : nullptr;
  return kSuccess;
}
Status cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
Status cuDeviceGetName(char* name, int length, DeviceOrdinal) {
  std::strncpy(name, "Faulty GPU", static_cast<size_t>(length));
  return kSuccess;
}
Status cuDeviceTotalMem_v2(size_t* bytes, DeviceOrdinal) {
  *bytes = kMemoryBytes;
  return kSuccess;
}
Status cuDeviceGetAttribute(int* value, int which, DeviceOrdinal) {
  *value = which == kAttributeComputeMajor       ? (is("old-gpu") ? 7 : 8)
           : which == kAttributeComputeMinor     ? (is("old-gpu") ? 5 : 0)
           : which == kAttributeNumSms           ? 108
           : which == kAttributeMaxSharedBytes   ? 163 << 10
           : which == kAttributeSharedBytesPerSm ? 164 << 10
                                                 : 1 << 20;
  return kSuccess;
}
Status cuDevicePrimaryCtxRetain(ContextObject** context, DeviceOrdinal) {
  give(context);
  return is("busy") ? kDeviceUnavailable : kSuccess;
}

Status cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = is("no-memory") ? size_t{1} << 20 : kMemoryBytes;
  *total_bytes = kMemoryBytes;
  return kSuccess;
}
Status cuMemAlloc_v2(DeviceAddress* address, size_t bytes) {
  if (is("no-memory")) return kOutOfMemory;
  *address = reinterpret_cast<DeviceAddress>(take_memory(bytes));
  return kSuccess;
}
Status cuMemFree_v2(DeviceAddress address) {
  std::free(pointer(address));
  return kSuccess;
}
Status cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  *address = take_memory(bytes);
  return kSuccess;
}
Status cuMemFreeHost(void* address) {
  std::free(address);
  return kSuccess;
}
Status cuMemcpyHtoDAsync_v2(DeviceAddress to, const void* from, size_t bytes, StreamObject*) {
  std::memcpy(pointer(to), from, bytes);
  return kSuccess;
}
Status cuMemcpyDtoHAsync_v2(void* to, DeviceAddress from, size_t bytes, StreamObject*) {
  std::memcpy(to, pointer(from), bytes);
  return kSuccess;
}
Status cuMemcpyAsync(DeviceAddress to, DeviceAddress from, size_t bytes, StreamObject*) {
  std::memcpy(pointer(to), pointer(from), bytes);
  return kSuccess;
}
Status cuMemsetD8Async(DeviceAddress to, unsigned char value, size_t bytes, StreamObject*) {
  std::memset(pointer(to), value, bytes);
  return kSuccess;
}

Status cuStreamCreate(StreamObject** stream, unsigned) {
  give(stream);
  return kSuccess;
}
Status cuStreamSynchronize(StreamObject*) { return at_fence(); }
Status cuEventCreate(EventObject** event, unsigned) {
  give(event);
  return kSuccess;
}
Status cuEventSynchronize(EventObject*) { return at_fence(); }

Status cuModuleLoadData(ModuleObject** module, const void*) {
  give(module);
  return is("foreign-code") ? kNoBinaryForGpu : kSuccess;
}
Status cuModuleGetFunction(FunctionObject** function, ModuleObject*, const char*) {
  give(function);
  return kSuccess;
}
Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionObject*, int, size_t) {
  *blocks = 1;
  return kSuccess;
}
Status cuLaunchKernelEx(const LaunchConfig*, FunctionObject*, void**, void**) {
  has_launched = true;
  return is("launch") ? kLaunchOutOfResources : kSuccess;
}

}  // extern "C"
}  // namespace quern::cuda
