#include <algorithm>
#include <numeric>

#include "backends/cuda/attention_args.h"
#include "backends/cuda/device.h"
#include "backends/cuda/device_code.h"
#include "ops/bed.h"

// The CUDA platform below its kernels: device code, memory, copies. What needs a GPU is skipped, with the reason, where none is.

namespace quern::ops::testing {
namespace {

using std::string_view;

TEST(CudaDeviceCode, RunsWhereMachineCodeOrTranslationAllowsIt) {
  const string_view code[] = {"80", "89", "90a", "89-virtual"};
  for (const int device : {80, 86, 87, 89, 90, 100, 103, 120}) EXPECT_OK(cuda::covers(code, device)) << device;
  const auto old = cuda::covers(code, 75);
  ASSERT_FALSE(old.has_value());
  EXPECT_THAT(old.error().message, ::testing::HasSubstr("sm_75"));
  EXPECT_THAT(old.error().message, ::testing::HasSubstr("90a"));
  const string_view exact[] = {"90a"}, machine[] = {"89"};
  EXPECT_OK(cuda::covers(exact, 90));
  EXPECT_FALSE(cuda::covers(exact, 100).has_value());
  EXPECT_FALSE(cuda::covers(machine, 86).has_value());
  EXPECT_FALSE(cuda::covers(machine, 90).has_value());
}

TEST(CudaDeviceCode, SaysWhatADeviceRuns) {
  const string_view code[] = {"80", "90a", "89-virtual"};
  EXPECT_EQ(cuda::code_for(code, 80), "machine code of sm_80");
  EXPECT_EQ(cuda::code_for(code, 86), "machine code of sm_80");
  EXPECT_EQ(cuda::code_for(code, 89), "machine code of sm_80");
  EXPECT_EQ(cuda::code_for(code, 90), "machine code of sm_90a");
  EXPECT_EQ(cuda::code_for(code, 120), "code for sm_89, translated by the driver");
  EXPECT_EQ(cuda::code_for(code, 75), "");
}

TEST(CudaDeviceCode, OfUnitsWithNewerInstructionsIsWhatNewerArchitecturesHave) {
  const string_view code[] = {"80", "90a", "89-virtual"}, old[] = {"80", "86"};
  EXPECT_THAT(cuda::architectures_from(89, code), ::testing::ElementsAre("90a", "89-virtual"));
  EXPECT_THAT(cuda::architectures_from(89, old), ::testing::IsEmpty());
  EXPECT_FALSE(cuda::covers(cuda::architectures_from(89, code), 86).has_value());
  for (const int device : {89, 90, 120}) EXPECT_OK(cuda::covers(cuda::architectures_from(89, code), device)) << device;
}

TEST(CudaDeviceCode, WaitsForPredecessorsWhereItIsMachineCodeThatCan) {
  const string_view translated[] = {"80", "90a", "89-virtual"}, machine[] = {"80", "90a", "120", "89-virtual"};
  EXPECT_TRUE(cuda::waits_for_predecessors(translated, 90));
  EXPECT_FALSE(cuda::waits_for_predecessors(translated, 120));
  EXPECT_TRUE(cuda::waits_for_predecessors(machine, 120));
  for (const int device : {80, 89, 100}) EXPECT_FALSE(cuda::waits_for_predecessors(machine, device)) << device;
}

TEST(CudaDeviceCode, IsAnElfImageForEveryUnitOrAReason) {
  if (cuda::device_code().empty()) {
    const auto covered = cuda::build_covers(90);
    ASSERT_FALSE(covered.has_value());
    EXPECT_THAT(covered.error().message, ::testing::HasSubstr("nvcc"));
    GTEST_SKIP() << "this build has no device code";
  }
  EXPECT_FALSE(cuda::code_architectures().empty());
  EXPECT_GE(cuda::toolkit_version(), 12000);
  for (const cuda::DeviceCode& code : cuda::device_code()) {
    ASSERT_GT(code.image.size(), 16u) << code.unit;
    const unsigned char magic[] = {0x50, 0xed, 0x55, 0xba};  // of a container with code for several architectures
    EXPECT_TRUE(std::equal(std::begin(magic), std::end(magic), reinterpret_cast<const unsigned char*>(code.image.data()))) << code.unit;
  }
}

/// cuda-emulated:N: a newer GPU that passes for sm_89.
TEST(CudaEmulation, RunsTheCodeOfAWorkstationCardInTheMemoryOfOneOrSaysWhatIsMissing) {
  const auto opened = cuda::Device::open(0, {.emulates_workstation = true});
  if (!opened) GTEST_SKIP() << opened.error().message;
  cuda::Device& device = **opened;
  EXPECT_EQ(device.traits().architecture, 89);
  EXPECT_THAT(device.traits().name, ::testing::HasSubstr("emulating sm_89"));
  EXPECT_EQ(device.max_shared_bytes(), 99 << 10);
  EXPECT_EQ(device.blocks_by_shared_bytes(49 << 10), 2);
  EXPECT_EQ(device.blocks_by_shared_bytes((49 << 10) + 1), 1);
  const auto found = device.function<cuda::AttentionArgs>("attention_mma", "attention_prompt_bf16", cuda::kPromptSharedBytes);
  if (std::getenv("CUDA_FORCE_PTX_JIT") == nullptr) {
    ASSERT_FALSE(found.has_value());
    EXPECT_THAT(found.error().message, ::testing::HasSubstr("CUDA_FORCE_PTX_JIT=1"));
    return;
  }
  EXPECT_OK(found);
  const auto large = device.function<cuda::AttentionArgs>("attention_mma", "attention_prompt_bf16", 100 << 10);
  ASSERT_FALSE(large.has_value());
  EXPECT_THAT(large.error().message, ::testing::HasSubstr("shared memory"));
}

class CudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = cuda::Device::open(0);
    if (!opened) GTEST_SKIP() << opened.error().message;
    device = std::move(*opened);
  }
  std::unique_ptr<cuda::Device> device;
};

