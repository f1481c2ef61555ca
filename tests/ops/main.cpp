#include <cstdio>

#include "ops/bed.h"

// Runs the tests of ops with one candidate (QUERN_TEST_CANDIDATE) and fails if it was never chosen. Exit code 77: the machine lacks its device or instructions.

int main(int argc, char** argv) {
  using namespace quern;
  ::testing::InitGoogleMock(&argc, argv);
  const std::string candidate = ops::testing::candidate_under_test();
  const auto device = ops::testing::open_device_under_test();
  if (!device) {
    std::printf("SKIPPED: %s\n", device.error().message.c_str());
    return 77;
  }
  const ops::DeviceTraits traits = (*device)->traits();
  const bool runs = candidate == "cpu.avx2"             ? traits.avx2
                    : candidate == "cpu.avx512"         ? traits.avx512
                    : candidate == "cpu.avx512_bf16"    ? traits.avx512_bf16 && traits.avx512_vbmi
                    : candidate.starts_with("cpu.amx")  ? traits.amx_bf16 && traits.avx512_vbmi
                    : candidate == "opencl.dpas" || candidate == "opencl.simd16" ? traits.architecture != 0
                                                        : true;
  if (!runs) {
    std::printf("SKIPPED: this device cannot run %s\n", candidate.c_str());
    return 77;
  }
  const int failed = RUN_ALL_TESTS();
  const bool whole = ::testing::GTEST_FLAG(filter) == "*";
  std::printf("%d kernels of %s were under test\n", ops::testing::num_kernels_under_test(), candidate.c_str());
  return failed != 0 || (whole && ops::testing::num_kernels_under_test() == 0) ? 1 : 0;
}
