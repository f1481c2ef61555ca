#include <algorithm>

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/programs.h"
#include "backends/opencl/simd16.h"
#include "ops/kv_dtype.h"

namespace quern::opencl {

using namespace plain;

namespace {

constexpr int64_t kMaxHeadDim = 512;  // of attention.cl
// Of attention_simd16.cl.
constexpr int64_t kSimd16HeadDim = 256, kSimd16MaxHeads = 8, kSimd16Part = kSimd16HeadDim + 2;
constexpr size_t kSimd16Items = 256;
constexpr size_t kDecodeItems = 16 * kAttentionSplits;  // of a group of attention_decode
constexpr int64_t kDecodeRows = 32;    // of a launch, so that the workspace stays small
constexpr int64_t kPromptRows = 8;     // of a group of attention_dpas.cl

class AttentionKernel final : public ops::Attention::Kernel {
 public:
  AttentionKernel(const ops::Attention::Problem& problem, Function attention, std::unique_ptr<ops::Buffer> kv_head)
      : problem_(problem), attention_(attention), kv_head_(std::move(kv_head)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return plain::arithmetic_id(problem_.activation); }

  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out,
               ops::Launch& launch) const override {
    opencl_stream(launch.stream)
        .launch(attention_, {{static_cast<size_t>(rows.num_rows), static_cast<size_t>(problem_.num_q_heads), 1}, {kItems, 1, 1}}, static_cast<int32_t>(problem_.num_q_heads),
                static_cast<int32_t>(problem_.num_kv_heads), static_cast<int32_t>(problem_.head_dim), first_index, query, gate, out.data, place_in(*kv_head_, 0), rows.run_table,
                rows.row_runs, rows.indices, rows.slots.block_tables, row_stride(rows.slots.block_tables), kv.k, kv.v, kv.k_scale, kv.v_scale);
  }

 private:
  ops::Attention::Problem problem_;
  Function attention_;
  std::unique_ptr<ops::Buffer> kv_head_;  // i32 [num_q_heads]
};

/// opencl.simd16, and opencl.dpas, which computes rows on the matrix units.
class Simd16Attention final : public ops::Attention::Kernel {
 public:
  /// Of opencl.dpas: the kernels for rows of prompts and of decode runs, and the kv head of each query head, i32 [num_q_heads].
  struct MatrixUnits {
    Function attention, decode;
    std::unique_ptr<ops::Buffer> kv_head;
  };
  /// `shares`: attention_shares of attention_simd16.cl, or attention_decode of attention_dpas.cl with its own items, which stand for the same.
  Simd16Attention(const ops::Attention::Problem& problem, Function shares, size_t items, std::unique_ptr<ops::Buffer> first_heads, std::unique_ptr<ops::Buffer> arrivals, MatrixUnits matrix_units)
      : problem_(problem), shares_(shares), items_(items), first_heads_(std::move(first_heads)), arrivals_(std::move(arrivals)), matrix_units_(std::move(matrix_units)) {}

