#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/tensor_map.h"
#include "base/result.h"

// The CUDA driver, opened at run time: the same program runs on machines without it. Types, constants and functions are declared here in our own words, so that
// every build compiles every caller; where NVIDIA's header is installed, driver_abi_test.cpp compares them with it.

namespace quern::cuda {

using Status = int;  // 0: success
using DeviceOrdinal = int;
using DeviceAddress = unsigned long long;
struct ContextObject;
struct ModuleObject;
struct FunctionObject;
struct StreamObject;
struct EventObject;
struct GraphObject;
struct GraphExecObject;

inline constexpr Status kSuccess = 0, kOutOfMemory = 2, kNoDevice = 100, kInvalidDevice = 101, kNoBinaryForGpu = 209, kNotFound = 500, kNotReady = 600,
                        kInvalidPtx = 218, kUnsupportedPtxVersion = 222, kPeerAccessAlreadyEnabled = 704, kSystemDriverMismatch = 803;

inline constexpr int kAttributeNumSms = 16, kAttributeMemoryClockKhz = 36, kAttributeMemoryBusBits = 37, kAttributeL2Bytes = 38, kAttributeComputeMajor = 75,
                     kAttributeComputeMinor = 76, kAttributeMaxSharedBytes = 97, kAttributeSharedBytesPerSm = 81;
inline constexpr int kLimitStackBytes = 0;  // of cuCtxSetLimit
inline constexpr int kFunctionNumRegisters = 4, kFunctionLocalBytes = 3, kFunctionPtxVersion = 5, kFunctionMaxDynamicSharedBytes = 8, kFunctionNonPortableClusters = 14;
inline constexpr unsigned kStreamNonBlocking = 1, kEventDefault = 0, kEventDisableTiming = 2, kHostPortable = 1, kHostDeviceMapped = 2;
inline constexpr int kCaptureThreadLocal = 1;

/// One launch attribute: its id and a value of 64 bytes.
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic;
  } value;
};
inline constexpr int kLaunchCluster = 4, kLaunchProgrammatic = 6;

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  StreamObject* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

inline constexpr int kTensorUint8 = 0, kTensorUint16 = 1, kTensorUint32 = 2, kTensorFloat32 = 7, kTensorBfloat16 = 9;
inline constexpr int kTensorNoInterleave = 0;
inline constexpr int kSwizzleNone = 0, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3;
inline constexpr int kPromotionNone = 0, kPromotionL2_64 = 1, kPromotionL2_128 = 2, kPromotionL2_256 = 3;
inline constexpr int kFillZeros = 0;

