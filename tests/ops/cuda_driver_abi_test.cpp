// Our declarations of the driver's types against NVIDIA's, where its header is installed.
#include "backends/cuda/driver.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

#include <cstddef>
#include <type_traits>

namespace quern::cuda {
namespace {

static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) && offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig) && offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream) &&
              offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs) && offsetof(LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) == alignof(CUtensorMap));
static_assert(sizeof(DeviceAddress) == sizeof(CUdeviceptr) && sizeof(DeviceOrdinal) == sizeof(CUdevice) && sizeof(Status) == sizeof(CUresult));

template <auto kOurs, auto kTheirs>
constexpr bool same = static_cast<long long>(kOurs) == static_cast<long long>(kTheirs);
static_assert(same<kSuccess, CUDA_SUCCESS> && same<kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY> && same<kNoDevice, CUDA_ERROR_NO_DEVICE> &&
              same<kPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED>);
static_assert(same<kAttributeNumSms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT> && same<kAttributeMemoryClockKhz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE> &&
              same<kAttributeMemoryBusBits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH> && same<kAttributeL2Bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE> &&
              same<kAttributeComputeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR> && same<kAttributeComputeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR> &&
              same<kAttributeMaxSharedBytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN> &&
              same<kAttributeSharedBytesPerSm, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR>);
static_assert(same<kFunctionNumRegisters, CU_FUNC_ATTRIBUTE_NUM_REGS> && same<kFunctionLocalBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES> &&
              same<kFunctionPtxVersion, CU_FUNC_ATTRIBUTE_PTX_VERSION> && same<kFunctionMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES> &&
              same<kFunctionNonPortableClusters, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED>);
static_assert(same<kStreamNonBlocking, CU_STREAM_NON_BLOCKING> && same<kEventDisableTiming, CU_EVENT_DISABLE_TIMING> && same<kHostPortable, CU_MEMHOSTALLOC_PORTABLE> &&
              same<kHostDeviceMapped, CU_MEMHOSTALLOC_DEVICEMAP> && same<kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL>);
static_assert(same<kLaunchCluster, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION> && same<kLaunchProgrammatic, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION>);
static_assert(same<kTensorUint8, CU_TENSOR_MAP_DATA_TYPE_UINT8> && same<kTensorUint16, CU_TENSOR_MAP_DATA_TYPE_UINT16> &&
              same<kTensorUint32, CU_TENSOR_MAP_DATA_TYPE_UINT32> && same<kTensorFloat32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32> &&
              same<kTensorBfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16> && same<kSwizzle128, CU_TENSOR_MAP_SWIZZLE_128B> &&
              same<kPromotionL2_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B> && same<kFillZeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE>);

}  // namespace
}  // namespace quern::cuda
#endif