TEST_F(CudaDevice, HandsOutZeroedAlignedMemoryAndCountsIt) {
  EXPECT_EQ(device->allocated_bytes(), 0u);
  const auto stream = device->make_stream().value();
  {
    const size_t size = (size_t{64} << 20) + 4;
    const auto small = device->allocate(100, "a small thing").value(), large = device->allocate(size, "a large thing").value();
    EXPECT_EQ(device->allocated_bytes(), 100 + (size_t{66} << 20));  // pages of 2 MiB
    EXPECT_EQ(reinterpret_cast<uintptr_t>(small->address()) % 256, 0u);
    std::vector<std::byte> seen(size, std::byte{1});
    stream->copy_to_host({large.get(), 0, DType::kU8, Shape{static_cast<int64_t>(size)}}, seen.data());
    ASSERT_OK(stream->finish());
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(device->allocate(0, "nothing").value()->size_bytes(), 0u);
  }
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

TEST_F(CudaDevice, KernelsShareWordsByNameWhileOneOfThemHasThem) {
  const auto stream = device->make_stream().value();
  constexpr size_t kWords = 1 << 20;
  auto first = device->shared_words("sums", kWords, -1).value(), second = device->shared_words("sums", kWords / 2, -1).value();
  const auto other = device->shared_words("others", 3, 7).value();
  EXPECT_EQ(first, second);
  EXPECT_NE(first, other);
  std::vector<int32_t> seen(kWords);
  stream->copy_to_host({first.get(), 0, DType::kI32, Shape{static_cast<int64_t>(kWords)}}, seen.data());
  ASSERT_OK(stream->finish());
  EXPECT_EQ(std::count(seen.begin(), seen.end(), -1), static_cast<std::ptrdiff_t>(kWords));
  const size_t both = device->allocated_bytes();
  first = second = nullptr;
  EXPECT_LT(device->allocated_bytes(), both);
}

TEST_F(CudaDevice, RefusesMoreMemoryThanItHasByName) {
  const auto result = device->allocate(device->traits().memory_bytes + 1, "the KV cache");
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kResourceExhausted);
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("the KV cache"));
  EXPECT_OK(device->allocate(1000, "what still fits"));
}

