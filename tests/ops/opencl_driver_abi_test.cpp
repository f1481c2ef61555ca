// Our declarations of OpenCL's types and constants against Khronos', where its headers are installed.
#include "backends/opencl/driver.h"

#if __has_include(<CL/cl.h>)
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <CL/cl_ext.h>

#include <type_traits>

namespace quern::opencl {
namespace {

static_assert(std::is_same_v<Status, cl_int> && sizeof(size_t) == sizeof(cl_device_id) && sizeof(intptr_t) == sizeof(cl_context_properties));
static_assert(sizeof(cl_mem_flags) == 8 && sizeof(cl_map_flags) == 8 && sizeof(cl_device_type) == 8 && sizeof(cl_queue_properties) == 8 && sizeof(cl_bool) == 4);

template <auto kOurs, auto kTheirs>
constexpr bool same = static_cast<long long>(kOurs) == static_cast<long long>(kTheirs);
static_assert(same<kSuccess, CL_SUCCESS> && same<kDeviceNotFound, CL_DEVICE_NOT_FOUND> && same<kMemoryAllocationFailure, CL_MEM_OBJECT_ALLOCATION_FAILURE> &&
              same<kOutOfResources, CL_OUT_OF_RESOURCES> && same<kOutOfHostMemory, CL_OUT_OF_HOST_MEMORY> && same<kPlatformNotFound, CL_PLATFORM_NOT_FOUND_KHR>);
static_assert(same<kDeviceTypeAll, CL_DEVICE_TYPE_ALL> && same<kDeviceTypeGpu, CL_DEVICE_TYPE_GPU>);
static_assert(same<kPlatformName, CL_PLATFORM_NAME> && same<kPlatformVersion, CL_PLATFORM_VERSION>);
static_assert(same<kDeviceType, CL_DEVICE_TYPE> && same<kDeviceVendorId, CL_DEVICE_VENDOR_ID> && same<kDeviceMaxComputeUnits, CL_DEVICE_MAX_COMPUTE_UNITS> &&
              same<kDeviceMaxAllocation, CL_DEVICE_MAX_MEM_ALLOC_SIZE> && same<kDeviceSingleFpConfig, CL_DEVICE_SINGLE_FP_CONFIG> &&
              same<kDeviceGlobalMemory, CL_DEVICE_GLOBAL_MEM_SIZE> && same<kDeviceLocalMemory, CL_DEVICE_LOCAL_MEM_SIZE> && same<kDeviceName, CL_DEVICE_NAME> &&
              same<kDriverVersion, CL_DRIVER_VERSION> && same<kDeviceVersion, CL_DEVICE_VERSION> && same<kDeviceExtensions, CL_DEVICE_EXTENSIONS> &&
              same<kDeviceDoubleFpConfig, CL_DEVICE_DOUBLE_FP_CONFIG> && same<kFpCorrectlyRoundedDivide, CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT>);
static_assert(same<kMemoryReadWrite, CL_MEM_READ_WRITE> && same<kMemoryUseHostPointer, CL_MEM_USE_HOST_PTR> && same<kMemoryAllocHostPointer, CL_MEM_ALLOC_HOST_PTR> &&
              same<kMapRead, CL_MAP_READ> && same<kMapWrite, CL_MAP_WRITE>);
static_assert(same<kProgramBinarySizes, CL_PROGRAM_BINARY_SIZES> && same<kProgramBinaries, CL_PROGRAM_BINARIES> && same<kProgramBuildLog, CL_PROGRAM_BUILD_LOG>);
static_assert(same<kComplete, CL_COMPLETE>);
#ifdef CL_DEVICE_IP_VERSION_INTEL
static_assert(same<kDeviceIpVersionIntel, CL_DEVICE_IP_VERSION_INTEL>);
#endif
#ifdef CL_DEVICE_PCI_BUS_INFO_KHR
static_assert(same<kDevicePciBusInfo, CL_DEVICE_PCI_BUS_INFO_KHR> && sizeof(PciBusInfo) == sizeof(cl_device_pci_bus_info_khr));
#endif

}  // namespace
}  // namespace quern::opencl
#endif
