#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "backends/cuda/bandwidth_args.h"
#include "backends/cuda/stream.h"
#include "backends/platforms.h"
#include "base/hash.h"
#include "base/json.h"
#include "ops/kernel_table.h"
#include "ops/select.h"

// Linear layers of Qwen3.6-27B in block FP8 on one NVIDIA GPU: each alone and in sequence, decode and prompt rows, beside the read rate measured in the same run.
// Weights are random and of several layers, more than the L2 cache holds. Times are medians of events around recorded launches.
//
//   bench_cuda [results.json]

namespace quern {
namespace {

using ops::TensorView, ops::WeightScheme;

constexpr int64_t kHidden = 5120, kWidth = 17408, kQkv = 10240, kZ = 6144, kHeads = 48, kVocab = 248320;
constexpr int kLayers = 24, kRepeats = 7;

class Bench {
 public:
  explicit Bench(std::unique_ptr<ops::Device> device) : device_(std::move(device)), stream_(device_->make_stream().value()) {}

  ops::Device& device() { return *device_; }
  cuda::Stream& stream() { return cuda::cuda_stream(*stream_); }
  TensorView tensor(DType dtype, const Shape& shape) {
    buffers_.push_back(device_->allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), "bench").value());
    return {buffers_.back().get(), 0, dtype, shape};
  }
  /// Random bytes, without the NaN of e4m3 and with bf16 below 4.
  TensorView random(DType dtype, const Shape& shape) {
    const TensorView view = tensor(dtype, shape);
    std::vector<uint64_t> values((view.size_bytes() + 7) / 8);
    SplitMix64 bits(values.size());
    const uint64_t mask = dtype == DType::kBF16 ? 0xbfffbfffbfffbfffu : 0xbfbfbfbfbfbfbfbfu;
    for (uint64_t& value : values) value = bits.next() & mask;
    stream().copy_to_device(values.data(), view);
    CHECK(stream().finish().has_value());
    return view;
  }
  TensorView filled(const Shape& shape, float value) {
    const TensorView view = tensor(DType::kF32, shape);
    const std::vector<float> values(static_cast<size_t>(shape.num_elements()), value);
    stream().copy_to_device(values.data(), view);
    CHECK(stream().finish().has_value());
    return view;
  }
  ops::LinearSource weight(int64_t out, int64_t in, WeightScheme scheme) {
    ops::LinearSource source{{out, in, scheme}, random(stored_dtype(scheme), {out, in}), {}};
    if (ops::is_fp8(scheme)) source.scale = filled({(out + 127) / 128, (in + 127) / 128}, 1e-4f);
    return source;
  }
  /// Median seconds of what `enqueue` enqueues.
  template <class Enqueue>
  double seconds(const Enqueue& enqueue) {
    stream().begin_recording();
    enqueue();
    const auto graph = stream().end_recording().value();
    auto begin = cuda::Event::create(stream().context(), true).value(), end = cuda::Event::create(stream().context(), true).value();
    std::vector<double> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      stream().record(begin);
      stream().replay(*graph);
      stream().record(end);
      const double time = stream().seconds_between(begin, end).value();
      if (i >= 2) times.push_back(time);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  std::unique_ptr<ops::Device> device_;
  std::unique_ptr<ops::Stream> stream_;
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
};

/// One op: its kernel, packed weights of kLayers layers, and how to enqueue one of them.
template <class Op>
struct Layers {
  std::string candidate;
  std::unique_ptr<typename Op::Kernel> kernel;
  std::vector<std::unique_ptr<ops::Buffer>> packed;
  double stored_bytes = 0;  // of a layer
  double flops = 0;         // of a layer and row

