# Device code for NVIDIA GPUs, compiled ahead of time: every .cu file becomes one image with code for all architectures, kept in the program as bytes.
# nvcc alone is needed; the program opens the driver at run time and links nothing of CUDA.
set(QUERN_CUDA_ARCHITECTURES "80;90a;89-virtual" CACHE STRING
  "Architectures of the device code: 80 or 90a is machine code, 89-virtual is code that the driver translates for newer GPUs")
set(QUERN_CUDA_TRANSLATE_FOR "" CACHE STRING
  "An architecture (90) that virtual code is translated for in the build and not by the driver: for tests on a card that passes for an older one")

set(QUERN_HAS_NVCC OFF)
if(NOT QUERN_CUDA STREQUAL "OFF")
  find_program(QUERN_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
  if(QUERN_NVCC)
    execute_process(COMMAND "${QUERN_NVCC}" --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
    string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" found "${nvcc_says}")
    set(nvcc_major "${CMAKE_MATCH_1}")
    set(nvcc_minor "${CMAKE_MATCH_2}")
  endif()
  if(QUERN_NVCC AND found AND nvcc_major GREATER_EQUAL 12)
    set(QUERN_HAS_NVCC ON)
    message(STATUS "CUDA: nvcc ${nvcc_major}.${nvcc_minor}, device code for ${QUERN_CUDA_ARCHITECTURES}")
  elseif(QUERN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QUERN_CUDA=ON needs nvcc 12 or newer, found: ${QUERN_NVCC}")
  else()
    message(STATUS "CUDA: no nvcc 12 or newer, the CUDA platform will refuse with that reason")
  endif()
endif()
if(QUERN_HAS_NVCC)
  enable_language(ASM)
endif()

# Compiles the .cu files and adds their images and the table of them to a target.
function(quern_device_code target)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/device_code")
  set(declarations "")
  set(entries "")
  set(assembly "")
  set(images "")
  set(architecture_names "")
  set(version 12000)
  if(QUERN_HAS_NVCC)
    math(EXPR version "${nvcc_major} * 1000 + ${nvcc_minor} * 10")
    set(gencode "")
    set(gencode_sm89 "")
    set(gencode_sm90 "")
    foreach(architecture ${QUERN_CUDA_ARCHITECTURES})
      string(REPLACE "-virtual" "" number "${architecture}")
      if(architecture MATCHES "-virtual$")
        set(code "-gencode=arch=compute_${number},code=compute_${number}")
        if(QUERN_CUDA_TRANSLATE_FOR)
          set(code "-gencode=arch=compute_${number},code=sm_${QUERN_CUDA_TRANSLATE_FOR}")
        endif()
      else()
        set(code "-gencode=arch=compute_${number},code=sm_${number}")
      endif()
      list(APPEND gencode "${code}")
      string(REGEX MATCH "^[0-9]+" number "${number}")
      if(number GREATER_EQUAL 89)
        list(APPEND gencode_sm89 "${code}")
      endif()
      if(architecture STREQUAL "89-virtual")  # what is not in machine code of sm_80 has its own on sm_89: nothing is translated there
        list(APPEND gencode_sm89 "-gencode=arch=compute_89,code=sm_89")
      endif()
      if(architecture STREQUAL "90a")
        set(gencode_sm90 "-gencode=arch=compute_90a,code=sm_90a")
      endif()
      string(APPEND architecture_names "\"${architecture}\", ")
    endforeach()
    list(REMOVE_DUPLICATES gencode_sm89)
    foreach(source ${ARGN})
      get_filename_component(unit "${source}" NAME_WE)
      set(targets "${gencode}")
      if(unit MATCHES "sm90")  # instructions of that architecture alone
        set(targets "${gencode_sm90}")
      elseif(unit MATCHES "sm89")  # of that and newer ones
        set(targets "${gencode_sm89}")
      endif()
      if(NOT targets)
        continue()
      endif()
      set(image "${folder}/${unit}.fatbin")
      add_custom_command(
        OUTPUT "${image}"
        COMMAND "${QUERN_NVCC}" -fatbin ${targets} -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr -Werror=all-warnings "-I${PROJECT_SOURCE_DIR}/src"
                -ccbin "${CMAKE_CXX_COMPILER}" -MD -MF "${image}.d" -o "${image}" "${source}"
        DEPENDS "${source}"
        DEPFILE "${image}.d"
        COMMENT "Compiling device code ${unit}"
        VERBATIM)
      list(APPEND images "${image}")
      string(APPEND declarations "extern \"C\" const std::byte quern_cuda_${unit}[], quern_cuda_${unit}_end[];\n")
      string(APPEND entries "    {\"${unit}\", {quern_cuda_${unit}, quern_cuda_${unit}_end}},\n")
      string(APPEND assembly
        ".globl quern_cuda_${unit}\n.globl quern_cuda_${unit}_end\n.balign 64\nquern_cuda_${unit}:\n.incbin \"${image}\"\nquern_cuda_${unit}_end:\n")
    endforeach()
    file(CONFIGURE OUTPUT "${folder}/images.S" CONTENT ".section .rodata\n${assembly}.section .note.GNU-stack,\"\",%progbits\n" @ONLY)
    set_source_files_properties("${folder}/images.S" PROPERTIES OBJECT_DEPENDS "${images}")
    target_sources(${target} PRIVATE "${folder}/images.S")
  endif()
  file(CONFIGURE OUTPUT "${folder}/table.cpp" @ONLY CONTENT [[
#include <vector>

#include "backends/cuda/device_code.h"

@declarations@
namespace quern::cuda {

std::span<const DeviceCode> device_code() {
  static const std::vector<DeviceCode> units{
@entries@  };
  return units;
}
std::span<const std::string_view> code_architectures() {
  static const std::vector<std::string_view> names{@architecture_names@};
  return names;
}
int toolkit_version() { return @version@; }

}  // namespace quern::cuda
]])
  target_sources(${target} PRIVATE "${folder}/table.cpp")
endfunction()
