#include "backends/opencl/driver.h"

#include <dlfcn.h>

namespace quern::opencl {

namespace {

Result<Driver> open_library() {
  void* library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (library == nullptr) return make_error(ErrorCode::kUnsupported, "no OpenCL loader is installed (libOpenCL.so.1 cannot be opened)");
  Driver driver;
  const char* missing = nullptr;
#define QUERN_LOOK_UP(member, name, result, parameters)                            \
  driver.member = reinterpret_cast<decltype(driver.member)>(dlsym(library, name)); \
  if (driver.member == nullptr && missing == nullptr) missing = name;
  QUERN_OPENCL_FUNCTIONS(QUERN_LOOK_UP)
#undef QUERN_LOOK_UP
  if (missing != nullptr) return make_error(ErrorCode::kUnsupported, "the OpenCL loader is too old: it has no {}", missing);
  return driver;
}

const char* name_of(Status status) {
  switch (status) {
    case -1: return "CL_DEVICE_NOT_FOUND";
    case -2: return "CL_DEVICE_NOT_AVAILABLE";
    case -3: return "CL_COMPILER_NOT_AVAILABLE";
    case -4: return "CL_MEM_OBJECT_ALLOCATION_FAILURE";
    case -5: return "CL_OUT_OF_RESOURCES";
    case -6: return "CL_OUT_OF_HOST_MEMORY";
    case -11: return "CL_BUILD_PROGRAM_FAILURE";
    case -12: return "CL_MAP_FAILURE";
    case -14: return "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST";
    case -30: return "CL_INVALID_VALUE";
    case -33: return "CL_INVALID_DEVICE";
    case -34: return "CL_INVALID_CONTEXT";
    case -36: return "CL_INVALID_COMMAND_QUEUE";
    case -38: return "CL_INVALID_MEM_OBJECT";
    case -42: return "CL_INVALID_BINARY";
    case -43: return "CL_INVALID_BUILD_OPTIONS";
    case -44: return "CL_INVALID_PROGRAM";
    case -45: return "CL_INVALID_PROGRAM_EXECUTABLE";
    case -46: return "CL_INVALID_KERNEL_NAME";
    case -48: return "CL_INVALID_KERNEL";
    case -49: return "CL_INVALID_ARG_INDEX";
    case -50: return "CL_INVALID_ARG_VALUE";
    case -51: return "CL_INVALID_ARG_SIZE";
    case -52: return "CL_INVALID_KERNEL_ARGS";
    case -54: return "CL_INVALID_WORK_GROUP_SIZE";
    case -55: return "CL_INVALID_WORK_ITEM_SIZE";
    case -61: return "CL_INVALID_BUFFER_SIZE";
    case -1001: return "CL_PLATFORM_NOT_FOUND_KHR";
    default: return nullptr;
  }
}

}  // namespace

Result<const Driver*> Driver::load() {
  static const Result<Driver> driver = open_library();
  if (!driver) return driver.error();
  return &*driver;
}

std::string describe(Status status) {
  const char* name = name_of(status);
  return name == nullptr ? fmt::format("OpenCL error {}", status) : fmt::format("{} ({})", name, status);
}

}  // namespace quern::opencl