  template <class Weights>
  Layers(Bench& bench, const typename Op::Problem& problem, const Weights& weights, int layers, std::initializer_list<ops::LinearShape> shapes) {
    const auto choice = ops::select(backends::kernel_table(ops::Platform::kCuda).list<Op>(), problem, bench.device().traits());
    CHECK(choice.chosen != nullptr);
    candidate = choice.chosen->name;
    kernel = choice.chosen->make(problem, bench.device()).value();
    for (int i = 0; i < layers; ++i) {
      packed.push_back(bench.device().allocate(kernel->packed_bytes(), "weights").value());
      kernel->pack(weights, *packed.back(), bench.stream());
    }
    CHECK(bench.stream().finish().has_value());
    for (const ops::LinearShape& shape : shapes) {
      stored_bytes += static_cast<double>(shape.packed_bytes());
      flops += 2.0 * static_cast<double>(shape.out_features) * static_cast<double>(shape.in_features);
    }
  }
};

int run(const char* file) {
  auto device = backends::open_device("cuda", {});
  if (!device) {
    fmt::print(stderr, "{}\n", device.error().message);
    return 1;
  }
  Bench bench(std::move(*device));
  Json results;
  results["device"] = bench.device().traits().name;

  double read_limit = 0;
  {
    auto& cuda_device = cuda::cuda_device(bench.device());
    const auto read = cuda_device.function<cuda::ReadArgs>("bandwidth", "read_once").value();
    const TensorView memory = bench.tensor(DType::kU8, {int64_t{4} << 30}), unlikely = bench.tensor(DType::kU8, {256});
    for (const unsigned blocks : {4u, 8u, 16u}) {
      const double seconds = bench.seconds([&] {
        bench.stream().launch(read, {.grid = {blocks * static_cast<unsigned>(cuda_device.num_sms())}, .block = {512}},
                              cuda::ReadArgs{memory.data<void>(), int64_t{4} << 30, unlikely.data<uint32_t>()});
      });
      read_limit = std::max(read_limit, static_cast<double>(int64_t{4} << 30) / seconds);
    }
  }
  results["read_limit_gb_s"] = read_limit / 1e9;
  fmt::print("{}: reads {:.0f} GB/s\n", bench.device().traits().name, read_limit / 1e9);

  const WeightScheme fp8 = WeightScheme::kFp8Block, bf16 = WeightScheme::kBF16;
  const auto qkv = bench.weight(kQkv, kHidden, fp8), z = bench.weight(kZ, kHidden, fp8), b = bench.weight(kHeads, kHidden, bf16), a = bench.weight(kHeads, kHidden, bf16);
  const auto gate = bench.weight(kWidth, kHidden, fp8), up = bench.weight(kWidth, kHidden, fp8), down = bench.weight(kHidden, kWidth, fp8);
  const auto out = bench.weight(kHidden, kZ, fp8), head = bench.weight(kVocab, kHidden, bf16);
  const TensorView norm = bench.filled({kHidden}, 0.1f);
  const Layers<ops::GdnIn> gdn_in(bench, {kHidden, qkv.shape, z.shape, b.shape, a.shape}, ops::GdnIn::Weights{norm, qkv, z, b, a}, kLayers,
                                  {qkv.shape, z.shape, b.shape, a.shape});
  const Layers<ops::OutResidual> out_residual(bench, {out.shape}, out, kLayers, {out.shape});
  const Layers<ops::MlpIn> mlp_in(bench, {kHidden, kWidth, gate.shape, up.shape}, ops::MlpIn::Weights{norm, gate, up}, kLayers, {gate.shape, up.shape});
  const Layers<ops::DownResidual> down_residual(bench, {down.shape}, down, kLayers, {down.shape});
  const Layers<ops::Head> lm_head(bench, {kHidden, kVocab, head.shape}, head, 1, {head.shape});
  results["candidates"] = {{"gdn_in", gdn_in.candidate}, {"out_residual", out_residual.candidate}, {"mlp_in", mlp_in.candidate},
                           {"down_residual", down_residual.candidate}, {"head", lm_head.candidate}};

  constexpr int64_t kMost = 8192, kMostLogits = 256;
  const TensorView x = bench.random(DType::kBF16, {kMost, kHidden}), mixed = bench.random(DType::kBF16, {kMost, kZ}), middle = bench.random(DType::kBF16, {kMost, kWidth});
  const ops::GdnInputs projected{bench.tensor(DType::kBF16, {kMost, kQkv}), bench.tensor(DType::kBF16, {kMost, kZ}), bench.tensor(DType::kBF16, {kMost, kHeads}),
                                 bench.tensor(DType::kBF16, {kMost, kHeads})};
  const TensorView hidden = bench.tensor(DType::kBF16, {kMost, kHidden}), logits = bench.tensor(DType::kF32, {kMostLogits, kVocab});
  const TensorView named = bench.tensor(DType::kI32, {kMostLogits});
  const size_t workspace_bytes = std::max({gdn_in.kernel->workspace_bytes(kMost), out_residual.kernel->workspace_bytes(kMost), mlp_in.kernel->workspace_bytes(kMost),
                                           down_residual.kernel->workspace_bytes(kMost), lm_head.kernel->workspace_bytes(kMost)});
  ops::Launch launch{bench.stream(), bench.tensor(DType::kU8, {static_cast<int64_t>(workspace_bytes)})};

  ops::RowRun run;
  ops::Rows rows;
  rows.runs = {&run, 1};
  const auto do_gdn_in = [&](size_t i) { gdn_in.kernel->enqueue(rows, x, *gdn_in.packed[i], projected, launch); };
  const auto do_out = [&](size_t i) { out_residual.kernel->enqueue(rows, {ops::ActivationLayout::kPlain, mixed, {}}, *out_residual.packed[i], x, launch); };
  const auto do_mlp_in = [&](size_t i) { mlp_in.kernel->enqueue(rows, x, *mlp_in.packed[i], {ops::ActivationLayout::kPlain, middle, {}}, launch); };
  const auto do_down = [&](size_t i) { down_residual.kernel->enqueue(rows, {ops::ActivationLayout::kPlain, middle, {}}, *down_residual.packed[i], x, launch); };
  const auto do_head = [&] {
    TensorView wanted = named;
    wanted.shape = {std::min<int64_t>(rows.num_rows, kMostLogits)};
    lm_head.kernel->enqueue(rows, x, norm, wanted, *lm_head.packed[0], hidden, logits, launch);
  };
  const auto add = [&](std::string_view what, double seconds, double bytes, double flops) {
    const bool prompt = run.kind == ops::RowKind::kPrompt;
    Json entry{{"what", what}, {"kind", prompt ? "P" : "D"}, {"rows", rows.num_rows}, {"us", seconds * 1e6}, {"gb_s", bytes / seconds / 1e9},
               {"share_of_read_limit", bytes / seconds / read_limit}, {"tflops", flops * rows.num_rows / seconds / 1e12}};
    fmt::print("{} {:5} rows  {:14} {:9.2f} us  {:6.0f} GB/s ({:.3f} of the read limit)  {:6.1f} TFLOPS\n", prompt ? "P" : "D", rows.num_rows, what, seconds * 1e6,
               bytes / seconds / 1e9, bytes / seconds / read_limit, flops * rows.num_rows / seconds / 1e12);
    results["results"].push_back(std::move(entry));
  };
  const auto each = [&](const auto& enqueue) {
    return bench.seconds([&] {
             for (size_t i = 0; i < kLayers; ++i) {
               enqueue(i);
               bench.stream().flush();
             }
           }) /
           kLayers;
  };
  const auto set_rows = [&](int32_t n, ops::RowKind kind) {
    run = {0, 0, n, kind, true};
    rows.num_rows = n;
  };
  const double layer_bytes = gdn_in.stored_bytes + out_residual.stored_bytes + mlp_in.stored_bytes + down_residual.stored_bytes;
  const double layer_flops = gdn_in.flops + out_residual.flops + mlp_in.flops + down_residual.flops;
  for (const int32_t n : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    set_rows(n, ops::RowKind::kDecode);
    add("gdn_in", each(do_gdn_in), gdn_in.stored_bytes, gdn_in.flops);
    add("out_residual", each(do_out), out_residual.stored_bytes, out_residual.flops);
    add("mlp_in", each(do_mlp_in), mlp_in.stored_bytes, mlp_in.flops);
    add("down_residual", each(do_down), down_residual.stored_bytes, down_residual.flops);
    add("head", bench.seconds(do_head), lm_head.stored_bytes, lm_head.flops);
    // out, mlp_in, down and the next layer's projection, as they follow each other in a step; a layer's mixer would come between.
    const double layer = bench.seconds([&] {
                           for (size_t i = 0; i < kLayers; ++i) {
                             do_out(i);
                             do_mlp_in(i);
                             do_down(i);
                             do_gdn_in(i);
                             bench.stream().flush();
                           }
                         }) /
                         kLayers;
    add("layer", layer, layer_bytes, layer_flops);
  }
  for (const int32_t n : {512, 2048, 8192}) {
    set_rows(n, ops::RowKind::kPrompt);
    add("gdn_in", each(do_gdn_in), gdn_in.stored_bytes, gdn_in.flops);
    add("out_residual", each(do_out), out_residual.stored_bytes, out_residual.flops);
    add("mlp_in", each(do_mlp_in), mlp_in.stored_bytes, mlp_in.flops);
    add("down_residual", each(do_down), down_residual.stored_bytes, down_residual.flops);
  }
  if (file != nullptr) std::ofstream(file) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::run(argc > 1 ? argv[1] : nullptr); }
