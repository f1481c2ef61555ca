#include <cstdio>

#include "ops/bed.h"

// Runs the tests of ops with one candidate (QUERN_TEST_CANDIDATE) and fails if it was never chosen; with QUERN_TEST_ALL_OPS also if it was not for one of the ops that have
// it. Exit code 77: the machine lacks its device or instructions.

namespace {

using namespace quern;

/// The ops that have the candidate, of which no test has made a kernel.
template <class... Ops>
std::string ops_not_tested(const ops::KernelTable& table, const std::string& candidate) {
  std::string names;
  const auto look_at = [&](std::string_view op, const auto& candidates) {
    for (const auto& c : candidates)
      if (c.name == candidate && ops::testing::kernels_under_test().count(op) == 0) names += fmt::format(" {}", op);
  };
  (look_at(Ops::kName, table.list<Ops>().candidates()), ...);
  return names;
}

}  // namespace

int main(int argc, char** argv) {
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
                    : candidate.starts_with("cuda.sm90") ? traits.architecture == 90
                    : candidate == "cuda.mma.e4m3"          ? traits.architecture == 89 || traits.architecture >= 120
                    : candidate == "cuda.mma.e4m3.emulated" ? traits.architecture >= 90 && traits.architecture < 120
                                                        : true;
  if (!runs) {
    std::printf("SKIPPED: this device cannot run %s\n", candidate.c_str());
    return 77;
  }
  const int failed = RUN_ALL_TESTS();
  const bool whole = ::testing::GTEST_FLAG(filter) == "*";
  int num_kernels = 0;
  for (const auto& [op, count] : ops::testing::kernels_under_test()) num_kernels += count;
  std::printf("%d kernels of %s were under test\n", num_kernels, candidate.c_str());
  std::string missing;
  if (std::getenv("QUERN_TEST_ALL_OPS") != nullptr)
    missing = ops_not_tested<ops::Embed, ops::AttnIn, ops::Attention, ops::GdnIn, ops::GdnMix, ops::OutResidual, ops::MlpIn, ops::DownResidual, ops::MtpIn, ops::Head, ops::Sample,
                             ops::DraftRows, ops::StateCopy, ops::Combine>(backends::kernel_table(traits.platform), candidate);
  if (!missing.empty()) std::printf("FAILED: no test has made a kernel of %s for%s\n", candidate.c_str(), missing.c_str());
  return failed != 0 || !missing.empty() || (whole && num_kernels == 0) ? 1 : 0;
}
