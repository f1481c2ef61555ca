// Host memory while weights are loaded: a checkpoint of many GB in one file, on hosts with less memory than that.

#include <malloc.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "synth_checkpoint/plan.h"
#include "synth_checkpoint/synth.h"
#include "weights/safetensors_writer.h"
#include "weights/staging.h"
#include "worker/runner_fixture.h"

namespace quern::worker {
namespace {

/// Anonymous memory of this process that is resident.
uint64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  std::string key;
  uint64_t kilobytes = 0;
  while (status >> key) {
    if (key == "RssAnon:") return status >> kilobytes ? kilobytes << 10 : 0;
    status.ignore(1 << 20, '\n');
  }
  return 0;
}

/// The most that there is of it above what there was, looked at every millisecond.
class AnonymousPeak {
 public:
  AnonymousPeak() : before_(at_rest()), watcher_([this](const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!ends_.wait_for(lock, stop, std::chrono::milliseconds(1), [&] { return stop.stop_requested(); })) peak_ = std::max(peak_.load(), anonymous_bytes());
  }) {}
  uint64_t stop() {
    watcher_.request_stop();
    watcher_.join();
    return std::max(peak_.load(), before_) - before_;
  }

 private:
  /// What was freed is given back first, so that it is not counted as there before.
  static uint64_t at_rest() {
    malloc_trim(0);
    return anonymous_bytes();
  }
  const uint64_t before_;
  std::atomic<uint64_t> peak_ = 0;
  std::mutex mutex_;
  std::condition_variable_any ends_;
  std::jthread watcher_;
};

/// Memory that is nowhere.
class NoBuffer final : public ops::Buffer {
 public:
  explicit NoBuffer(size_t size_bytes) : size_bytes_(size_bytes) {}
  [[nodiscard]] std::byte* address() const override { return nullptr; }
  [[nodiscard]] size_t size_bytes() const override { return size_bytes_; }

 private:
  size_t size_bytes_;
};

/// A queue that reads what it is to copy and keeps nothing of it.
class NoStream final : public ops::Stream {
 public:
  void copy_to_device(const void* source, const ops::TensorView& destination) override {
    for (size_t at = 0; at < destination.size_bytes(); at += 4096) seen_ = seen_ + static_cast<const volatile unsigned char*>(source)[at];
  }
  void copy_to_host(const ops::TensorView& source, void* destination) override { std::memset(destination, 0, source.size_bytes()); }
  void copy(const ops::TensorView& /*source*/, const ops::TensorView& /*destination*/) override {}
  void fill_zero(const ops::TensorView& /*destination*/) override {}
  Result<void> finish() override { return {}; }
  ops::Mark mark() override { return 0; }
  Result<void> wait(ops::Mark /*mark*/) override { return {}; }

 private:
  uint64_t seen_ = 0;
};

class NoDevice final : public ops::Device {
 public:
  [[nodiscard]] const ops::DeviceTraits& traits() const override { return traits_; }
  Result<std::unique_ptr<ops::Buffer>> allocate(size_t size_bytes, std::string_view /*purpose*/) override {
    allocated_bytes_ += size_bytes;
    return std::unique_ptr<ops::Buffer>(std::make_unique<NoBuffer>(size_bytes));
  }
  Result<std::unique_ptr<ops::Buffer>> allocate_host(size_t size_bytes, std::string_view purpose) override { return allocate(size_bytes, purpose); }
  Result<std::unique_ptr<ops::Stream>> make_stream() override { return std::unique_ptr<ops::Stream>(std::make_unique<NoStream>()); }
  [[nodiscard]] size_t allocated_bytes() const override { return allocated_bytes_; }  // in all: nothing is kept, so nothing is given back

 private:
  ops::DeviceTraits traits_;
  size_t allocated_bytes_ = 0;
};

