// What worker/open_mpi.h says of Open MPI's binary interface, beside its own header.

#include "worker/open_mpi.h"

#include "support/test_support.h"

#if QUERN_HAS_MPI_HEADER
#define OMPI_SKIP_MPICXX 1  // its C++ interface wants its library linked
#include <mpi.h>
#endif

namespace quern::worker {
namespace {

TEST(OpenMpi, IsWhatItsHeaderSays) {
#if QUERN_HAS_MPI_HEADER && defined(OPEN_MPI)
  static_assert(sizeof(OpenMpi::Status) == sizeof(MPI_Status) && alignof(OpenMpi::Status) == alignof(MPI_Status));
  static_assert(offsetof(OpenMpi::Status, source) == offsetof(MPI_Status, MPI_SOURCE) && offsetof(OpenMpi::Status, tag) == offsetof(MPI_Status, MPI_TAG) &&
                offsetof(OpenMpi::Status, error) == offsetof(MPI_Status, MPI_ERROR));
  static_assert(OpenMpi::kSuccess == MPI_SUCCESS && OpenMpi::kThreadMultiple == MPI_THREAD_MULTIPLE);
  static_assert(OpenMpi::kMaxName >= MPI_MAX_PROCESSOR_NAME && OpenMpi::kMaxName >= MPI_MAX_ERROR_STRING);
  // Handles are pointers, so that functions differ in their names alone.
  static_assert(std::is_pointer_v<MPI_Comm> && std::is_pointer_v<MPI_Datatype> && std::is_pointer_v<MPI_Request> && std::is_pointer_v<MPI_Message> && std::is_pointer_v<MPI_Errhandler>);
  static_assert(std::is_same_v<decltype(MPI_Init_thread), int(int*, char***, int, int*)>);
  static_assert(std::is_same_v<decltype(MPI_Finalize), int()>);
  static_assert(std::is_same_v<decltype(MPI_Comm_set_errhandler), int(MPI_Comm, MPI_Errhandler)>);
  static_assert(std::is_same_v<decltype(MPI_Comm_rank), int(MPI_Comm, int*)> && std::is_same_v<decltype(MPI_Comm_size), int(MPI_Comm, int*)>);
  static_assert(std::is_same_v<decltype(MPI_Get_processor_name), int(char*, int*)>);
  static_assert(std::is_same_v<decltype(MPI_Isend), int(const void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*)>);
  static_assert(std::is_same_v<decltype(MPI_Improbe), int(int, int, MPI_Comm, int*, MPI_Message*, MPI_Status*)>);
  static_assert(std::is_same_v<decltype(MPI_Get_count), int(const MPI_Status*, MPI_Datatype, int*)>);
  static_assert(std::is_same_v<decltype(MPI_Imrecv), int(void*, int, MPI_Datatype, MPI_Message*, MPI_Request*)>);
  static_assert(std::is_same_v<decltype(MPI_Test), int(MPI_Request*, int*, MPI_Status*)>);
  static_assert(std::is_same_v<decltype(MPI_Error_string), int(int, char*, int*)>);
#else
  GTEST_SKIP() << "no mpi.h of Open MPI when this was built (libopenmpi-dev)";
#endif
}

TEST(OpenMpi, IsOpenedOrSaysWhatIsMissing) {
  const Result<OpenMpi> mpi = OpenMpi::load();
  if (!mpi) {
    EXPECT_EQ(mpi.error().code, ErrorCode::kUnsupported);
    EXPECT_THAT(mpi.error().message, ::testing::HasSubstr("libopenmpi3"));
    return;
  }
  EXPECT_NE(mpi->world, nullptr);
  EXPECT_NE(mpi->bytes, nullptr);
  EXPECT_NE(mpi->isend, nullptr);
}

}  // namespace
}  // namespace quern::worker
