#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "backends/cuda/bandwidth_args.h"
#include "backends/platforms.h"
#include "bench.h"
#include "ops/kernel_table.h"

// Linear layers of Qwen3.6-27B in block FP8 on one NVIDIA GPU: each alone and in sequence, decode and prompt rows, beside the read rate measured in the same run.
// Then attention, gdn_mix and the sampler. Weights are random and of several layers, more than the L2 cache holds. Times are medians of events around recorded launches.
//
//   bench_cuda [--only linears,mixers,gdn_mix,attention,sample] [--rows N,N,...] [--gdn-ring-dtype bfloat16|float32] [--kernel OP=CANDIDATE]... [--device NAME] [results.json]

namespace quern {
namespace {

using ops::TensorView, ops::WeightScheme;

constexpr int64_t kHidden = 5120, kWidth = 17408, kQkv = 10240, kZ = 6144, kHeads = 48, kVocab = 248320;
constexpr int kLayers = 24;

/// One op: its kernel, packed weights of kLayers layers, and how to enqueue one of them.
template <class Op>
struct Layers {
  std::string candidate;
  std::unique_ptr<typename Op::Kernel> kernel;
  std::vector<std::unique_ptr<ops::Buffer>> packed;
  double stored_bytes = 0;  // of a layer
  double flops = 0;         // of a layer and row

  template <class Weights>
  Layers(Bench& bench, const ops::SelectionRules& rules, const typename Op::Problem& problem, const Weights& weights, int layers,
         std::initializer_list<ops::LinearShape> shapes) {
    const auto choice = ops::select(backends::kernel_table(ops::Platform::kCuda).list<Op>(), problem, bench.device().traits(), rules);
    CHECK_MSG(choice.chosen != nullptr, fmt::format("no kernel takes {}", Op::kName));
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

void bench_linears(Bench& bench, const Selection& selection, double read_limit, const ops::SelectionRules& rules, Json& results) {
  const WeightScheme fp8 = WeightScheme::kFp8Block, bf16 = WeightScheme::kBF16;
  const auto qkv = bench.weight(kQkv, kHidden, fp8), z = bench.weight(kZ, kHidden, fp8), b = bench.weight(kHeads, kHidden, bf16), a = bench.weight(kHeads, kHidden, bf16);
  const auto gate = bench.weight(kWidth, kHidden, fp8), up = bench.weight(kWidth, kHidden, fp8), down = bench.weight(kHidden, kWidth, fp8);
  const auto out = bench.weight(kHidden, kZ, fp8), head = bench.weight(kVocab, kHidden, bf16);
  const TensorView norm = bench.filled({kHidden}, 0.1f);
  const Layers<ops::GdnIn> gdn_in(bench, rules, {kHidden, qkv.shape, z.shape, b.shape, a.shape}, ops::GdnIn::Weights{norm, qkv, z, b, a}, kLayers,
                                  {qkv.shape, z.shape, b.shape, a.shape});
  const Layers<ops::OutResidual> out_residual(bench, rules, {out.shape}, out, kLayers, {out.shape});
  const Layers<ops::MlpIn> mlp_in(bench, rules, {kHidden, kWidth, gate.shape, up.shape}, ops::MlpIn::Weights{norm, gate, up}, kLayers, {gate.shape, up.shape});
  const Layers<ops::DownResidual> down_residual(bench, rules, {down.shape}, down, kLayers, {down.shape});
  const Layers<ops::Head> lm_head(bench, rules, {kHidden, kVocab, head.shape}, head, 1, {head.shape});
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
  const std::vector<int> all = selection.rows.empty() ? std::vector<int>{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192} : selection.rows;
  for (const int n : all) {
    if (n > kMostLogits) continue;
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
                           }
                         }) /
                         kLayers;
    add("layer", layer, layer_bytes, layer_flops);
  }
  for (const int n : all) {
    if (n <= kMostLogits || n > kMost) continue;
    set_rows(n, ops::RowKind::kPrompt);
    add("gdn_in", each(do_gdn_in), gdn_in.stored_bytes, gdn_in.flops);
    add("out_residual", each(do_out), out_residual.stored_bytes, out_residual.flops);
    add("mlp_in", each(do_mlp_in), mlp_in.stored_bytes, mlp_in.flops);
    add("down_residual", each(do_down), down_residual.stored_bytes, down_residual.flops);
  }
}

int run(const char* file, std::string_view device_name, const Selection& selection, const ops::SelectionRules& rules) {
  auto device = backends::open_device(device_name, {});
  if (device && (*device)->traits().platform != ops::Platform::kCuda) device = invalid_argument("{} is no NVIDIA GPU", device_name);
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

  if (selection.has("linears")) bench_linears(bench, selection, read_limit, rules, results);
  bench_mixers(bench, selection, read_limit, rules, results);
  if (file != nullptr) std::ofstream(file) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
  const char* file = nullptr;
  std::string_view device = "cuda";
  quern::Selection selection;
  quern::ops::SelectionRules rules;
  const auto words = [](std::string_view list) {
    std::vector<std::string> found;
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      found.emplace_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
    return found;
  };
  bool understood = true;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with("-")) {
      understood = understood && file == nullptr;
      file = argv[i];
      continue;
    }
    const std::string_view value = i + 1 < argc ? argv[++i] : "";
    const size_t equals = value.find('=');
    if (argument == "--only") {
      for (const std::string& op : words(value)) {
        if (op == "mixers") selection.ops.insert(selection.ops.end(), {"gdn_mix", "attention", "sample"});
        else selection.ops.push_back(op);
      }
      for (const std::string& op : selection.ops) understood = understood && (op == "linears" || op == "gdn_mix" || op == "attention" || op == "sample");
    } else if (argument == "--rows") {
      for (const std::string& word : words(value)) {
        selection.rows.push_back(std::atoi(word.c_str()));
        understood = understood && selection.rows.back() > 0;
      }
    } else if (argument == "--gdn-ring-dtype") {
      understood = understood && (value == "bfloat16" || value == "float32");
      selection.ring = value == "float32" ? quern::DType::kF32 : quern::DType::kBF16;
    } else if (argument == "--device" && !value.empty()) {
      device = value;
    } else if (argument == "--kernel" && equals != std::string_view::npos) {
      rules.forced.emplace(value.substr(0, equals), value.substr(equals + 1));
    } else {
      understood = false;
    }
  }
  if (!understood) {
    fmt::print(stderr, "usage: bench_cuda [--only linears,mixers,gdn_mix,attention,sample] [--rows N,N,...] [--gdn-ring-dtype bfloat16|float32] [--kernel OP=CANDIDATE]... [--device NAME] [results.json]\n");
    return 2;
  }
  return quern::run(file, device, selection, rules);
}
