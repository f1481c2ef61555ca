#include <algorithm>
#include <optional>

#include "backends/opencl/dpas.h"
#include "backends/opencl/gdn_prompt.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/programs.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

using namespace plain;

namespace {

constexpr int64_t kMaxDim = 256;           // of gdn_mix.cl
constexpr int64_t kSimd16Dim = 128;        // of gdn_simd16.cl
constexpr size_t kSimd16Items = 128;

/// Packed, all f32: conv taps [4, channels], -exp(A_log), dt_bias, norm.
class GdnMixKernel final : public ops::GdnMix::Kernel {
 public:
  struct Kernels {
    Function keys, rows, keep, window, prepare;
    Function short_rows;  // opencl.simd16: rows of short decode runs, with their keys; and `keep` does what `window` does
    [[nodiscard]] bool simd16() const { return short_rows.handle != nullptr; }
  };
  GdnMixKernel(const ops::GdnMix::Problem& problem, const VectorLauncher& vectors, const Kernels& kernels, std::optional<GdnPromptLauncher> prompt, std::unique_ptr<ops::Buffer> k_head)
      : problem_(problem),
        vectors_(vectors),
        kernels_(kernels),
        prompt_(prompt),
        k_head_(std::move(k_head)),
        channels_(2 * problem.num_k_heads * problem.d_k + problem.num_v_heads * problem.d_v) {}

  [[nodiscard]] std::string_view arithmetic() const override { return prompt_ ? "opencl.dpas.bf16" : kernels_.simd16() ? simd16::arithmetic_id(problem_.activation) : plain::arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return static_cast<size_t>(norm_at() + problem_.d_v) * sizeof(float); }
  /// Chunks of prompts, then q and k of the other rows in the same place.
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override { return std::max(keys_bytes(max_rows), prompt_ ? prompt_->workspace_bytes(max_rows) : 0); }
  void pack(const ops::GdnMix::Weights& weights, ops::Buffer& packed, ops::Stream& ops_stream) const override {
    Stream& stream = opencl_stream(ops_stream);
    // Releases differ in the dtype of these; the model's is what they are meant in (model-spec.md 2.1).
    vectors_.widen(stream, weights.a_log, vector_in(packed, decay_at()), 0.0f, problem_.activation);
    vectors_.widen(stream, weights.dt_bias, vector_in(packed, dt_bias_at()), 0.0f, problem_.activation);
    vectors_.widen(stream, weights.norm, vector_in(packed, norm_at()), 0.0f, problem_.activation);
    stream.launch(kernels_.prepare, {{groups_for(std::max(channels_, problem_.num_v_heads), kItems), 1, 1}, {kItems, 1, 1}}, channels_,
                  static_cast<int32_t>(problem_.num_v_heads), weights.conv1d, number_of(weights.conv1d.dtype), vector_in(packed, 0), vector_in(packed, decay_at()));
  }