struct Checkpoint {
  const char* name;
  tools::SynthScheme scheme;
  bool quantize;       // while it is loaded
  int32_t num_layers;
  std::vector<int32_t> tp_sizes;
};
/// The model's shapes, in one file without blocks on the disk but for what is small. Returns its bytes.
uint64_t write(const Checkpoint& checkpoint, const std::filesystem::path& folder) {
  tools::SynthOptions options;
  options.config = tools::preset_config("27b").value();
  Json& text = options.config["text_config"];
  text["num_hidden_layers"] = checkpoint.num_layers;
  text["layer_types"].get_ref<Json::array_t&>().resize(static_cast<size_t>(checkpoint.num_layers));
  options.scheme = checkpoint.scheme;
  options.text_files = false;
  options.shard_bytes = uint64_t{1} << 60;
  options.holes = true;
  EXPECT_OK(tools::write_checkpoint(options, folder));
  uint64_t bytes = 0;
  int32_t num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") {
      bytes += entry.file_size();
      ++num_files;
    }
  EXPECT_EQ(num_files, 1);
  return bytes;
}

/// Loads what one rank has, as load_model() does but for packing, onto a device that keeps nothing.
Result<void> load(const ExecutionPlan& plan, const RankPlan& rank, weights::WeightSource& source, NoDevice& device) {
  ASSIGN_OR_RETURN(const auto stream, device.make_stream());
  const auto part_of = [&](const std::string& name) { return slice_of(rank.shard, plan.config, name, plan.with_mtp); };
  for (const auto& [name, shape] : source.inventory().linears) {
    if (const auto slice = part_of(name)) {
      ASSIGN_OR_RETURN(const auto staged, source.linear(name, *slice, device, *stream));
      source.done_with(name);
    }
  }
  for (const auto& [name, stored] : source.inventory().vectors) {
    if (const auto slice = part_of(name)) {
      ASSIGN_OR_RETURN(const auto staged, source.vector(name, *slice, device, *stream));
      source.done_with(name);
    }
  }
  return {};
}

TEST(LoadingMemory, IsAFewPiecesForEveryRankAtAnySizeOfTheFile) {
  // Two pieces for each rank, rows on their way into them, and what the file's header says.
  constexpr uint64_t kOfARank = 2 * weights::Staging::kChunkBytes + (8 << 20), kBeside = 64 << 20;
  using tools::SynthScheme;
  for (const Checkpoint& checkpoint : {Checkpoint{"static fp8", SynthScheme::kStaticFp8, false, 4, {1, 4}}, {"bf16, quantized while loading", SynthScheme::kBf16, true, 1, {4}}}) {
    const quern::testing::TemporaryFolder folder;
    const uint64_t file_bytes = write(checkpoint, folder.path());
    EXPECT_GT(file_bytes, uint64_t{6'000'000'000});
    for (const int32_t tp_size : checkpoint.tp_sizes) {
      SCOPED_TRACE(::testing::Message() << checkpoint.name << ", tp " << tp_size);
      WorkerOptions options{.model_dir = folder.path(), .device = "b60", .tp_size = tp_size};
      options.load.quantize_fp8 = checkpoint.quantize;
      const auto plan = make_plan(options);
      ASSERT_OK(plan);
      AnonymousPeak peak;
      const auto source = weights::open_weights(options.model_dir, plan->config, options.load);
      ASSERT_OK(source);
      std::vector<NoDevice> devices(static_cast<size_t>(tp_size));
      {
        std::vector<std::jthread> ranks;
        for (size_t rank = 0; rank < devices.size(); ++rank) ranks.emplace_back([&, rank] { EXPECT_OK(load(*plan, plan->ranks[rank], **source, devices[rank])); });
      }
      const uint64_t most = peak.stop();
      uint64_t moved = 0;
      for (const NoDevice& device : devices) moved += device.allocated_bytes();
      std::cout << fmt::format("{}, tp {}: {:.1f} GB in the file, {:.1f} GB moved, at most {} MiB of anonymous memory\n", checkpoint.name, tp_size, static_cast<double>(file_bytes) / 1e9,
                               static_cast<double>(moved) / 1e9, most >> 20);
      EXPECT_GT(moved, uint64_t{3'000'000'000});
      EXPECT_LT(most, static_cast<uint64_t>(tp_size) * kOfARank + kBeside);
      EXPECT_LT(most, uint64_t{2} << 30);
    }
  }
}

/// The measure sees memory that is held for a moment.
TEST(LoadingMemory, OfAThreadIsSeen) {
  AnonymousPeak peak;
  std::jthread([] {
    std::vector<char> memory(size_t{300} << 20, 'x');
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }).join();
  EXPECT_GT(peak.stop(), uint64_t{290} << 20);
}

}  // namespace
}  // namespace quern::worker
