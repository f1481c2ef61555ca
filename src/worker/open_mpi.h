#pragma once

#include <cstddef>

#include "base/result.h"

// Open MPI's library, opened when it is needed: nothing of it is wanted for building, nor where a server runs alone. Its binary interface (libmpi.so.40) is that of versions 4 and 5;
// tests/worker/open_mpi_test.cpp compares what stands here with mpi.h.

namespace quern::worker {

struct OpenMpi {
  // Handles are addresses of objects of the library.
  using Handle = void*;
  struct Status {
    int source, tag, error, cancelled;
    size_t num_bytes;
  };
  static constexpr int kSuccess = 0, kThreadMultiple = 3, kMaxName = 256;

#define QUERN_MPI_FUNCTIONS(X)                                                                                                  \
  X(init_thread, MPI_Init_thread, int, (int* argc, char*** argv, int wanted, int* provided))                                    \
  X(finalize, MPI_Finalize, int, ())                                                                                            \
  X(set_error_handler, MPI_Comm_set_errhandler, int, (Handle communicator, Handle handler))                                     \
  X(rank, MPI_Comm_rank, int, (Handle communicator, int* rank))                                                                 \
  X(size, MPI_Comm_size, int, (Handle communicator, int* size))                                                                 \
  X(processor_name, MPI_Get_processor_name, int, (char* name, int* length))                                                     \
  X(isend, MPI_Isend, int, (const void* data, int count, Handle type, int to, int tag, Handle communicator, Handle* request))   \
  X(improbe, MPI_Improbe, int, (int from, int tag, Handle communicator, int* found, Handle* message, Status* status))           \
  X(get_count, MPI_Get_count, int, (const Status* status, Handle type, int* count))                                             \
  X(imrecv, MPI_Imrecv, int, (void* data, int count, Handle type, Handle* message, Handle* request))                            \
  X(test, MPI_Test, int, (Handle* request, int* done, Status* status))                                                          \
  X(error_string, MPI_Error_string, int, (int error, char* text, int* length))
#define QUERN_MPI_MEMBER(member, name, result, parameters) result(*member) parameters = nullptr;
  QUERN_MPI_FUNCTIONS(QUERN_MPI_MEMBER)
#undef QUERN_MPI_MEMBER

  Handle world = nullptr;         // MPI_COMM_WORLD
  Handle bytes = nullptr;         // MPI_BYTE
  Handle errors_return = nullptr;  // MPI_ERRORS_RETURN

  /// kUnsupported where it is not installed, with the package that has it.
  static Result<OpenMpi> load();
};

}  // namespace quern::worker
