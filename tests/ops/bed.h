#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numbers>
#include <span>
#include <string>
#include <vector>

#include "backends/platforms.h"
#include "base/float_convert.h"
#include "base/hash.h"
#include "ops/kernel_table.h"
#include "support/test_support.h"

// A device with tensors on it, for the tests of ops. Memory that a test does not fill holds NaN: whoever reads what is not theirs, shows
// it.

namespace quern::ops::testing {

/// Standard normal numbers from a seed.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  double uniform() { return (static_cast<double>(bits_.next() >> 12) + 0.5) * 0x1p-52; }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits_.next() % static_cast<uint64_t>(n)); }
  float normal() { return static_cast<float>(std::sqrt(-2.0 * std::log(uniform())) * std::cos(2.0 * std::numbers::pi * uniform())); }
  std::vector<float> normals(int64_t n, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = scale * normal();
    return values;
  }

 private:
  SplitMix64 bits_;
};

/// Which candidate the program tests: QUERN_TEST_CANDIDATE, cpu.plain without it. CTest runs the program once for each.
inline std::string candidate_under_test() {
  const char* name = std::getenv("QUERN_TEST_CANDIDATE");
  return name != nullptr ? name : "cpu.plain";
}
/// Its platform, and the first device of that, or QUERN_TEST_DEVICE; where it is not the CPU, all beds share it.
inline std::string platform_under_test() { return candidate_under_test().substr(0, candidate_under_test().find('.')); }
inline std::string device_under_test() {
  const char* name = std::getenv("QUERN_TEST_DEVICE");
  return name != nullptr ? name : platform_under_test() + ":0";
}
/// QUERN_TEST_FEW_LAUNCHES: for sanitizers, under which a launch takes a thousand times as long. Tests of many launches then keep one of each kind that kernels know.
inline bool few_launches() { return std::getenv("QUERN_TEST_FEW_LAUNCHES") != nullptr; }
inline Result<std::unique_ptr<Device>> open_device_under_test(int num_threads = 2) {
  return backends::open_device(device_under_test(), {.num_threads = num_threads, .inspectable = true});
}

class Bed {
 public:
  explicit Bed(int num_threads = 2) {
    if (platform_under_test() == "cpu") {
      own_device_ = open_device_under_test(num_threads).value();
      device_ = own_device_.get();
    } else {
      static const std::unique_ptr<Device> shared = open_device_under_test().value();
      device_ = shared.get();
    }
    stream_ = device_->make_stream().value();
  }
  ~Bed() { EXPECT_OK(stream_->finish()); }

  Device& device() { return *device_; }
  Stream& stream() { return *stream_; }

  /// What is made while it lives goes with it.
  class Temporaries {
   public:
    explicit Temporaries(Bed& bed) : bed_(bed), first_(bed.buffers_.size()) {}
    ~Temporaries() {
      EXPECT_OK(bed_.stream_->finish());
      bed_.buffers_.resize(first_);
    }
    Temporaries(const Temporaries&) = delete;
    Temporaries& operator=(const Temporaries&) = delete;

   private:
    Bed& bed_;
    size_t first_;
  };

  /// Every byte is 0xff: NaN in all float types, -1 in i32.
  TensorView tensor(DType dtype, const Shape& shape) {
    TensorView view{buffer(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype)), 0, dtype, shape};
    if (!view.empty()) std::memset(view.data<std::byte>(), 0xff, view.size_bytes());
    return view;
  }
  /// Values rounded to the dtype.
  TensorView tensor(DType dtype, const Shape& shape, std::span<const float> values) {
    const TensorView view = tensor(dtype, shape);
    CHECK(std::ssize(values) == shape.num_elements());
    for (size_t i = 0; i < values.size(); ++i) set(view, static_cast<int64_t>(i), values[i]);
    return view;
  }
  TensorView ints(const Shape& shape, std::span<const int32_t> values) {
    const TensorView view = tensor(DType::kI32, shape);
    CHECK(std::ssize(values) == shape.num_elements());
    if (!values.empty()) std::memcpy(view.data<std::byte>(), values.data(), values.size_bytes());
    return view;
  }
  TensorView zeros(DType dtype, const Shape& shape) {
    const TensorView view = tensor(dtype, shape);
    if (!view.empty()) std::memset(view.data<std::byte>(), 0, view.size_bytes());
    return view;
  }

  static void set(const TensorView& view, int64_t i, float value) {
    switch (view.dtype) {
      case DType::kF32: view.data<float>()[i] = value; return;
      case DType::kBF16: view.data<bf16>()[i] = to_bf16(value); return;
      case DType::kE4M3: view.data<uint8_t>()[i] = e4m3_encode(value); return;
      default: CHECK_UNREACHABLE();
    }
  }
  static float get(const TensorView& view, int64_t i) {
    switch (view.dtype) {
      case DType::kF32: return view.data<float>()[i];
      case DType::kBF16: return to_f32(view.data<bf16>()[i]);
      case DType::kF16: return f16_to_f32(view.data<uint16_t>()[i]);
      case DType::kE4M3: return kE4M3Table[view.data<uint8_t>()[i]];
      default: CHECK_UNREACHABLE();
    }
  }
  static std::vector<float> values(const TensorView& view) {
    std::vector<float> result(static_cast<size_t>(view.shape.num_elements()));
    for (size_t i = 0; i < result.size(); ++i) result[i] = get(view, static_cast<int64_t>(i));
    return result;
  }
  static std::vector<double> doubles(const TensorView& view) {
    const std::vector<float> v = values(view);
    return {v.begin(), v.end()};
  }
  static std::string bytes(const TensorView& view) {
    return view.empty() ? std::string() : std::string(reinterpret_cast<const char*>(view.data<std::byte>()), view.size_bytes());
  }

  /// A workspace of exactly the size that the kernel asks for.
  Launch launch(const Kernel& kernel, int64_t max_rows) {
    return {*stream_, tensor(DType::kU8, {static_cast<int64_t>(kernel.workspace_bytes(max_rows))})};
  }
  /// A buffer for a kernel's packed weights, of exactly the size it asks for.
  Buffer& packed(const Kernel& kernel) {
    const TensorView view = tensor(DType::kU8, {static_cast<int64_t>(kernel.packed_bytes())});
    return *view.buffer;
  }

 private:
  Buffer* buffer(size_t size_bytes) { return buffers_.emplace_back(device_->allocate(size_bytes, "test").value()).get(); }

  std::unique_ptr<Device> own_device_;
  Device* device_ = nullptr;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

