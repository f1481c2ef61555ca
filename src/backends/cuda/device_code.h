#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

// What the build has compiled for GPUs: one image for every .cu file of this folder, with code for several architectures in it.

namespace quern::cuda {

struct DeviceCode {
  std::string_view unit;  // the .cu file's name without its ending
  std::span<const std::byte> image;
};

/// All units of this build; none where it was made without a CUDA compiler.
std::span<const DeviceCode> device_code();
/// Architectures in the images: "80", "90a" are machine code, "89-virtual" is code that a driver translates for anything newer.
std::span<const std::string_view> code_architectures();
/// Whether a GPU runs machine code that was compiled for `architecture` itself, with what only that has: clusters of blocks, say.
bool runs_code_for(std::string_view architecture, int device);
/// Version of the compiler, 13000 for 13.0; 12000 in builds without one.
int toolkit_version();

/// Those of `architectures` from sm_`first` on, for units with instructions that older ones lack.
std::vector<std::string_view> architectures_from(int first, std::span<const std::string_view> architectures);
/// Whether kernels of code for `architectures` wait for their predecessor in the stream by themselves on a device: machine code of sm_90 and newer does, translated code and that of older GPUs does not.
bool waits_for_predecessors(std::span<const std::string_view> architectures, int device);
/// Whether code for `architectures` runs on a device (90 for sm_90), or why not.
Result<void> covers(std::span<const std::string_view> architectures, int device);
/// What a device runs of code for `architectures`, in words: "machine code of sm_90a", "machine code of sm_80", "code for sm_89, translated by the driver"; empty: nothing.
std::string code_for(std::span<const std::string_view> architectures, int device);
/// The same for this build; a build without device code covers nothing.
Result<void> build_covers(int device);

}  // namespace quern::cuda