TEST_F(CudaDevice, CopiesInOrderWhateverTheSizesAndAlignments) {
  const auto stream = device->make_stream().value();
  const auto a = device->allocate(size_t{160} << 20, "a").value(), b = device->allocate(size_t{160} << 20, "b").value();
  Random random(5);
  size_t at = 0;
  std::vector<std::pair<size_t, std::vector<uint8_t>>> sent;
  for (const size_t size : {size_t{1}, size_t{63}, size_t{64}, size_t{4097}, size_t{4} << 20, (size_t{9} << 20) + 3, size_t{20} << 20, size_t{5}, (size_t{16} << 20) - 1, size_t{16} << 20,
                            (size_t{70} << 20) + 11, size_t{4096}}) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; i += 7) bytes[i] = static_cast<uint8_t>(random.below(256));
    const TensorView view{a.get(), at, DType::kU8, Shape{static_cast<int64_t>(size)}};
    stream->copy_to_device(std::vector<uint8_t>(bytes).data(), view);  // a copy that is gone at once
    sent.emplace_back(at, std::move(bytes));
    at += size + 5;
  }
  stream->copy({a.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}}, {b.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}});
  stream->fill_zero({a.get(), 0, DType::kU8, Shape{static_cast<int64_t>(at)}});
  for (const auto& [offset, bytes] : sent) {
    std::vector<uint8_t> back(bytes.size()), cleared(bytes.size(), 1);
    stream->copy_to_host({b.get(), offset, DType::kU8, Shape{static_cast<int64_t>(bytes.size())}}, back.data());
    stream->copy_to_host({a.get(), offset, DType::kU8, Shape{static_cast<int64_t>(bytes.size())}}, cleared.data());
    ASSERT_OK(stream->finish());
    EXPECT_EQ(back, bytes);
    EXPECT_EQ(std::count(cleared.begin(), cleared.end(), 0), static_cast<std::ptrdiff_t>(cleared.size()));
  }
}

TEST_F(CudaDevice, CopiesPageLockedMemoryInOrderWhateverTheSizesAndAlignments) {
  const auto stream = device->make_stream().value();
  constexpr size_t kSmall = size_t{256} << 10;  // what a kernel copies
  const auto here = device->allocate(4 * kSmall, "here").value(), host = device->allocate_host(4 * kSmall, "sent").value(), back = device->allocate_host(4 * kSmall, "back").value();
  Random random(6);
  for (const size_t size : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{2047}, size_t{2048}, size_t{17'280}, kSmall - 1, kSmall, kSmall + 1, 2 * kSmall})
    for (const size_t shift : {size_t{0}, size_t{4}, size_t{16}, size_t{17}}) {
      std::byte *const from = host->address() + shift, *const to = back->address() + (shift * 5 + 1);
      for (size_t i = 0; i < size; ++i) from[i] = static_cast<std::byte>(random.below(256));
      std::fill_n(back->address(), back->size_bytes(), std::byte{0});
      const TensorView view{here.get(), shift * 3, DType::kU8, Shape{static_cast<int64_t>(size)}};
      stream->copy_to_device(from, view);
      stream->copy_to_host(view, to);
      ASSERT_OK(stream->wait(stream->mark()));
      EXPECT_TRUE(std::equal(from, from + size, to)) << size << " bytes at " << shift;
      EXPECT_EQ(to[-1], std::byte{0});
      EXPECT_EQ(to[size], std::byte{0});
    }
}

TEST_F(CudaDevice, SaysWhichKernelIsMissingOrAsksForTooMuch) {
  struct None {
    int nothing;
  };
  const auto unit = device->function<None>("no_such_unit", "combine");
  ASSERT_FALSE(unit.has_value());
  EXPECT_THAT(unit.error().message, ::testing::HasSubstr("no_such_unit"));
  const auto kernel = device->function<None>("combine", "no_such_kernel");
  ASSERT_FALSE(kernel.has_value());
  EXPECT_THAT(kernel.error().message, ::testing::HasSubstr("no_such_kernel"));
  const auto shared = device->function<None>("combine", "combine", 1 << 20);
  ASSERT_FALSE(shared.has_value());
  EXPECT_THAT(shared.error().message, ::testing::HasSubstr("shared memory"));
}

}  // namespace
}  // namespace quern::ops::testing
