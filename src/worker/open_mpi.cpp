#include "worker/open_mpi.h"

#include <dlfcn.h>

namespace quern::worker {

Result<OpenMpi> OpenMpi::load() {
  constexpr const char* kLibrary = "libmpi.so.40";
  // Global, since its plug-ins look for its symbols; it stays open until the process ends.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return make_error(ErrorCode::kUnsupported, "Open MPI's library cannot be opened ({}); install Debian's libopenmpi3 (Debian 13: libopenmpi40), or start one process alone", dlerror());
  OpenMpi mpi;
#define QUERN_LOOK_UP(member, name, result, parameters)                      \
  mpi.member = reinterpret_cast<decltype(mpi.member)>(dlsym(library, #name)); \
  if (mpi.member == nullptr) return make_error(ErrorCode::kUnsupported, "{} has no {}", kLibrary, #name);
  QUERN_MPI_FUNCTIONS(QUERN_LOOK_UP)
#undef QUERN_LOOK_UP
  for (const auto& [handle, name] : {std::pair{&mpi.world, "ompi_mpi_comm_world"}, {&mpi.bytes, "ompi_mpi_byte"}, {&mpi.errors_return, "ompi_mpi_errors_return"}}) {
    *handle = dlsym(library, name);
    if (*handle == nullptr) return make_error(ErrorCode::kUnsupported, "{} has no {}", kLibrary, name);
  }
  return mpi;
}

}  // namespace quern::worker
