#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include <unistd.h>

#include "backends/opencl/device.h"
#include "backends/opencl/kernel_source.h"
#include "backends/opencl/programs.h"
#include "backends/opencl/stream.h"
#include "ops/bed.h"

// The OpenCL platform below its kernels: sources, memory, copies, programs. What needs a device is skipped, with the reason, where none is.

namespace quern::ops::testing {
namespace {

using ::testing::HasSubstr;
using std::string_view;

TEST(OpenClSources, HoldEveryUnitWithItsHeadersPastedInOnce) {
  int num_units = 0;
  for (const opencl::SourceFile& file : opencl::source_files()) {
    EXPECT_NE(file.text, "") << file.name;
    if (!file.name.ends_with(".cl")) continue;
    ++num_units;
    const auto source = opencl::unit_source(file.name.substr(0, file.name.find('.')));
    ASSERT_OK(source);
    EXPECT_EQ(source->find("#include"), std::string::npos) << file.name;
    EXPECT_THAT(*source, HasSubstr("__kernel")) << file.name;
    const string_view once = "float bf16_to_f32(ushort bits) {";
    const size_t first = source->find(once);
    ASSERT_NE(first, std::string::npos) << file.name;
    EXPECT_EQ(source->find(once, first + 1), std::string::npos) << file.name;
  }
  EXPECT_GT(num_units, 5);
  const auto missing = opencl::unit_source("no_such_unit");
  ASSERT_FALSE(missing.has_value());
  EXPECT_THAT(missing.error().message, HasSubstr("no_such_unit"));
}

/// The device that the program tests, or the first.
class OpenClDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    cache_ = std::filesystem::path(::testing::TempDir()) / fmt::format("quern-opencl-{}", getpid());
    open();
  }
  void TearDown() override { std::filesystem::remove_all(cache_); }
  void open() {
    const std::string name = platform_under_test() == "opencl" ? device_under_test() : "opencl:0";
    auto opened = opencl::Device::open(std::stoi(name.substr(name.find(':') + 1)), {.program_cache = cache_.string()});
    if (!opened) GTEST_SKIP() << opened.error().message;
    device = std::move(*opened);
  }
  std::vector<std::filesystem::path> cached() const {
    std::vector<std::filesystem::path> files;
    if (std::filesystem::exists(cache_))
      for (const auto& entry : std::filesystem::directory_iterator(cache_)) files.push_back(entry.path());
    return files;
  }
  std::filesystem::path cache_;
  std::unique_ptr<opencl::Device> device;
};

TEST_F(OpenClDevice, HandsOutZeroedMemoryAndCountsIt) {
  EXPECT_EQ(device->allocated_bytes(), 0u);
  const auto stream = device->make_stream().value();
  {
    const size_t size = (size_t{64} << 20) + 4;
    const auto small = device->allocate(100, "a small thing").value(), large = device->allocate(size, "a large thing").value();
    EXPECT_EQ(device->allocated_bytes(), 100 + size);
    std::vector<std::byte> seen(size, std::byte{1});
    stream->copy_to_host({large.get(), 0, DType::kU8, Shape{static_cast<int64_t>(size)}}, seen.data());
    ASSERT_OK(stream->finish());
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(device->allocate(0, "nothing").value()->size_bytes(), 0u);
  }
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

TEST_F(OpenClDevice, RefusesMoreMemoryThanItHasByName) {
  const auto result = device->allocate(device->traits().memory_bytes + 1, "the KV cache");
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kResourceExhausted);
  EXPECT_THAT(result.error().message, HasSubstr("the KV cache"));
  EXPECT_OK(device->allocate(1000, "what still fits"));
}

