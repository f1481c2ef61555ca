# OpenCL C sources become text inside the program: the driver of the device that is met builds them. Nothing of OpenCL is needed while building, nor linked.
function(quern_kernel_sources target)
  set(table "${CMAKE_CURRENT_BINARY_DIR}/kernel_sources.cpp")
  add_custom_command(
    OUTPUT "${table}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${table}" "-DSOURCES=${ARGN}" -P "${PROJECT_SOURCE_DIR}/cmake/embed_kernel_sources.cmake"
    DEPENDS ${ARGN} "${PROJECT_SOURCE_DIR}/cmake/embed_kernel_sources.cmake"
    COMMENT "Embedding OpenCL sources"
    VERBATIM)
  target_sources(${target} PRIVATE "${table}")
endfunction()
