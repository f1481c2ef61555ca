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

# Machine code for Arc Pro B60 and B70 of every program in programs.txt, made by Intel's offline compiler where there is one (the package intel-ocloc, or what
# scripts/xpu-check has fetched): the driver need not compile at the first start. A driver that takes none of it gets the sources.
set(QUERN_XE2_BINARIES "AUTO" CACHE STRING "Machine code for Arc Pro B60 and B70 inside the program: AUTO, ON or OFF")
set(QUERN_XE2_CHIPS "bmg-g21,bmg-g31")

set(QUERN_HAS_OCLOC OFF)
if(NOT QUERN_XE2_BINARIES STREQUAL "OFF")
  find_program(QUERN_OCLOC NAMES ocloc HINTS "${CMAKE_BINARY_DIR}/xpu-tools/bin")
  if(QUERN_OCLOC)
    execute_process(COMMAND "${QUERN_OCLOC}" ids bmg-g31 OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE ocloc_knows_them)
  endif()
  if(QUERN_OCLOC AND ocloc_knows_them EQUAL 0)
    set(QUERN_HAS_OCLOC ON)
    enable_language(ASM)
    message(STATUS "OpenCL: ${QUERN_OCLOC} makes machine code for ${QUERN_XE2_CHIPS}")
  elseif(QUERN_XE2_BINARIES STREQUAL "ON")
    message(FATAL_ERROR "QUERN_XE2_BINARIES=ON needs an ocloc that knows bmg-g31, found: ${QUERN_OCLOC}")
  endif()
endif()

# Compiles the programs of a list (programs.txt) for both chips and adds their archives and the table of them to a target. Behind the list stand the sources that they are made of.
function(quern_program_binaries target list)
  get_filename_component(sources "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../src" ABSOLUTE)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/program_binaries")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${list}")
  set(declarations "")
  set(entries "")
  set(assembly "")
  set(archives "")
  if(QUERN_HAS_OCLOC)
    file(STRINGS "${list}" lines REGEX "^[^#].*\\|")
    foreach(line ${lines})
      string(REGEX REPLACE " *\\| *" ";" fields "${line}")
      list(GET fields 0 name)
      list(GET fields 1 unit)
      list(GET fields 4 definitions)
      string(STRIP "${name}" name)
      string(STRIP "${definitions}" definitions)
      string(MAKE_C_IDENTIFIER "${name}" symbol)
      set(archive "${folder}/${name}.ar")
      add_custom_command(
        OUTPUT "${archive}"
        COMMAND "${QUERN_OCLOC}" compile -q -exclude_ir -file "${sources}/backends/opencl/${unit}.cl" -device "${QUERN_XE2_CHIPS}" -out_dir "${folder}" -output "${name}.ar"
                -options "-I ${sources} -cl-fp32-correctly-rounded-divide-sqrt ${definitions}"
        DEPENDS ${ARGN}
        COMMENT "Compiling ${name} for ${QUERN_XE2_CHIPS}"
        VERBATIM)
      list(APPEND archives "${archive}")
      string(APPEND declarations "extern \"C\" const char quern_xe2_${symbol}[], quern_xe2_${symbol}_end[];\n")
      string(APPEND entries "    {\"${unit}\", \"${definitions}\", {quern_xe2_${symbol}, static_cast<size_t>(quern_xe2_${symbol}_end - quern_xe2_${symbol})}},\n")
      string(APPEND assembly ".globl quern_xe2_${symbol}\n.globl quern_xe2_${symbol}_end\n.balign 64\nquern_xe2_${symbol}:\n.incbin \"${archive}\"\nquern_xe2_${symbol}_end:\n")
    endforeach()
    file(CONFIGURE OUTPUT "${folder}/archives.S" CONTENT ".section .rodata\n${assembly}.section .note.GNU-stack,\"\",%progbits\n" @ONLY)
    set_source_files_properties("${folder}/archives.S" PROPERTIES OBJECT_DEPENDS "${archives}")
    target_sources(${target} PRIVATE "${folder}/archives.S")
  endif()
  file(CONFIGURE OUTPUT "${folder}/table.cpp" @ONLY CONTENT [[
#include <vector>

#include "backends/opencl/kernel_source.h"

@declarations@
namespace quern::opencl {

std::span<const ProgramBinary> program_binaries() {
  static const std::vector<ProgramBinary> programs{
@entries@  };
  return programs;
}

}  // namespace quern::opencl
]])
  target_sources(${target} PRIVATE "${folder}/table.cpp")
endfunction()