// member, name in the library, parameters
#define QUERN_CUDA_DRIVER_FUNCTIONS(X)                                                                                                   \
  X(init, "cuInit", (unsigned flags))                                                                                                    \
  X(driver_version, "cuDriverGetVersion", (int* version))                                                                                \
  X(error_name, "cuGetErrorName", (Status status, const char** name))                                                                    \
  X(error_string, "cuGetErrorString", (Status status, const char** text))                                                                \
  X(device_count, "cuDeviceGetCount", (int* count))                                                                                      \
  X(device_get, "cuDeviceGet", (DeviceOrdinal * device, int ordinal))                                                                    \
  X(device_name, "cuDeviceGetName", (char* name, int length, DeviceOrdinal device))                                                      \
  X(device_pci_address, "cuDeviceGetPCIBusId", (char* address, int length, DeviceOrdinal device))                                        \
  X(device_memory, "cuDeviceTotalMem_v2", (size_t * bytes, DeviceOrdinal device))                                                        \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, DeviceOrdinal device))                                         \
  X(context_retain, "cuDevicePrimaryCtxRetain", (ContextObject * *context, DeviceOrdinal device))                                        \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceOrdinal device))                                                             \
  X(context_set, "cuCtxSetCurrent", (ContextObject * context))                                                                           \
  X(context_set_limit, "cuCtxSetLimit", (int limit, size_t value))                                                                       \
  X(context_create, "cuCtxCreate_v2", (ContextObject * *context, unsigned flags, DeviceOrdinal device))                                  \
  X(context_destroy, "cuCtxDestroy_v2", (ContextObject * context))                                                                       \
  X(can_access_peer, "cuDeviceCanAccessPeer", (int* can, DeviceOrdinal device, DeviceOrdinal peer))                                       \
  X(enable_peer_access, "cuCtxEnablePeerAccess", (ContextObject * peer, unsigned flags))                                                 \
  X(memory_info, "cuMemGetInfo_v2", (size_t * free_bytes, size_t* total_bytes))                                                          \
  X(memory_allocate, "cuMemAlloc_v2", (DeviceAddress * address, size_t bytes))                                                           \
  X(memory_free, "cuMemFree_v2", (DeviceAddress address))                                                                                \
  X(host_allocate, "cuMemHostAlloc", (void** address, size_t bytes, unsigned flags))                                                     \
  X(host_free, "cuMemFreeHost", (void* address))                                                                                         \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (DeviceAddress to, const void* from, size_t bytes, StreamObject* stream))                    \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void* to, DeviceAddress from, size_t bytes, StreamObject* stream))                            \
  X(copy, "cuMemcpyAsync", (DeviceAddress to, DeviceAddress from, size_t bytes, StreamObject* stream))                                   \
  X(fill, "cuMemsetD8Async", (DeviceAddress to, unsigned char value, size_t bytes, StreamObject* stream))                                \
  X(stream_create, "cuStreamCreate", (StreamObject * *stream, unsigned flags))                                                           \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamObject * stream))                                                                       \
  X(stream_synchronize, "cuStreamSynchronize", (StreamObject * stream))                                                                  \
  X(stream_wait_event, "cuStreamWaitEvent", (StreamObject * stream, EventObject* event, unsigned flags))                                 \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (StreamObject * stream, int mode))                                                  \
  X(stream_end_capture, "cuStreamEndCapture", (StreamObject * stream, GraphObject * *graph))                                             \
  X(event_create, "cuEventCreate", (EventObject * *event, unsigned flags))                                                               \
  X(event_destroy, "cuEventDestroy_v2", (EventObject * event))                                                                           \
  X(event_record, "cuEventRecord", (EventObject * event, StreamObject* stream))                                                          \
  X(event_query, "cuEventQuery", (EventObject * event))                                                                                  \
  X(event_synchronize, "cuEventSynchronize", (EventObject * event))                                                                      \
  X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, EventObject* begin, EventObject* end))                                    \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", (GraphExecObject * *exec, GraphObject* graph, unsigned long long flags))           \
  X(graph_destroy, "cuGraphDestroy", (GraphObject * graph))                                                                              \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExecObject * exec))                                                                  \
  X(graph_launch, "cuGraphLaunch", (GraphExecObject * exec, StreamObject* stream))                                                       \
  X(module_load, "cuModuleLoadData", (ModuleObject * *module, const void* image))                                                        \
  X(module_unload, "cuModuleUnload", (ModuleObject * module))                                                                            \
  X(module_function, "cuModuleGetFunction", (FunctionObject * *function, ModuleObject* module, const char* name))                        \
  X(function_attribute, "cuFuncGetAttribute", (int* value, int attribute, FunctionObject* function))                                     \
  X(function_set_attribute, "cuFuncSetAttribute", (FunctionObject * function, int attribute, int value))                                 \
  X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int* blocks, FunctionObject* function, int threads, size_t shared_bytes)) \
  X(occupancy_of_clusters, "cuOccupancyMaxActiveClusters", (int* clusters, FunctionObject* function, const LaunchConfig* config))         \
  X(launch, "cuLaunchKernelEx", (const LaunchConfig* config, FunctionObject* function, void** parameters, void** extra))                 \
  X(tensor_map_tiled, "cuTensorMapEncodeTiled",                                                                                          \
    (TensorMap * map, int type, uint32_t rank, void* address, const uint64_t* extents, const uint64_t* strides, const uint32_t* box,     \
     const uint32_t* element_strides, int interleave, int swizzle, int promotion, int fill))

/// The functions of libcuda that we call.
struct Driver {
#define QUERN_MEMBER(member, name, parameters) Status(*member) parameters = nullptr;
  QUERN_CUDA_DRIVER_FUNCTIONS(QUERN_MEMBER)
#undef QUERN_MEMBER

  /// Opened and initialized once a process; fails in one sentence where there is no driver, an old one, or none that works.
  static Result<const Driver*> load();

  /// "CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered"
  [[nodiscard]] std::string describe(Status status) const;
};

}  // namespace quern::cuda
