#include <cstdlib>
#include <fstream>

#include "app/program.h"
#include "support/test_support.h"

// What the program says of drivers and GPUs that it cannot use, with a driver that has the fault (faulty_cuda_driver/): one sentence that names it, before anything is planned or loaded where it can be known.

namespace quern::app {
namespace {

using quern::testing::ProgramResult;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// An environment variable has a value while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Runs quern with the driver that stands in `folder`.
ProgramResult run_with_driver_in(const std::string& folder, const std::string& fault, const std::vector<std::string>& arguments) {
  const char* libraries = std::getenv("LD_LIBRARY_PATH");
  const Variable path("LD_LIBRARY_PATH", libraries == nullptr ? folder : fmt::format("{}:{}", folder, libraries)), chosen("QUERN_CUDA_FAULT", fault);
  return quern::testing::run_quern(arguments);
}
/// `quern eval` of the demo model on cuda:0. It must end with code 1. Returns the lines that it logged.
std::vector<std::string> eval_with_driver_in(const std::string& folder, const std::string& fault, const std::vector<std::string>& more = {}) {
  const quern::testing::TemporaryFolder files;
  const std::string tokens = (files.path() / "tokens.txt").string();
  std::ofstream(tokens) << "1 2 3 4 5 6 7 8\n";
  std::vector<std::string> arguments = {"eval", QUERN_SOURCE_DIR "/models/quern-demo", "--tokens", tokens, "--device", "cuda:0"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProgramResult result = run_with_driver_in(folder, fault, arguments);
  EXPECT_EQ(result.exit_code, 1) << result.log;
  EXPECT_EQ(result.output, "");
  std::vector<std::string> lines;
  std::istringstream log(result.log);
  for (std::string line; std::getline(log, line);) lines.push_back(line);
  return lines;
}
std::vector<std::string> eval_with_fault(const std::string& fault, const std::vector<std::string>& more = {}) { return eval_with_driver_in(QUERN_FAULTY_CUDA_DRIVER, fault, more); }
/// Whether the build has code for the GPU that the driver finds.
bool has_code() {
  const std::string text = run_with_driver_in(QUERN_FAULTY_CUDA_DRIVER, "none", {"doctor"}).output;
  EXPECT_THAT(text, HasSubstr("cuda:0  Faulty GPU, sm_80"));
  return text.find("machine code of sm_80") != std::string::npos;
}

/// The only line.
auto says(const std::string& what) { return ElementsAre(AllOf(StartsWith("quern: "), HasSubstr("cuda:0"), HasSubstr(what), HasSubstr("--device cpu works"))); }
/// The last line.
std::string last_of(const std::vector<std::string>& lines) { return lines.empty() ? std::string() : lines.back(); }

TEST(CudaFaults, OfDriversAreSaidInOneSentenceBeforeAnythingElse) {
  quern::testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "libcuda.so.1") << "no library\n";
  EXPECT_THAT(eval_with_driver_in(folder.path().string(), "none"), says("no NVIDIA driver is installed"));
  EXPECT_THAT(eval_with_driver_in(QUERN_OLD_CUDA_DRIVER, "none"), says("the NVIDIA driver is too old: it has no cu"));
  EXPECT_THAT(eval_with_fault("old-driver"), says("the NVIDIA driver supports CUDA 11.4, this build needs "));
  EXPECT_THAT(eval_with_fault("no-gpu"), says("the NVIDIA driver finds no GPU"));
  EXPECT_THAT(eval_with_fault("mismatch"), says("the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"));
}

TEST(CudaFaults, OfGpusAreSaidInOneSentenceBeforeAnythingElse) {
  EXPECT_THAT(eval_with_fault("old-gpu"), says("Faulty GPU is sm_75; sm_80 and newer are supported"));
  if (!has_code()) {
    EXPECT_THAT(eval_with_fault("none"), says("Faulty GPU: "));
    GTEST_SKIP() << "the rest needs code for sm_80, which this build does not have";
  }
  EXPECT_THAT(eval_with_fault("busy"), says("Faulty GPU cannot be used: CUDA_ERROR_DEVICE_UNAVAILABLE"));
}

/// A GPU that may be opened and then fails.
class UsableGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_code()) GTEST_SKIP() << "this build has no code for sm_80";
  }
};

TEST_F(UsableGpu, WithoutRoomForTheModelIsRefusedByThePlan) {
  EXPECT_THAT(eval_with_fault("none", {"--gpu-memory-utilization", "0.02"}), ElementsAre(AllOf(StartsWith("quern: does not fit: "), HasSubstr("0.16 GiB of Faulty GPU's 8.00 GiB may be used"))));
}

TEST_F(UsableGpu, WhoseMemoryOthersHaveIsNamedWithWhatIsFree) {
  EXPECT_THAT(last_of(eval_with_fault("no-memory")), AllOf(StartsWith("quern: "), HasSubstr("bytes on Faulty GPU, which has 1048576 free")));
}

TEST_F(UsableGpu, ThatDoesNotTakeTheCodeIsSaidSoAtOnce) {
  const std::vector<std::string> lines = eval_with_fault("foreign-code");
  EXPECT_THAT(last_of(lines), AllOf(StartsWith("quern: Faulty GPU does not load the device code"), HasSubstr("CUDA_ERROR_NO_BINARY_FOR_GPU")));
  EXPECT_THAT(lines, Not(::testing::Contains(HasSubstr("self-test"))));
}

TEST_F(UsableGpu, ThatFailsALaunchIsNamedWithTheKernel) {
  EXPECT_THAT(last_of(eval_with_fault("launch")),
              AllOf(StartsWith("quern: "), HasSubstr("kernel '"), HasSubstr("could not be launched on Faulty GPU: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")));
}

TEST_F(UsableGpu, ThatHangsUpIsNamedWithTheKernelLaunchedLast) {
  EXPECT_THAT(last_of(eval_with_fault("hang-up")), AllOf(StartsWith("quern: "), HasSubstr("waiting for work on Faulty GPU failed: CUDA_ERROR_ILLEGAL_ADDRESS (the last kernel launched is '"), EndsWith("')")));
}

TEST_F(UsableGpu, WhoseKernelsDoNothingIsNotComputedWith) { EXPECT_THAT(last_of(eval_with_fault("none")), AllOf(StartsWith("quern: cuda.plain cannot be used on Faulty GPU"), EndsWith("has no finite value"))); }

}  // namespace
}  // namespace quern::app