  void enqueue(const ops::Rows& rows, const ops::GdnInputs& in, const ops::Buffer& packed, const ops::GdnStateView& state, const ops::Activation& out,
               ops::Launch& launch) const override {
    if (rows.num_rows == 0 || out.data.empty()) return;
    Stream& stream = opencl_stream(launch.stream);
    const ops::SlotTables& slots = rows.slots;
    const Place taps = vector_in(packed, 0);
    const auto is_chunked = [&](const ops::RowRun& run) { return prompt_ && GdnPromptLauncher::takes(run); };
    if (std::any_of(rows.runs.begin(), rows.runs.end(), is_chunked))
      prompt_->launch(stream, rows, in, {taps, vector_in(packed, decay_at()), vector_in(packed, dt_bias_at()), vector_in(packed, norm_at()), place_in(*k_head_, 0)}, state, out.data,
                      launch.workspace);
    const Place keys = Scratch(launch.workspace).take(keys_bytes(rows.num_rows));
    const int32_t prompts_apart = prompt_ ? 1 : 0;
    const auto num_k_heads = static_cast<int32_t>(problem_.num_k_heads), num_v_heads = static_cast<int32_t>(problem_.num_v_heads),
               d_k = static_cast<int32_t>(problem_.d_k), d_v = static_cast<int32_t>(problem_.d_v), k_max = static_cast<int32_t>(problem_.k_max);
    const size_t num_rows = static_cast<size_t>(rows.num_rows), num_runs = rows.runs.size(), k_heads = static_cast<size_t>(num_k_heads);
    const auto enqueue_rows = [&](const Function& kernel, size_t items, bool keeps) {
      stream.launch(kernel, {{num_runs, static_cast<size_t>(num_v_heads), 1}, {items, 1, 1}}, prompts_apart, keeps ? 1 : 0, num_k_heads, num_v_heads, d_k, d_v, k_max, problem_.eps, channels_, rows.run_table,
                    slots.cursor, slots.boundary, taps, vector_in(packed, decay_at()), vector_in(packed, dt_bias_at()), vector_in(packed, norm_at()), place_in(*k_head_, 0), in.qkv,
                    in.z, in.b, in.a, state.conv_window, state.boundary_columns, keys, out.data, state.state, state.ring_k, state.ring_u, state.ring_g);
    };
    if (kernels_.simd16()) {
      for (const ops::TensorView* view : {&state.state, &state.ring_u}) CHECK_MSG(place_of(*view).offset_bytes % 64 == 0, "block loads begin at multiples of 64 bytes");
      // The ring's k is written when all heads have read it: a run may overwrite rows that a due fold needs. A run of one row does not: the ring holds k_max rows more than that.
      const bool are_chunked = std::all_of(rows.runs.begin(), rows.runs.end(), is_chunked);
      const bool are_short = std::all_of(rows.runs.begin(), rows.runs.end(), [&](const ops::RowRun& run) {
        return is_chunked(run) || (run.kind == ops::RowKind::kDecode && run.num_rows <= kGdnShortRun);
      });
      if (!are_short)
        stream.launch(kernels_.keys, {{num_rows, 2 * k_heads, 1}, {16, 1, 1}}, prompts_apart, num_k_heads, k_max, channels_, rows.run_table, rows.row_runs, slots.cursor, taps, in.qkv,
                      state.conv_window, keys);
      const bool are_single = are_short && std::none_of(rows.runs.begin(), rows.runs.end(), [&](const ops::RowRun& run) { return is_chunked(run) || run.num_rows > 1; });
      if (!are_chunked) enqueue_rows(are_short ? kernels_.short_rows : kernels_.rows, kSimd16Items, are_single);
      if (are_single) return;
      stream.launch(kernels_.keep, {{groups_for(channels_, kItems), num_runs, 1}, {kItems, 1, 1}}, prompts_apart, num_k_heads, k_max, channels_, rows.run_table, slots.cursor, slots.boundary,
                    in.qkv, keys, state.ring_k, state.conv_window, state.boundary_columns);
      return;
    }
    stream.launch(kernels_.keys, {{num_rows, k_heads, 1}, {kItems, 1, 1}}, num_k_heads, d_k, k_max, channels_, rows.run_table, rows.row_runs, slots.cursor, taps, in.qkv,
                  state.conv_window, keys);
    enqueue_rows(kernels_.rows, kItems, false);
    int64_t longest = 0;
    for (const ops::RowRun& run : rows.runs) longest = std::max<int64_t>(longest, run.num_rows);
    const auto kept = static_cast<size_t>(std::min(longest, ops::kGrid + problem_.k_max + 1));
    stream.launch(kernels_.keep, {{num_runs, k_heads, kept}, {kItems, 1, 1}}, num_k_heads, d_k, k_max, rows.run_table, slots.cursor, keys, state.ring_k);
    stream.launch(kernels_.window, {{groups_for(channels_, kItems), num_runs, 1}, {kItems, 1, 1}}, k_max, channels_, rows.run_table, slots.cursor, slots.boundary, in.qkv,
                  state.conv_window, state.boundary_columns);
  }

 private:
  /// q and k of every row, f32.
  [[nodiscard]] size_t keys_bytes(int64_t max_rows) const { return Scratch::size(static_cast<size_t>(max_rows * problem_.num_k_heads * 2 * problem_.d_k) * sizeof(float)); }
  // Elements before each vector of the packed weights.
  [[nodiscard]] int64_t decay_at() const { return 4 * channels_; }
  [[nodiscard]] int64_t dt_bias_at() const { return decay_at() + problem_.num_v_heads; }
  [[nodiscard]] int64_t norm_at() const { return dt_bias_at() + problem_.num_v_heads; }
  [[nodiscard]] static Place vector_in(const ops::Buffer& packed, int64_t at) { return place_in(packed, static_cast<size_t>(at) * sizeof(float)); }

