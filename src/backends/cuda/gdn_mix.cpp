#include "backends/cuda/gdn_mix.h"

#include <algorithm>

namespace quern::cuda {

namespace {

constexpr unsigned kThreads = 256;         // of gdn_mix.cu
constexpr int64_t kSharedBytes = 96 << 10;  // what every supported GPU gives a block

/// Shared memory that gdn_rows lays out: chunk_in of gdn_mix.cu.
int64_t shared_bytes(const ops::GdnMix::Problem& p) {
  const int64_t rows = ops::kGrid + p.k_max + 1;
  return (rows * (p.d_k + p.d_v + 3) + ops::kGrid + p.d_k + 2 * p.d_v + kThreads / 32) * static_cast<int64_t>(sizeof(float));
}

}  // namespace

Result<GdnLauncher> GdnLauncher::create(const ops::GdnMix::Problem& problem, Device& device, ops::GdnStateLayout layout) {
  CHECK(std::ssize(problem.k_head) == problem.num_v_heads);
  for (const int32_t head : problem.k_head) CHECK(head >= 0 && head < problem.num_k_heads);
  CHECK(std::ranges::is_sorted(problem.k_head));
  ASSIGN_OR_RETURN(const LinearLauncher linear, LinearLauncher::create(device));
  GdnLauncher launcher(problem, linear, layout);
  ASSIGN_OR_RETURN(launcher.rows_, device.function<GdnArgs>("gdn_mix", "gdn_rows", static_cast<int>(shared_bytes(problem))));
  ASSIGN_OR_RETURN(launcher.keys_, device.function<GdnArgs>("gdn_mix", "gdn_keys"));
  ASSIGN_OR_RETURN(launcher.window_, device.function<GdnArgs>("gdn_mix", "gdn_window"));
  ASSIGN_OR_RETURN(launcher.prepare_, device.function<GdnPrepareArgs>("gdn_mix", "gdn_prepare"));
  std::vector<int32_t> heads = problem.k_head;
  for (int64_t k_head = 0; k_head <= problem.num_k_heads; ++k_head) heads.push_back(static_cast<int32_t>(std::ranges::lower_bound(problem.k_head, k_head) - problem.k_head.begin()));
  ASSIGN_OR_RETURN(launcher.heads_, device.upload(heads, "the GDN head map"));
  return launcher;
}

GdnLauncher::Packed GdnLauncher::packed_in(const ops::Buffer& packed) const {
  auto* conv = reinterpret_cast<float*>(packed.address());
  float* decay = conv + 4 * channels_;
  float* dt_bias = decay + problem_.num_v_heads;
  return {conv, decay, dt_bias, dt_bias + problem_.num_v_heads};
}

void GdnLauncher::pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, Stream& stream) const {
  const Packed p = packed_in(packed);
  // Releases differ in the dtype of these; the model's is what they are meant in (model-spec.md 2.1).
  linear_.widen(stream, weights.a_log, p.decay, 0.0f, problem_.activation);
  linear_.widen(stream, weights.dt_bias, p.dt_bias, 0.0f, problem_.activation);
  linear_.widen(stream, weights.norm, p.norm, 0.0f, problem_.activation);
  const GdnPrepareArgs args{channels_, static_cast<int32_t>(problem_.num_v_heads), plain::address_or_null<const void>(weights.conv1d), weights.conv1d.dtype, p.conv,
                            p.decay};
  stream.launch(prepare_, {.grid = {plain::blocks_for(std::max<int64_t>(channels_, problem_.num_v_heads), kThreads)}, .block = {kThreads}}, args);
}