TEST_F(OpenClDevice, CopiesInOrderWhateverTheSizesAndAlignments) {
  const auto stream = device->make_stream().value();
  const auto a = device->allocate(size_t{48} << 20, "a").value(), b = device->allocate(size_t{48} << 20, "b").value();
  const auto host = device->allocate_host(size_t{20} << 20, "host memory").value();
  Random random(5);
  size_t at = 0;
  std::vector<std::pair<size_t, std::vector<uint8_t>>> sent;
  const std::vector<size_t> sizes{1, 63, 64, 4097, size_t{8} << 20, (size_t{9} << 20) + 3, size_t{20} << 20};
  sent.reserve(sizes.size());
  for (const size_t size : sizes) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; i += 7) bytes[i] = static_cast<uint8_t>(random.below(256));
    sent.emplace_back(at, std::move(bytes));
    const TensorView view{a.get(), at, DType::kU8, Shape{static_cast<int64_t>(size)}};
    if (size == sizes.back()) {
      std::copy_n(reinterpret_cast<const std::byte*>(sent.back().second.data()), size, host->address());
      stream->copy_to_device(host->address(), view);
    } else {
      stream->copy_to_device(sent.back().second.data(), view);
    }
    at += size + 5;
  }
  stream->copy({a.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}}, {b.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}});
  stream->fill_zero({a.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}});
  const Mark copied = stream->mark();
  ASSERT_OK(stream->wait(copied));
  for (const auto& [offset, bytes] : sent) {
    std::vector<uint8_t> back(bytes.size()), cleared(bytes.size(), 1);
    stream->copy_to_host({b.get(), offset, DType::kU8, Shape{static_cast<int64_t>(bytes.size())}}, back.data());
    stream->copy_to_host({a.get(), offset, DType::kU8, Shape{static_cast<int64_t>(bytes.size())}}, cleared.data());
    ASSERT_OK(stream->finish());
    EXPECT_EQ(back, bytes);
    EXPECT_EQ(std::count(cleared.begin(), cleared.end(), 0), static_cast<std::ptrdiff_t>(cleared.size()));
  }
}