  ops::GdnMix::Problem problem_;
  VectorLauncher vectors_;
  Kernels kernels_;
  std::optional<GdnPromptLauncher> prompt_;  // of opencl.dpas
  std::unique_ptr<ops::Buffer> k_head_;      // i32 [2, num_v_heads]: the key head, and whether the value head is the first of it
  int64_t channels_;
};

enum class Candidate { kPlain, kSimd16, kDpas };

/// What the candidates differ in are the kernels that compute the rows.
Result<std::unique_ptr<ops::GdnMix::Kernel>> make_with(const ops::GdnMix::Problem& problem, Device& d, Candidate candidate) {
  CHECK(std::ssize(problem.k_head) == problem.num_v_heads);
  for (const int32_t head : problem.k_head) CHECK(head >= 0 && head < problem.num_k_heads);
  const std::string definitions = fmt::format("{} {}", activation_definition(problem.activation), problem.ring == DType::kBF16 ? "-DRING_BF16" : "-DRING_F32");
  ASSIGN_OR_RETURN(const VectorLauncher vectors, VectorLauncher::create(d, problem.activation));
  GdnMixKernel::Kernels kernels;
  ASSIGN_OR_RETURN(kernels.prepare, d.function("gdn_mix", "gdn_prepare", definitions));
  std::optional<GdnPromptLauncher> prompt;
  if (candidate != Candidate::kPlain) {
    // PoCL optimises the exchanges between lanes for a minute; it takes seconds without, and what tests run is not slower for it.
    const std::string_view unoptimised = d.emulates_xe2() ? " -cl-opt-disable" : "";
    const std::string of_device = fmt::format("{}{}", simd16::definitions(d, definitions), unoptimised);
    if (candidate == Candidate::kDpas) {
      ASSIGN_OR_RETURN(prompt, GdnPromptLauncher::create(problem, d, of_device));
    }
    ASSIGN_OR_RETURN(kernels.keys, d.function("gdn_simd16", "gdn_keys", of_device));
    ASSIGN_OR_RETURN(kernels.rows, d.function("gdn_simd16", "gdn_rows", of_device));
    ASSIGN_OR_RETURN(kernels.keep, d.function("gdn_simd16", "gdn_keep", of_device));
    ASSIGN_OR_RETURN(kernels.short_rows, d.function("gdn_simd16", "gdn_rows", fmt::format("{}{}", simd16::definitions(d, definitions + " -DSHORT_RUNS"), unoptimised)));
  } else {
    ASSIGN_OR_RETURN(kernels.keys, d.function("gdn_mix", "gdn_keys", definitions));
    ASSIGN_OR_RETURN(kernels.rows, d.function("gdn_mix", "gdn_rows", definitions));
    ASSIGN_OR_RETURN(kernels.keep, d.function("gdn_mix", "gdn_keep", definitions));
    ASSIGN_OR_RETURN(kernels.window, d.function("gdn_mix", "gdn_window", definitions));
  }
  std::vector<int32_t> heads = problem.k_head;
  for (auto head = problem.k_head.begin(); head != problem.k_head.end(); ++head) heads.push_back(std::find(problem.k_head.begin(), head, *head) == head ? 1 : 0);
  ASSIGN_OR_RETURN(auto k_head, d.upload(heads, "the GDN head map"));
  return std::unique_ptr<ops::GdnMix::Kernel>(std::make_unique<GdnMixKernel>(problem, vectors, kernels, prompt, std::move(k_head)));
}

}  // namespace

ops::Verdict plain::accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.ring != DType::kF32 && problem.ring != DType::kBF16)
    return ops::refuse("ring dtype {} is not supported; f32 and bf16 are", dtype_name(problem.ring));
  if (problem.k_max < 0 || problem.k_max >= ops::kGrid) return ops::refuse("{} drafts in a verify; 0 to {} are supported", problem.k_max, ops::kGrid - 1);
  if (problem.d_k > kMaxDim || problem.d_v > kMaxDim) return ops::refuse("heads of {} x {}; up to {} are supported", problem.d_k, problem.d_v, kMaxDim);
  return accepts_activation(traits, problem.activation, problem.out);
}
Result<std::unique_ptr<ops::GdnMix::Kernel>> plain::make(const ops::GdnMix::Problem& problem, ops::Device& device) { return make_with(problem, opencl_device(device), Candidate::kPlain); }

ops::Verdict simd16::accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  if (problem.d_k != kSimd16Dim || problem.d_v != kSimd16Dim) return ops::refuse("heads of {} x {}; {} x {} are supported", problem.d_k, problem.d_v, kSimd16Dim, kSimd16Dim);
  return plain::accepts(problem, traits);
}
Result<std::unique_ptr<ops::GdnMix::Kernel>> simd16::make(const ops::GdnMix::Problem& problem, ops::Device& device) { return make_with(problem, opencl_device(device), Candidate::kSimd16); }

ops::Verdict dpas::accepts(const ops::GdnMix::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.activation != DType::kBF16) return ops::refuse("activation dtype {} is not supported; bf16 is", dtype_name(problem.activation));
  return simd16::accepts(problem, traits);
}
Result<std::unique_ptr<ops::GdnMix::Kernel>> dpas::make(const ops::GdnMix::Problem& problem, ops::Device& device) { return make_with(problem, opencl_device(device), Candidate::kDpas); }

}  // namespace quern::opencl