  [[nodiscard]] std::string_view arithmetic() const override { return matrix_units_.kv_head != nullptr ? "opencl.dpas.bf16" : simd16::arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t workspace_bytes(int64_t max_rows) const override {
    const int64_t heads = matrix_units_.kv_head != nullptr ? problem_.num_kv_heads * kSimd16MaxHeads : problem_.num_q_heads;  // an operand has 8 rows, whatever the number of heads
    return Scratch::size(static_cast<size_t>(std::min(max_rows, kDecodeRows) * heads * kAttentionShares * kSimd16Part) * sizeof(float));
  }

  /// Rows of a prompt are many: a group computes one whole. Decode rows are few: groups share its keys.
  void enqueue(const ops::Rows& rows, const ops::TensorView& query, const ops::TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out,
               ops::Launch& launch) const override {
    Stream& stream = opencl_stream(launch.stream);
    for (const ops::TensorView* view : {&query, &gate, &kv.k, &kv.v, &out.data}) CHECK_MSG(place_of(*view).offset_bytes % 64 == 0, "block loads and stores begin at multiples of 64 bytes");
    const auto num_q_heads = static_cast<int32_t>(problem_.num_q_heads);
    for (const RowSegment& segment : segments_of(rows, 0, rows.num_rows)) {
      const bool decode = segment.kind == ops::RowKind::kDecode;
      if (!decode && matrix_units_.kv_head != nullptr) continue;
      const int64_t step = decode ? kDecodeRows : segment.count;
      for (int64_t first = segment.first; first < segment.first + segment.count; first += step) {
        const auto count = static_cast<size_t>(std::min(step, segment.first + segment.count - first)), num_shares = static_cast<size_t>(decode ? kAttentionShares : 1);
        const Place shares = decode ? place_of(launch.workspace) : Place{};
        stream.launch(shares_, {{count, static_cast<size_t>(problem_.num_kv_heads), num_shares}, {items_, 1, 1}}, static_cast<int32_t>(first), num_q_heads,
                      static_cast<int32_t>(problem_.num_kv_heads), first_index, query, gate, out.data, place_in(*first_heads_, 0), rows.run_table, rows.row_runs, rows.indices,
                      rows.slots.block_tables, row_stride(rows.slots.block_tables), kv.k, kv.v, kv.k_scale, kv.v_scale, shares, place_in(*arrivals_, 0));
      }
    }
    if (matrix_units_.kv_head == nullptr) return;
    for (const ops::RowRun& run : rows.runs)
      if (run.kind == ops::RowKind::kPrompt)
        stream.launch(matrix_units_.attention, {{static_cast<size_t>(num_q_heads), groups_for(run.num_rows, kPromptRows), 1}, {16, 1, 1}}, run.first_row, run.num_rows, num_q_heads,
                      static_cast<int32_t>(problem_.num_kv_heads), first_index, query, gate, out.data, place_in(*matrix_units_.kv_head, 0), rows.run_table, rows.row_runs, rows.indices,
                      rows.slots.block_tables, row_stride(rows.slots.block_tables), kv.k, kv.v, kv.k_scale, kv.v_scale);
  }

 private:
  ops::Attention::Problem problem_;
  Function shares_;
  size_t items_;
  std::unique_ptr<ops::Buffer> first_heads_;  // i32 [num_kv_heads + 1]
  std::unique_ptr<ops::Buffer> arrivals_;     // i32 [kDecodeRows, num_kv_heads], zeros between launches
  MatrixUnits matrix_units_;                  // of opencl.dpas
};

/// The first query head of each kv head, and the number of all; empty where those of a kv head do not follow each other.
std::vector<int32_t> first_heads_of(const ops::Attention::Problem& problem) {
  std::vector<int32_t> first(static_cast<size_t>(problem.num_kv_heads) + 1, static_cast<int32_t>(problem.num_q_heads));
  if (!std::is_sorted(problem.kv_head.begin(), problem.kv_head.end())) return {};
  for (size_t kv = 0; kv < first.size() - 1; ++kv)
    first[kv] = static_cast<int32_t>(std::lower_bound(problem.kv_head.begin(), problem.kv_head.end(), static_cast<int32_t>(kv)) - problem.kv_head.begin());
  return first;
}

Result<std::unique_ptr<ops::Attention::Kernel>> make_on_sub_groups(const ops::Attention::Problem& problem, Device& d, Simd16Attention::MatrixUnits matrix_units) {
  const bool on_matrix_units = matrix_units.kv_head != nullptr;
  Function shares = matrix_units.decode;
  if (!on_matrix_units) {
    ASSIGN_OR_RETURN(shares, d.function("attention_simd16", "attention_shares", simd16::definitions(d, kv_definitions(problem.activation, problem.kv))));
  }
  ASSIGN_OR_RETURN(auto first_heads, d.upload(first_heads_of(problem), "the attention's head map"));
  ASSIGN_OR_RETURN(auto arrivals, d.upload(std::vector<int32_t>(static_cast<size_t>(kDecodeRows * problem.num_kv_heads)), "the attention's counters"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<Simd16Attention>(problem, shares, on_matrix_units ? kDecodeItems : kSimd16Items, std::move(first_heads), std::move(arrivals), std::move(matrix_units)));
}

}  // namespace

ops::Verdict plain::accepts_kv(const ops::DeviceTraits& traits, DType activation, DType kv, int64_t head_dim, ops::ActivationLayout layout) {
  if (ops::Verdict verdict = ops::accepts_kv(kv, activation); !verdict.accepted) return verdict;
  if (head_dim > kMaxHeadDim) return ops::refuse("heads of {} elements; up to {} are supported", head_dim, kMaxHeadDim);
  return accepts_activation(traits, activation, layout);
}

ops::Verdict plain::accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  return accepts_kv(traits, problem.activation, problem.kv, problem.head_dim, problem.out);
}

Result<std::unique_ptr<ops::Attention::Kernel>> plain::make(const ops::Attention::Problem& problem, ops::Device& device) {
  CHECK(std::ssize(problem.kv_head) == problem.num_q_heads);
  for (const int32_t head : problem.kv_head) CHECK(head >= 0 && head < problem.num_kv_heads);
  ASSIGN_OR_RETURN(const Function attention, opencl_device(device).function("attention", "attention", kv_definitions(problem.activation, problem.kv)));
  ASSIGN_OR_RETURN(auto kv_head, opencl_device(device).upload(problem.kv_head, "the attention's head map"));
  return std::unique_ptr<ops::Attention::Kernel>(std::make_unique<AttentionKernel>(problem, attention, std::move(kv_head)));
}

ops::Verdict simd16::accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = accepts_device(traits); !verdict.accepted) return verdict;
  if (problem.head_dim != kSimd16HeadDim) return ops::refuse("heads of {} elements; {} are supported", problem.head_dim, kSimd16HeadDim);
  const std::vector<int32_t> first = first_heads_of(problem);
  if (first.empty()) return ops::refuse("query heads of one kv head do not follow each other");
  for (size_t kv = 0; kv + 1 < first.size(); ++kv)
    if (first[kv + 1] - first[kv] > kSimd16MaxHeads) return ops::refuse("{} query heads to a kv head; up to {} are supported", first[kv + 1] - first[kv], kSimd16MaxHeads);
  return plain::accepts(problem, traits);
}
Result<std::unique_ptr<ops::Attention::Kernel>> simd16::make(const ops::Attention::Problem& problem, ops::Device& device) {
  return make_on_sub_groups(problem, opencl_device(device), {});
}

ops::Verdict dpas::accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits) {
  if (problem.activation != DType::kBF16) return ops::refuse("activation dtype {} is not supported; bf16 is", dtype_name(problem.activation));
  return simd16::accepts(problem, traits);
}
Result<std::unique_ptr<ops::Attention::Kernel>> dpas::make(const ops::Attention::Problem& problem, ops::Device& device) {
  Device& d = opencl_device(device);
  bool scaled = false;
  if (problem.kv == DType::kE4M3) {
    ASSIGN_OR_RETURN(scaled, d.flushes_half_subnormals());
  }
  Simd16Attention::MatrixUnits matrix_units;
  const std::string of_device = simd16::definitions(d, kv_definitions(problem.activation, problem.kv) + (scaled ? " -DSCALED_OPERANDS" : ""));
  ASSIGN_OR_RETURN(matrix_units.attention, d.function("attention_dpas", "attention_prompt", of_device));
  ASSIGN_OR_RETURN(matrix_units.decode, d.function("attention_dpas", "attention_decode", of_device));
  ASSIGN_OR_RETURN(matrix_units.kv_head, d.upload(problem.kv_head, "the attention's head map"));
  return make_on_sub_groups(problem, d, std::move(matrix_units));
}

}  // namespace quern::opencl