/// Kernels of that candidate made so far, by op; main() demands some, so that no fast path hides behind plain.
inline std::map<std::string_view, int>& kernels_under_test() {
  static std::map<std::string_view, int> counts;
  return counts;
}

/// The candidate under test where the op has it and it takes the problem, else plain.
template <class Op>
std::unique_ptr<typename Op::Kernel> make_kernel(Bed& bed, const typename Op::Problem& problem) {
  const Candidate<Op>* chosen = nullptr;
  const std::string plain = platform_under_test() + ".plain";
  for (const Candidate<Op>& candidate : backends::kernel_table(bed.device().traits().platform).template list<Op>().candidates()) {
    if (candidate.name != plain && candidate.name != candidate_under_test()) continue;
    const Verdict verdict = candidate.accepts(problem, bed.device().traits());
    EXPECT_TRUE(verdict.accepted || candidate.name != plain) << verdict.reason;
    if (verdict.accepted && chosen == nullptr) chosen = &candidate;
  }
  if (chosen == nullptr) {
    ADD_FAILURE() << Op::kName << " has no candidate for the problem";
    return nullptr;
  }
  if (chosen->name == candidate_under_test()) ++kernels_under_test()[Op::kName];
  return chosen->make(problem, bed.device()).value();
}

/// Rows of a step over slots whose cursors stand where the test says.
struct Step {
  std::vector<RowRun> runs;
  Rows rows;

  /// Indices and positions are filled as `embed` would; block tables give every slot its own blocks in a scrambled order.
  /// Rows past those of the runs, up to `num_rows`, are padding.
  Step(Bed& bed, const std::vector<RowRun>& step_runs, const SlotTables& slots, int32_t num_rows = 0) : runs(step_runs) {
    rows.num_rows = num_rows;
    for (const RowRun& run : runs) rows.num_rows = std::max(rows.num_rows, run.first_row + run.num_rows);
    rows.runs = runs;
    rows.slots = slots;
    const auto num_runs = static_cast<int64_t>(runs.size());
    rows.run_table = bed.tensor(DType::kI32, {num_runs, kRunFields});
    rows.row_runs = bed.tensor(DType::kI32, {rows.num_rows});
    rows.given_tokens = bed.tensor(DType::kI32, {rows.num_rows});
    rows.run_positions = bed.zeros(DType::kI32, {num_runs, 3});
    fill_run_tables(runs, {rows.run_table.data<RunEntry>(), runs.size()}, {rows.row_runs.data<int32_t>(), static_cast<size_t>(rows.num_rows)});
    rows.tokens = bed.tensor(DType::kI32, {rows.num_rows});
    rows.indices = bed.tensor(DType::kI32, {rows.num_rows});
    rows.positions = bed.zeros(DType::kI32, {rows.num_rows, 3});
    std::fill_n(rows.indices.data<int32_t>(), rows.num_rows, -1);
    for (const RowRun& run : runs)
      for (int32_t i = 0; i < run.num_rows; ++i) {
        const int32_t index = slots.cursor.data<int32_t>()[run.slot] + i;
        rows.indices.data<int32_t>()[run.first_row + i] = index;
        for (int axis = 0; axis < 3; ++axis) rows.positions.data<int32_t>()[(run.first_row + i) * 3 + axis] = index;
      }
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
};

inline SlotTables make_slots(Bed& bed, int64_t num_slots, int64_t k_max, int64_t max_blocks) {
  SlotTables slots;
  slots.cursor = bed.zeros(DType::kI32, {num_slots});
  slots.boundary = bed.zeros(DType::kI32, {num_slots});
  slots.last_token = bed.zeros(DType::kI32, {num_slots});
  slots.position_delta = bed.zeros(DType::kI32, {num_slots});
  slots.drafts = bed.zeros(DType::kI32, {num_slots, k_max});
  slots.block_tables = bed.tensor(DType::kI32, {num_slots, max_blocks});
  const int64_t num_blocks = num_slots * max_blocks;
  for (int64_t i = 0; i < num_blocks; ++i)  // 7 and a power of two or small product: a permutation wherever 7 does not divide num_blocks
    slots.block_tables.data<int32_t>()[i] = static_cast<int32_t>((i * 7 + 3) % num_blocks);
  CHECK(num_blocks % 7 != 0);
  return slots;
}

/// sqrt(sum (actual - expected)^2 / sum expected^2); infinite where anything is NaN.
inline double relative_rms(std::span<const float> actual, std::span<const double> expected) {
  CHECK(actual.size() == expected.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = static_cast<double>(actual[i]) - expected[i];
    error += difference * difference;
    norm += expected[i] * expected[i];
  }
  const double result = std::sqrt(error / std::max(norm, 1e-300));
  return std::isnan(result) ? std::numeric_limits<double>::infinity() : actual.empty() ? 0.0 : result;
}

}  // namespace quern::ops::testing
