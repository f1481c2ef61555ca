#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/result.h"

// OpenCL 3.0 through the ICD loader, opened at run time: the same program runs on machines without it. Types, constants and functions are declared here in our own
// words, so that every build compiles every caller; where Khronos' headers are installed, opencl_driver_abi_test.cpp compares them with these.

namespace quern::opencl {

using Status = int32_t;  // 0: success, negative: an error
struct PlatformObject;
struct DeviceObject;
struct ContextObject;
struct QueueObject;
struct MemoryObject;
struct ProgramObject;
struct KernelObject;
struct EventObject;

inline constexpr Status kSuccess = 0, kDeviceNotFound = -1, kMemoryAllocationFailure = -4, kOutOfResources = -5, kOutOfHostMemory = -6,
                        kPlatformNotFound = -1001;

inline constexpr uint64_t kDeviceTypeAll = 0xffffffff, kDeviceTypeCpu = 1 << 1, kDeviceTypeGpu = 1 << 2;

inline constexpr uint32_t kPlatformName = 0x0902, kPlatformVersion = 0x0901;
inline constexpr uint32_t kDeviceType = 0x1000, kDeviceVendorId = 0x1001, kDeviceMaxComputeUnits = 0x1002, kDeviceMaxAllocation = 0x1010,
                          kDeviceSingleFpConfig = 0x101B, kDeviceGlobalMemory = 0x101F, kDeviceLocalMemory = 0x1023, kDeviceName = 0x102B, kDeviceVendor = 0x102C,
                          kDriverVersion = 0x102D, kDeviceVersion = 0x102F, kDeviceExtensions = 0x1030, kDeviceDoubleFpConfig = 0x1032, kDeviceIpVersionIntel = 0x4250,
                          kDevicePciBusInfo = 0x410F;
/// What kDevicePciBusInfo gives.
struct PciBusInfo {
  uint32_t domain, bus, device, function;
};
inline constexpr uint64_t kFpCorrectlyRoundedDivide = 1 << 7;

inline constexpr uint64_t kMemoryReadWrite = 1 << 0, kMemoryUseHostPointer = 1 << 3, kMemoryAllocHostPointer = 1 << 4, kMemoryUnrestrictedSizeIntel = 1 << 23;
inline constexpr uint64_t kMapRead = 1 << 0, kMapWrite = 1 << 1;

inline constexpr uint32_t kProgramBinarySizes = 0x1165, kProgramBinaries = 0x1166, kProgramBuildLog = 0x1183;
inline constexpr uint32_t kTrue = 1, kFalse = 0;
inline constexpr int32_t kComplete = 0;  // status of an event; negative: an error

inline constexpr uint32_t kVendorIntel = 0x8086;

// member, name in the library, result, parameters
#define QUERN_OPENCL_FUNCTIONS(X)                                                                                                                                       \
  X(platform_ids, "clGetPlatformIDs", Status, (uint32_t num_entries, PlatformObject** platforms, uint32_t* num_platforms))                                              \
  X(platform_info, "clGetPlatformInfo", Status, (PlatformObject * platform, uint32_t what, size_t size, void* value, size_t* size_out))                                  \
  X(extension_function, "clGetExtensionFunctionAddressForPlatform", void*, (PlatformObject * platform, const char* name))                                                 \
  X(device_ids, "clGetDeviceIDs", Status, (PlatformObject * platform, uint64_t type, uint32_t num_entries, DeviceObject** devices, uint32_t* num_devices))               \
  X(device_info, "clGetDeviceInfo", Status, (DeviceObject * device, uint32_t what, size_t size, void* value, size_t* size_out))                                          \
  X(context_create, "clCreateContext", ContextObject*,                                                                                                                  \
    (const intptr_t* properties, uint32_t num_devices, DeviceObject* const* devices, void (*notify)(const char*, const void*, size_t, void*), void* data, Status* status)) \
  X(context_release, "clReleaseContext", Status, (ContextObject * context))                                                                                             \
  X(queue_create, "clCreateCommandQueueWithProperties", QueueObject*,                                                                                                   \
    (ContextObject * context, DeviceObject * device, const uint64_t* properties, Status* status))                                                                       \
  X(queue_retain, "clRetainCommandQueue", Status, (QueueObject * queue))                                                                                                \
  X(queue_release, "clReleaseCommandQueue", Status, (QueueObject * queue))                                                                                              \
  X(buffer_create, "clCreateBuffer", MemoryObject*, (ContextObject * context, uint64_t flags, size_t size, void* host, Status* status))                                  \
  X(memory_release, "clReleaseMemObject", Status, (MemoryObject * memory))                                                                                              \
  X(program_from_source, "clCreateProgramWithSource", ProgramObject*,                                                                                                   \
    (ContextObject * context, uint32_t count, const char** strings, const size_t* lengths, Status* status))                                                             \
  X(program_from_binary, "clCreateProgramWithBinary", ProgramObject*,                                                                                                   \
    (ContextObject * context, uint32_t num_devices, DeviceObject* const* devices, const size_t* lengths, const unsigned char** binaries, Status* binary_status,         \
     Status* status))                                                                                                                                                   \
  X(program_build, "clBuildProgram", Status,                                                                                                                            \
    (ProgramObject * program, uint32_t num_devices, DeviceObject* const* devices, const char* options, void (*notify)(ProgramObject*, void*), void* data))               \
  X(program_info, "clGetProgramInfo", Status, (ProgramObject * program, uint32_t what, size_t size, void* value, size_t* size_out))                                      \
  X(program_build_info, "clGetProgramBuildInfo", Status,                                                                                                                \
    (ProgramObject * program, DeviceObject * device, uint32_t what, size_t size, void* value, size_t* size_out))                                                        \
  X(program_release, "clReleaseProgram", Status, (ProgramObject * program))                                                                                             \
  X(kernel_create, "clCreateKernel", KernelObject*, (ProgramObject * program, const char* name, Status* status))                                                         \
  X(kernel_release, "clReleaseKernel", Status, (KernelObject * kernel))                                                                                                 \
  X(kernel_set_argument, "clSetKernelArg", Status, (KernelObject * kernel, uint32_t index, size_t size, const void* value))                                              \
  X(launch, "clEnqueueNDRangeKernel", Status,                                                                                                                           \
    (QueueObject * queue, KernelObject * kernel, uint32_t dimensions, const size_t* offset, const size_t* global, const size_t* local, uint32_t num_events,              \
     EventObject* const* events, EventObject** event))                                                                                                                  \
  X(read, "clEnqueueReadBuffer", Status,                                                                                                                                \
    (QueueObject * queue, MemoryObject * memory, uint32_t blocking, size_t offset, size_t size, void* to, uint32_t num_events, EventObject* const* events,               \
     EventObject** event))                                                                                                                                              \
  X(write, "clEnqueueWriteBuffer", Status,                                                                                                                              \
    (QueueObject * queue, MemoryObject * memory, uint32_t blocking, size_t offset, size_t size, const void* from, uint32_t num_events, EventObject* const* events,       \
     EventObject** event))                                                                                                                                              \
  X(copy, "clEnqueueCopyBuffer", Status,                                                                                                                                \
    (QueueObject * queue, MemoryObject * from, MemoryObject * to, size_t from_offset, size_t to_offset, size_t size, uint32_t num_events, EventObject* const* events,    \
     EventObject** event))                                                                                                                                              \
  X(fill, "clEnqueueFillBuffer", Status,                                                                                                                                \
    (QueueObject * queue, MemoryObject * memory, const void* pattern, size_t pattern_size, size_t offset, size_t size, uint32_t num_events,                              \
     EventObject* const* events, EventObject** event))                                                                                                                  \
  X(map, "clEnqueueMapBuffer", void*,                                                                                                                                   \
    (QueueObject * queue, MemoryObject * memory, uint32_t blocking, uint64_t flags, size_t offset, size_t size, uint32_t num_events, EventObject* const* events,         \
     EventObject** event, Status* status))                                                                                                                              \
  X(unmap, "clEnqueueUnmapMemObject", Status,                                                                                                                           \
    (QueueObject * queue, MemoryObject * memory, void* address, uint32_t num_events, EventObject* const* events, EventObject** event))                                  \
  X(mark, "clEnqueueMarkerWithWaitList", Status, (QueueObject * queue, uint32_t num_events, EventObject* const* events, EventObject** event))                            \
  X(flush, "clFlush", Status, (QueueObject * queue))                                                                                                                    \
  X(finish, "clFinish", Status, (QueueObject * queue))                                                                                                                  \
  X(user_event_create, "clCreateUserEvent", EventObject*, (ContextObject * context, Status* status))                                                                    \
  X(user_event_set, "clSetUserEventStatus", Status, (EventObject * event, int32_t execution_status))                                                                    \
  X(wait_for_events, "clWaitForEvents", Status, (uint32_t num_events, EventObject* const* events))                                                                      \
  X(event_retain, "clRetainEvent", Status, (EventObject * event))                                                                                                       \
  X(event_release, "clReleaseEvent", Status, (EventObject * event))

/// The functions of libOpenCL that we call.
struct Driver {
#define QUERN_MEMBER(member, name, result, parameters) result(*member) parameters = nullptr;
  QUERN_OPENCL_FUNCTIONS(QUERN_MEMBER)
#undef QUERN_MEMBER

  /// Opened once a process; fails in one sentence where there is no loader, or one that is too old.
  static Result<const Driver*> load();
};

/// "CL_OUT_OF_RESOURCES (-5)"
std::string describe(Status status);

}  // namespace quern::opencl