GdnArgs GdnLauncher::arguments(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state,
                               const ops::Activation& out) const {
  const Packed p = packed_in(packed);
  GdnArgs args{};
  args.step = plain::step_tables(rows);
  args.kinds = kGdnPrompt | kGdnDecode;
  args.first_run = 0;
  args.end_run = args.step.num_runs;
  args.num_k_heads = static_cast<int32_t>(problem_.num_k_heads);
  args.num_v_heads = static_cast<int32_t>(problem_.num_v_heads);
  args.d_k = static_cast<int32_t>(problem_.d_k);
  args.d_v = static_cast<int32_t>(problem_.d_v);
  args.k_max = static_cast<int32_t>(problem_.k_max);
  args.eps = problem_.eps;
  args.activation = problem_.activation;
  args.ring = problem_.ring;
  args.conv = p.conv;
  args.decay = p.decay;
  args.dt_bias = p.dt_bias;
  args.norm = p.norm;
  args.k_head = reinterpret_cast<const int32_t*>(heads_->address());
  args.first_head = args.k_head + problem_.num_v_heads;
  args.qkv = in.qkv.data<void>();
  args.z = in.z.data<void>();
  args.b = in.b.data<void>();
  args.a = in.a.data<void>();
  args.out = out.data.data<void>();
  args.state = state.state.data<float>();
  args.is_state_halved = layout_ == ops::GdnStateLayout::kHalves;
  args.ring_k = state.ring_k.data<void>();
  args.ring_u = state.ring_u.data<void>();
  args.ring_g = state.ring_g.data<float>();
  args.conv_window = state.conv_window.data<void>();
  args.boundary_columns = state.boundary_columns.data<void>();
  return args;
}

void GdnLauncher::launch_rows(Stream& stream, const GdnArgs& args) const {
  const auto runs = static_cast<unsigned>(args.end_run - args.first_run), ring_length = static_cast<unsigned>(ops::kGrid + problem_.k_max + 1);
  stream.launch(rows_,
                {.grid = {runs, static_cast<unsigned>(problem_.num_v_heads)},
                 .block = {kThreads},
                 .shared_bytes = static_cast<unsigned>(shared_bytes(problem_))},
                args);
  stream.launch(keys_, {.grid = {runs, static_cast<unsigned>(problem_.num_k_heads), ring_length}, .block = {kThreads}}, args);
}

void GdnLauncher::launch(Stream& stream, const GdnArgs& args) const {
  launch_rows(stream, args);
  keep_window(stream, args);
}

void GdnLauncher::launch_to_grid(Stream& stream, GdnArgs args) const {
  args.phases = kGdnToGrid;
  launch_rows(stream, args);
}

void GdnLauncher::keep_window(Stream& stream, const GdnArgs& args) const {
  stream.launch(window_, {.grid = {static_cast<unsigned>(args.end_run - args.first_run), plain::blocks_for(channels_, kThreads)}, .block = {kThreads}}, args);
}

namespace plain {

namespace {

class GdnMixKernel final : public ops::GdnMix::Kernel {
 public:
  GdnMixKernel(DType activation, GdnLauncher launcher) : activation_(activation), launcher_(std::move(launcher)) {}
  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(activation_); }
  [[nodiscard]] size_t packed_bytes() const override { return launcher_.packed_bytes(); }
  void pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, ops::Stream& stream) const override {
    launcher_.pack(weights, packed, cuda_stream(stream));
  }
  void enqueue(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state,
               const ops::Activation& out, ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    launcher_.launch(cuda_stream(launch.stream), launcher_.arguments(rows, in, packed, state, out));
  }

 private:
  DType activation_;
  GdnLauncher launcher_;
};

}  // namespace

ops::Verdict accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.ring != DType::kF32 && problem.ring != DType::kBF16)
    return ops::refuse("ring dtype {} is not supported; f32 and bf16 are", dtype_name(problem.ring));
  if (problem.k_max < 0 || problem.k_max >= ops::kGrid)
    return ops::refuse("{} drafts in a verify; 0 to {} are supported", problem.k_max, ops::kGrid - 1);
  if (problem.d_k > kMaxGdnDim || problem.d_v > kMaxGdnDim) return ops::refuse("heads of {} x {}; up to {} are supported", problem.d_k, problem.d_v, kMaxGdnDim);
  if (shared_bytes(problem) > kSharedBytes)
    return ops::refuse("a chunk of {} rows takes {} bytes of shared memory, {} are there", ops::kGrid + problem.k_max + 1, shared_bytes(problem), kSharedBytes);
  return accepts_activation(traits, problem.activation, problem.out);
}

Result<std::unique_ptr<ops::GdnMix::Kernel>> make(const ops::GdnMix::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(GdnLauncher launcher, GdnLauncher::create(problem, cuda_device(device), ops::GdnStateLayout::kF32));
  return std::unique_ptr<ops::GdnMix::Kernel>(std::make_unique<GdnMixKernel>(problem.activation, std::move(launcher)));
}

}  // namespace plain

}  // namespace quern::cuda