TEST_F(OpenClDevice, SaysWhichSourceKernelOrDefinitionIsWrong) {
  const auto unit = device->function("no_such_unit", "combine");
  ASSERT_FALSE(unit.has_value());
  EXPECT_THAT(unit.error().message, HasSubstr("no_such_unit"));
  const auto kernel = device->function("combine", "no_such_kernel", "-DACTIVATION_F32");
  ASSERT_FALSE(kernel.has_value());
  EXPECT_THAT(kernel.error().message, HasSubstr("no_such_kernel"));
  const auto broken = device->function("combine", "combine", "-Dactivation_t=no_such_type");
  ASSERT_FALSE(broken.has_value());
  EXPECT_EQ(broken.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(broken.error().message, HasSubstr("no_such_type"));
}

TEST_F(OpenClDevice, ReportsALaunchThatCannotBeMadeAtTheFence) {
  const auto combine = device->function("combine", "combine", "-DACTIVATION_F32").value();
  const auto stream = device->make_stream().value();
  opencl::opencl_stream(*stream).launch(combine, {{1, 1, 1}, {1 << 24, 1, 1}}, opencl::Place{}, opencl::Place{}, opencl::Place{}, 1, 1, int64_t{0});
  const auto done = stream->finish();
  ASSERT_FALSE(done.has_value());
  EXPECT_THAT(done.error().message, HasSubstr("'combine'"));
}

TEST_F(OpenClDevice, KeepsProgramsOnDiskAndBuildsDamagedOnesAgain) {
  ASSERT_OK(device->function("combine", "combine", "-DACTIVATION_F32"));
  const auto files = cached();
  ASSERT_EQ(files.size(), 1u);
  ASSERT_OK(device->function("combine", "combine", "-DACTIVATION_BF16"));
  EXPECT_EQ(cached().size(), 2u) << "other definitions are another program";
  for (const int damage : {0, 1, 2}) {
    const auto size = std::filesystem::file_size(files[0]);
    if (damage == 1) std::filesystem::resize_file(files[0], size / 2);
    if (damage == 2) std::ofstream(files[0], std::ios::binary | std::ios::trunc);
    open();
    const auto combine = device->function("combine", "combine", "-DACTIVATION_F32");
    ASSERT_OK(combine);
    const auto stream = device->make_stream().value();
    const std::vector<float> partial{1, 2, 3}, before{10, 20, 30};
    const auto memory = device->allocate(36, "three vectors").value();
    const auto part = [&](size_t which) { return TensorView{memory.get(), 12 * which, DType::kF32, Shape{3}}; };
    stream->copy_to_device(partial.data(), part(0));
    stream->copy_to_device(before.data(), part(2));
    opencl::opencl_stream(*stream).launch(*combine, {{1, 1, 1}, {64, 1, 1}}, part(0), part(1), part(2), 1, 1, int64_t{3});
    std::vector<float> after(3);
    stream->copy_to_host(part(2), after.data());
    ASSERT_OK(stream->finish());
    EXPECT_EQ(after, (std::vector<float>{11, 22, 33})) << damage;
    EXPECT_GT(std::filesystem::file_size(files[0]), size / 2) << damage;
  }
}

TEST_F(OpenClDevice, TakesTheMachineCodeThatTheProgramBringsAlongAndCompilesWhereTheDriverRefusesIt) {
  ASSERT_OK(device->function("norm", "norm_rows", "-DACTIVATION_F32"));
  ASSERT_EQ(cached().size(), 1u);
  std::ifstream file(cached()[0], std::ios::binary);
  const std::string kept((std::istreambuf_iterator<char>(file)), {}), binary = kept.substr(sizeof(uint64_t));
  const std::string name = platform_under_test() == "opencl" ? device_under_test() : "opencl:0";
  const auto with = [&](std::string_view bytes, bool breaks_source) {
    opencl::DeviceOptions options;
    options.binary = [bytes](std::string_view unit, std::string_view definitions) { return unit == "norm" && definitions == "-DACTIVATION_F32" ? bytes : std::string_view(); };
    if (breaks_source) options.edit_source = [](std::string_view, std::string& source) { source += "no kernel;"; };
    options.program_cache.clear();
    return opencl::Device::open(std::stoi(name.substr(name.find(':') + 1)), options).value();
  };
  const auto taken = with(binary, true);
  EXPECT_OK(taken->function("norm", "norm_rows", "-DACTIVATION_F32")) << "the source would not build";
  EXPECT_FALSE(taken->function("norm", "norm_rows", "-DACTIVATION_BF16").has_value()) << "of which there is no machine code";
  for (const std::string& wrong : {std::string("!<arch>\nno machine code of this device"), std::string(4096, 'x')}) {
    const auto compiled = with(wrong, false);
    EXPECT_OK(compiled->function("norm", "norm_rows", "-DACTIVATION_F32")) << wrong.size();
  }
}

TEST(OpenClBinaries, AreOfDeclaredProgramsWhereTheBuildHadACompiler) {
  std::set<std::pair<std::string_view, std::string_view>> declared;
  for (const opencl::DeclaredProgram& program : opencl::declarations().programs) declared.emplace(program.unit, program.definitions);
  for (const opencl::ProgramBinary& program : opencl::program_binaries()) {
    EXPECT_TRUE(declared.contains({program.unit, program.definitions})) << program.unit << " " << program.definitions;
    EXPECT_TRUE(program.bytes.starts_with("!<arch>\n")) << program.unit << " " << program.definitions;
    for (const char* chip : {"64.20.1.0/", "64.20.2.0/"}) EXPECT_THAT(program.bytes, HasSubstr(chip)) << program.unit << " " << program.definitions;
  }
  if (opencl::program_binaries().empty()) GTEST_SKIP() << "this build has no machine code for Xe2: CMake found no ocloc";
  EXPECT_EQ(opencl::program_binaries().size(), declared.size());
}

TEST(OpenCl, NamesTheFirstIntelGpuOrSaysThatThereIsNone) {
  const auto any = opencl::traits_of(0), intel = opencl::traits_of({});
  if (!any) {
    EXPECT_FALSE(intel.has_value());
    EXPECT_NE(any.error().message, "");
    GTEST_SKIP() << any.error().message;
  }
  if (intel) {
    EXPECT_EQ(intel->name, any->name) << "Intel GPUs come first";
  } else {
    EXPECT_THAT(intel.error().message, HasSubstr("opencl:0"));
    EXPECT_THAT(intel.error().message, HasSubstr(any->name));
  }
  const auto none = opencl::traits_of(999);
  ASSERT_FALSE(none.has_value());
  EXPECT_THAT(none.error().message, HasSubstr("counted from 0"));
}

}  // namespace
}  // namespace quern::ops::testing
