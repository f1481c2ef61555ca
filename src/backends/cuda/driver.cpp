#include "backends/cuda/driver.h"

#include <dlfcn.h>

#include "backends/cuda/device_code.h"

namespace quern::cuda {

namespace {

Result<Driver> open_library() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (library == nullptr) return make_error(ErrorCode::kUnsupported, "no NVIDIA driver is installed (libcuda.so.1 cannot be opened)");
  Driver driver;
  const char* missing = nullptr;
#define QUERN_LOOK_UP(member, name, parameters)                                                   \
  driver.member = reinterpret_cast<decltype(driver.member)>(dlsym(library, name)); \
  if (driver.member == nullptr && missing == nullptr) missing = name;
  QUERN_CUDA_DRIVER_FUNCTIONS(QUERN_LOOK_UP)
#undef QUERN_LOOK_UP

  int version = 0;
  if (driver.driver_version != nullptr && driver.driver_version(&version) == kSuccess) {
    const int wanted = toolkit_version();
    if (version / 1000 < wanted / 1000)
      return make_error(ErrorCode::kUnsupported, "the NVIDIA driver supports CUDA {}.{}, this build needs {}.0; a newer driver works", version / 1000,
                        version % 1000 / 10, wanted / 1000);
  }
  if (missing != nullptr) return make_error(ErrorCode::kUnsupported, "the NVIDIA driver is too old: it has no {}", missing);
  if (const Status status = driver.init(0); status != kSuccess) {
    if (status == kNoDevice) return make_error(ErrorCode::kUnsupported, "the NVIDIA driver finds no GPU");
    return make_error(ErrorCode::kUnsupported, "the NVIDIA driver does not start: {}", driver.describe(status));
  }
  return driver;
}

}  // namespace

Result<const Driver*> Driver::load() {
  static const Result<Driver> driver = open_library();
  if (!driver) return driver.error();
  return &*driver;
}

std::string Driver::describe(Status status) const {
  const char *name = nullptr, *text = nullptr;
  if (error_name == nullptr || error_name(status, &name) != kSuccess || name == nullptr) return fmt::format("error {}", status);
  if (error_string(status, &text) != kSuccess || text == nullptr) return name;
  return fmt::format("{}, {}", name, text);
}

}  // namespace quern::cuda
