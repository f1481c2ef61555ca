#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/bed.h"

// Ranks with a device, a stream and a thread each, for the tests of what passes between them. Devices are as in serving, not inspectable: bytes go up and come down through streams.

namespace quern::ops::testing {

/// GPUs of the machine.
inline int32_t num_cuda_devices() {
  static const int32_t count = [] {
    int32_t n = 0;
    while (backends::open_device(fmt::format("cuda:{}", n), {}).has_value()) ++n;
    return n;
  }();
  return count;
}

/// Devices for `n` ranks: QUERN_TEST_DEVICES ("cuda:0,cuda:1,..."), else as many CPU devices or GPUs, or, on OpenCL, one device opened as often. Empty where there are fewer.
inline std::vector<std::string> rank_device_names(int32_t n) {
  std::vector<std::string> names;
  if (const char* list = std::getenv("QUERN_TEST_DEVICES")) {
    const std::string text = list;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      names.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  } else if (platform_under_test() == "cuda") {
    for (int32_t i = 0; i < std::min(n, num_cuda_devices()); ++i) names.push_back(fmt::format("cuda:{}", i));
  } else {
    names.assign(static_cast<size_t>(n), device_under_test());
  }
  if (std::ssize(names) < n) return {};
  names.resize(static_cast<size_t>(n));
  return names;
}

class Ranks;

/// One rank, used by its thread.
class RankUnderTest {
 public:
  RankUnderTest(Device& device, int32_t rank) : device_(device), rank_(rank), stream_(device.make_stream().value()) {}

  [[nodiscard]] int32_t rank() const { return rank_; }
  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] Stream& stream() const { return *stream_; }
  [[nodiscard]] Collective& end() const { return *end_; }
  Launch launch() { return {*stream_, {workspace_.get(), 0, DType::kU8, Shape{workspace_ == nullptr ? 0 : static_cast<int64_t>(workspace_->size_bytes())}}}; }

  TensorView tensor(DType dtype, const Shape& shape) {
    const auto bytes = static_cast<size_t>(shape.num_elements()) * dtype_size(dtype);
    buffers_.push_back(device_.allocate(bytes, "test").value());
    return {buffers_.back().get(), 0, dtype, shape};
  }
  TensorView tensor(DType dtype, const Shape& shape, const std::string& bytes) {
    const TensorView view = tensor(dtype, shape);
    CHECK(bytes.size() == view.size_bytes());
    upload(bytes, view);
    return view;
  }
  void upload(const std::string& bytes, const TensorView& view) {
    if (view.empty()) return;
    stream_->copy_to_device(bytes.data(), view);
    EXPECT_OK(stream_->finish());
  }
  std::string download(const TensorView& view) {
    std::string bytes(view.empty() ? 0 : view.size_bytes(), '?');
    if (!bytes.empty()) stream_->copy_to_host(view, bytes.data());
    EXPECT_OK(stream_->finish());
    return bytes;
  }
  /// The kernel; launches from now on have the workspace for up to kMaxRows rows.
  static constexpr int64_t kMaxRows = 4000;
  std::unique_ptr<Combine::Kernel> combine(int64_t hidden, DType dtype, int32_t num_ranks) {
    auto kernel = backends::kernel_table(device_.traits().platform).combine.candidates().back().make({hidden, num_ranks, dtype}, device_).value();
    const size_t wanted = kernel->workspace_bytes(kMaxRows);
    if (workspace_ == nullptr || workspace_->size_bytes() < wanted) workspace_ = device_.allocate(wanted, "workspace").value();
    return kernel;
  }
  void release_tensors() { buffers_.clear(); }

 private:
  friend class Ranks;
  Device& device_;
  int32_t rank_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Collective> end_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unique_ptr<Buffer> workspace_;
};

class Ranks {
 public:
  using Connect = std::function<Result<Collectives>(std::span<Device* const>)>;

  /// Joined by the transport of the options as it is, without the trials of backends::connect.
  Ranks(int32_t n, const CollectiveOptions& options)
      : Ranks(n, [&](std::span<Device* const> devices) -> Result<Collectives> {
          for (const Transport& transport : backends::transports(devices.front()->traits().platform).transports())
            if (transport.name == options.transport) return transport.connect(devices, options);
          return invalid_argument("no transport {}", options.transport);
        }) {}
  Ranks(int32_t n, const Connect& connect) {
    for (const std::string& name : rank_device_names(n)) devices_.push_back(backends::open_device(name, {.num_threads = 1}).value());
    std::vector<Device*> devices;
    for (const auto& device : devices_) devices.push_back(device.get());
    Collectives ends = connect(devices).value();
    for (int32_t rank = 0; rank < n; ++rank) {
      ranks_.push_back(std::make_unique<RankUnderTest>(*devices[static_cast<size_t>(rank)], rank));
      ranks_.back()->end_ = std::move(ends[static_cast<size_t>(rank)]);
    }
  }

  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(ranks_.size()); }
  RankUnderTest& operator[](int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  /// body(rank) on a thread of each rank; what the ranks allocated is released when all are done.
  void run(const std::function<void(RankUnderTest&)>& body) {
    {
      std::vector<std::jthread> threads;
      for (const auto& rank : ranks_) threads.emplace_back([&] { body(*rank); });
    }
    for (const auto& rank : ranks_) rank->release_tensors();
  }

 private:
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<RankUnderTest>> ranks_;
};

}  // namespace quern::ops::testing
