#include "worker/selftest.h"

#include <algorithm>
#include <cstring>

#include "backends/platforms.h"
#include "base/float_convert.h"
#include "base/json.h"
#include "support/test_support.h"
#include "worker/kernel_cache.h"

namespace quern::worker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using ops::Buffer;
using ops::Launch;
using ops::Rows;
using ops::Stream;
using ops::TensorView;

const ops::KernelTable& cpu_table() { return backends::kernel_table(ops::Platform::kCpu); }

template <class Op>
const ops::Candidate<Op>& plain() {
  return cpu_table().list<Op>().candidates().back();
}

/// A list of cpu.plain alone.
template <class Op>
ops::CandidateList<Op> only_plain() {
  static const ops::Candidate<Op> list[] = {plain<Op>()};
  return list;
}
ops::KernelTable plain_table() {
  return {.embed = only_plain<ops::Embed>(), .attn_in = only_plain<ops::AttnIn>(), .attention = only_plain<ops::Attention>(),
          .gdn_in = only_plain<ops::GdnIn>(), .gdn_mix = only_plain<ops::GdnMix>(), .out_residual = only_plain<ops::OutResidual>(),
          .mlp_in = only_plain<ops::MlpIn>(), .down_residual = only_plain<ops::DownResidual>(), .mtp_in = only_plain<ops::MtpIn>(),
          .head = only_plain<ops::Head>(), .sample = only_plain<ops::Sample>(), .draft_rows = only_plain<ops::DraftRows>(), .state_copy = only_plain<ops::StateCopy>(),
          .combine = only_plain<ops::Combine>()};
}

template <class Op>
using Make = Result<std::unique_ptr<typename Op::Kernel>> (*)(const typename Op::Problem&, ops::Device&);

/// A candidate list with a kernel of the test's before cpu.plain. The list refers to this object.
template <class Op>
struct Planted {
  ops::Candidate<Op> list[2];
  Planted(std::string_view name, Make<Op> make) : list{{name, plain<Op>().accepts, make}, plain<Op>()} {}
};

/// The released FP8 model on the CPU, planned without a byte of it.
class SelfTest : public ::testing::Test {
 protected:
  void SetUp() override {
    device_ = backends::open_device("cpu", {.num_threads = 2}).value();
    auto json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.fp8.json"));
    ASSERT_OK(json);
    auto config = model::parse_config(*json, "Qwen3.6-27B-FP8");
    ASSERT_OK(config);
    auto inventory = weights::inventory_from_config(*config, {});
    ASSERT_OK(inventory);
    auto plan = make_plan(options_, std::move(*config), std::move(*inventory), {device_->traits()});
    ASSERT_OK(plan);
    plan_ = std::move(*plan);
  }

  SelfTestReport report(const ops::SelectionRules& rules = {}) {
    auto report = self_test(plan_, plan_.ranks[0], table_, rules, *device_);
    EXPECT_OK(report);
    return report ? *report : SelfTestReport{};
  }
  /// One fault, of this op and candidate.
  void expect_found(std::string_view op, std::string_view candidate, std::string_view in_reason = "") {
    const SelfTestReport found = report();
    EXPECT_THAT(found.faults, ElementsAre(AllOf(Field(&SelfTestReport::Fault::op, op), Field(&SelfTestReport::Fault::candidate, candidate),
                                                Field(&SelfTestReport::Fault::reason, HasSubstr(std::string(in_reason))))));
    for (const auto& fault : found.faults) RecordProperty("reason", fault.reason);
  }

  WorkerOptions options_;
  ops::KernelTable table_ = plain_table();
  std::unique_ptr<ops::Device> device_;
  ExecutionPlan plan_;
};

TEST_F(SelfTest, HasNothingToTestWhereAllIsPlain) {
  const SelfTestReport found = report();
  EXPECT_EQ(found.num_tested, 0);
  EXPECT_THAT(found.faults, IsEmpty());
  EXPECT_EQ(device_->allocated_bytes(), 0u);
}

TEST_F(SelfTest, PassesEveryCandidateOfThisMachine) {
  table_ = cpu_table();
  const SelfTestReport found = report();
  EXPECT_THAT(found.faults, IsEmpty());
  if (device_->traits().avx2) {
    EXPECT_GT(found.num_tested, 5);
  }
}

/// Puts plain under another name in front of plain, for every op.
struct RenamedTable {
  template <class Op>
  static Planted<Op> renamed() {
    return Planted<Op>("cpu.renamed", plain<Op>().make);
  }
  Planted<ops::Embed> embed = renamed<ops::Embed>();
  Planted<ops::AttnIn> attn_in = renamed<ops::AttnIn>();
  Planted<ops::Attention> attention = renamed<ops::Attention>();
  Planted<ops::GdnIn> gdn_in = renamed<ops::GdnIn>();
  Planted<ops::GdnMix> gdn_mix = renamed<ops::GdnMix>();
  Planted<ops::OutResidual> out_residual = renamed<ops::OutResidual>();
  Planted<ops::MlpIn> mlp_in = renamed<ops::MlpIn>();
  Planted<ops::DownResidual> down_residual = renamed<ops::DownResidual>();
  Planted<ops::MtpIn> mtp_in = renamed<ops::MtpIn>();
  Planted<ops::Head> head = renamed<ops::Head>();
  Planted<ops::Sample> sample = renamed<ops::Sample>();
  Planted<ops::DraftRows> draft_rows = renamed<ops::DraftRows>();
  Planted<ops::StateCopy> state_copy = renamed<ops::StateCopy>();
  ops::KernelTable table{.embed = embed.list, .attn_in = attn_in.list, .attention = attention.list, .gdn_in = gdn_in.list, .gdn_mix = gdn_mix.list,
                         .out_residual = out_residual.list, .mlp_in = mlp_in.list, .down_residual = down_residual.list, .mtp_in = mtp_in.list,
                         .head = head.list, .sample = sample.list, .draft_rows = draft_rows.list, .state_copy = state_copy.list, .combine = cpu_table().combine};
};

TEST_F(SelfTest, PassesRightKernelsOfEveryOpAndProblem) {
  const RenamedTable renamed;
  table_ = renamed.table;
  const SelfTestReport found = report();
  EXPECT_THAT(found.faults, IsEmpty());
  EXPECT_EQ(found.num_tested, std::ssize(plan_.choices));
  EXPECT_EQ(device_->allocated_bytes(), 0u);
}

TEST_F(SelfTest, PassesRightKernelsInFloat32WithFp8KvAndWithoutDrafts) {
  options_.dtype = ModelDType::kFloat32;
  options_.kv_cache_dtype = KvCacheDType::kFp8;
  options_.k_max = 0;
  SetUp();
  const RenamedTable renamed;
  table_ = renamed.table;
  const SelfTestReport found = report();
  EXPECT_THAT(found.faults, IsEmpty());
  EXPECT_EQ(found.num_tested, std::ssize(plan_.choices));
}

// Wrong kernels.

/// plain behind another kernel's face; what a test spoils it overrides.
class MlpInWrapper : public ops::MlpIn::Kernel {
 public:
  MlpInWrapper(const ops::MlpIn::Problem& problem, ops::Device& device) : inner_(plain<ops::MlpIn>().make(problem, device).value()) {}
  std::string_view arithmetic() const override { return "test"; }
  size_t packed_bytes() const override { return inner_->packed_bytes(); }
  size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
  void pack(const ops::MlpIn::Weights& weights, Buffer& packed, Stream& stream) const override { inner_->pack(weights, packed, stream); }
  void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const ops::Activation& out, Launch& launch) const override {
    inner_->enqueue(rows, x, packed, out, launch);
  }

 protected:
  std::unique_ptr<ops::MlpIn::Kernel> inner_;
};

class LinearWrapper : public ops::LinearResidual::Kernel {
 public:
  LinearWrapper(const ops::LinearResidual::Problem& problem, ops::Device& device) : inner_(plain<ops::OutResidual>().make(problem, device).value()) {}
  std::string_view arithmetic() const override { return "test"; }
  size_t packed_bytes() const override { return inner_->packed_bytes(); }
  size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
  void pack(const ops::LinearSource& weight, Buffer& packed, Stream& stream) const override { inner_->pack(weight, packed, stream); }
  void enqueue(const Rows& rows, const ops::Activation& in, const Buffer& packed, const TensorView& x, Launch& launch) const override {
    inner_->enqueue(rows, in, packed, x, launch);
  }

 protected:
  std::unique_ptr<ops::LinearResidual::Kernel> inner_;
};

template <class Kernel, class Op>
Result<std::unique_ptr<typename Op::Kernel>> make(const typename Op::Problem& problem, ops::Device& device) {
  return std::unique_ptr<typename Op::Kernel>(std::make_unique<Kernel>(problem, device));
}

TEST_F(SelfTest, PassesARightWrapper) {
  const Planted<ops::MlpIn> planted("cpu.right", make<MlpInWrapper, ops::MlpIn>);
  table_.mlp_in = planted.list;
  const SelfTestReport found = report();
  EXPECT_GE(found.num_tested, 1);
  EXPECT_THAT(found.faults, IsEmpty());
}

/// A bf16 tensor in f32, for a kernel that computes with more digits than it is asked for.
class Widened {
 public:
  Widened(ops::Device& device, const TensorView& narrow)
      : narrow_(narrow), buffer_(device.allocate(2 * narrow.size_bytes(), "widened").value()), view_{buffer_.get(), 0, DType::kF32, narrow.shape} {
    std::transform(narrow.data<bf16>(), narrow.data<bf16>() + narrow.shape.num_elements(), view_.data<float>(), [](bf16 v) { return to_f32(v); });
  }
  const TensorView& view() const { return view_; }
  void round_back() const {
    std::transform(view_.data<float>(), view_.data<float>() + view_.shape.num_elements(), narrow_.data<bf16>(), [](float v) { return to_bf16(v); });
  }

 private:
  TensorView narrow_;
  std::unique_ptr<Buffer> buffer_;
  TensorView view_;
};

auto in_f32(auto problem) {
  problem.activation = DType::kF32;
  return problem;
}

/// What the bounds must leave room for: kernels that skip every rounding between input and output.
TEST_F(SelfTest, PassesKernelsThatRoundToBf16OnlyAtTheEnd) {
  class MlpIn : public MlpInWrapper {
   public:
    MlpIn(const ops::MlpIn::Problem& problem, ops::Device& device) : MlpInWrapper(in_f32(problem), device), device_(device) {}
    void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const ops::Activation& out, Launch& launch) const override {
      const Widened wide(device_, out.data);
      inner_->enqueue(rows, Widened(device_, x).view(), packed, {out.layout, wide.view(), {}}, launch);
      wide.round_back();
    }

   private:
    ops::Device& device_;
  };
  class Attention : public ops::Attention::Kernel {
   public:
    Attention(ops::Attention::Problem problem, ops::Device& device) : device_(device) {
      problem.kv = DType::kF32;
      inner_ = plain<ops::Attention>().make(in_f32(problem), device).value();
    }
    std::string_view arithmetic() const override { return "test"; }
    size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
    void enqueue(const Rows& rows, const TensorView& query, const TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out,
                 Launch& launch) const override {
      const Widened wide(device_, out.data), k(device_, kv.k), v(device_, kv.v);
      inner_->enqueue(rows, Widened(device_, query).view(), Widened(device_, gate).view(), {k.view(), v.view(), {}, {}}, first_index,
                      {out.layout, wide.view(), {}}, launch);
      wide.round_back();
    }

   private:
    ops::Device& device_;
    std::unique_ptr<ops::Attention::Kernel> inner_;
  };
  class GdnMix : public ops::GdnMix::Kernel {
   public:
    GdnMix(const ops::GdnMix::Problem& problem, ops::Device& device)
        : device_(device), inner_(plain<ops::GdnMix>().make(in_f32(problem), device).value()) {}
    std::string_view arithmetic() const override { return "test"; }
    size_t packed_bytes() const override { return inner_->packed_bytes(); }
    size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
    void pack(const ops::GdnMix::Weights& weights, Buffer& packed, Stream& stream) const override { inner_->pack(weights, packed, stream); }
    void enqueue(const Rows& rows, const ops::GdnInputs& in, const Buffer& packed, const ops::GdnStateView& state, const ops::Activation& out,
                 Launch& launch) const override {
      const Widened wide(device_, out.data), window(device_, state.conv_window), columns(device_, state.boundary_columns);
      const Widened qkv(device_, in.qkv), z(device_, in.z), b(device_, in.b), a(device_, in.a);
      ops::GdnStateView wide_state = state;
      wide_state.conv_window = window.view();
      wide_state.boundary_columns = columns.view();
      inner_->enqueue(rows, {qkv.view(), z.view(), b.view(), a.view()}, packed, wide_state, {out.layout, wide.view(), {}}, launch);
      for (const Widened* tensor : {&wide, &window, &columns}) tensor->round_back();
    }

   private:
    ops::Device& device_;
    std::unique_ptr<ops::GdnMix::Kernel> inner_;
  };
  const Planted<ops::MlpIn> mlp_in("cpu.f32", make<MlpIn, ops::MlpIn>);
  const Planted<ops::Attention> attention("cpu.f32", make<Attention, ops::Attention>);
  const Planted<ops::GdnMix> gdn_mix("cpu.f32", make<GdnMix, ops::GdnMix>);
  table_.mlp_in = mlp_in.list;
  table_.attention = attention.list;
  table_.gdn_mix = gdn_mix.list;
  const SelfTestReport found = report();
  EXPECT_GE(found.num_tested, 3);
  for (const auto& fault : found.faults) ADD_FAILURE() << fault.op << ' ' << fault.reason;
}

TEST_F(SelfTest, FindsAnOutputThatIsOnePercentTooLarge) {
  class OnePercent : public MlpInWrapper {
    using MlpInWrapper::MlpInWrapper;
    void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const ops::Activation& out, Launch& launch) const override {
      inner_->enqueue(rows, x, packed, out, launch);
      auto* values = out.data.data<bf16>();
      std::transform(values, values + out.data.shape.num_elements(), values, [](bf16 v) { return to_bf16(1.01f * to_f32(v)); });
    }
  };
  const Planted<ops::MlpIn> planted("cpu.one_percent", make<OnePercent, ops::MlpIn>);
  table_.mlp_in = planted.list;
  expect_found("mlp_in", "cpu.one_percent", "mean square error");
}

TEST_F(SelfTest, FindsARowThatIsNeverWritten) {
  class LastRowMissing : public MlpInWrapper {
    using MlpInWrapper::MlpInWrapper;
    void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const ops::Activation& out, Launch& launch) const override {
      const TensorView last = out.data.at(rows.num_rows - 1);
      std::vector<std::byte> before(last.size_bytes());
      std::memcpy(before.data(), last.data<std::byte>(), before.size());
      inner_->enqueue(rows, x, packed, out, launch);
      if (rows.num_rows == 65) std::memcpy(last.data<std::byte>(), before.data(), before.size());
    }
  };
  const Planted<ops::MlpIn> planted("cpu.one_short", make<LastRowMissing, ops::MlpIn>);
  table_.mlp_in = planted.list;
  expect_found("mlp_in", "cpu.one_short", "65 prompt rows: element");
}

TEST_F(SelfTest, FindsAMissingLastColumn) {
  class LastColumnMissing : public LinearWrapper {
    using LinearWrapper::LinearWrapper;
    void enqueue(const Rows& rows, const ops::Activation& in, const Buffer& packed, const TensorView& x, Launch& launch) const override {
      const int64_t columns = in.data.shape[1];
      for (int64_t row = 0; row < rows.num_rows; ++row) in.data.data<bf16>()[row * columns + columns - 1] = bf16{0};
      inner_->enqueue(rows, in, packed, x, launch);
    }
  };
  const Planted<ops::OutResidual> planted("cpu.short_k", make<LastColumnMissing, ops::OutResidual>);
  table_.out_residual = planted.list;
  expect_found("out_residual", "cpu.short_k", "mean square error");
}

TEST_F(SelfTest, FindsTransposedScales) {
  class Transposed : public LinearWrapper {
    using LinearWrapper::LinearWrapper;
    void pack(const ops::LinearSource& weight, Buffer& packed, Stream& stream) const override {
      const int64_t rows = weight.scale.shape[0], columns = weight.scale.shape[1];
      auto* scale = weight.scale.data<float>();
      const std::vector<float> right(scale, scale + rows * columns);
      for (int64_t i = 0; i < rows * columns; ++i) scale[i] = right[static_cast<size_t>(i % rows * columns + i / rows)];
      inner_->pack(weight, packed, stream);
    }
  };
  const Planted<ops::DownResidual> planted("cpu.transposed", make<Transposed, ops::DownResidual>);
  table_.down_residual = planted.list;
  expect_found("down_residual", "cpu.transposed", "mean square error");
}

TEST_F(SelfTest, FindsSubnormalCodesThatBecomeZero) {
  class Flushed : public LinearWrapper {
    using LinearWrapper::LinearWrapper;
    void pack(const ops::LinearSource& weight, Buffer& packed, Stream& stream) const override {
      auto* codes = weight.weight.data<uint8_t>();
      std::replace_if(codes, codes + weight.weight.shape.num_elements(), [](uint8_t code) { return (code & 0x78) == 0; }, uint8_t{0});
      inner_->pack(weight, packed, stream);
    }
  };
  const Planted<ops::DownResidual> planted("cpu.flushed", make<Flushed, ops::DownResidual>);
  table_.down_residual = planted.list;
  expect_found("down_residual", "cpu.flushed", "mean square error");
}

TEST_F(SelfTest, FindsAnAttentionThatIgnoresTheLastKey) {
  class LastKeyMissing : public ops::Attention::Kernel {
   public:
    LastKeyMissing(const ops::Attention::Problem& problem, ops::Device& device) : inner_(plain<ops::Attention>().make(problem, device).value()) {}
    std::string_view arithmetic() const override { return "test"; }
    size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
    void enqueue(const Rows& rows, const TensorView& query, const TensorView& gate, const ops::KvCacheView& kv, int32_t first_index, const ops::Activation& out,
                 Launch& launch) const override {
      for (int32_t row = 0; row < rows.num_rows; ++row) --rows.indices.data<int32_t>()[row];
      inner_->enqueue(rows, query, gate, kv, first_index, out, launch);
    }

   private:
    std::unique_ptr<ops::Attention::Kernel> inner_;
  };
  const Planted<ops::Attention> planted("cpu.last_key", make<LastKeyMissing, ops::Attention>);
  table_.attention = planted.list;
  expect_found("attention", "cpu.last_key", "mean square error");
}

/// A GDN kernel that undoes what an enqueue did to one part of the state.
template <TensorView ops::GdnStateView::*kPart>
class GdnForgets : public ops::GdnMix::Kernel {
 public:
  GdnForgets(const ops::GdnMix::Problem& problem, ops::Device& device) : inner_(plain<ops::GdnMix>().make(problem, device).value()) {}
  std::string_view arithmetic() const override { return "test"; }
  size_t packed_bytes() const override { return inner_->packed_bytes(); }
  size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
  void pack(const ops::GdnMix::Weights& weights, Buffer& packed, Stream& stream) const override { inner_->pack(weights, packed, stream); }
  void enqueue(const Rows& rows, const ops::GdnInputs& in, const Buffer& packed, const ops::GdnStateView& state, const ops::Activation& out,
               Launch& launch) const override {
    const TensorView part = state.*kPart;
    std::vector<std::byte> before(part.size_bytes());
    std::memcpy(before.data(), part.data<std::byte>(), before.size());
    inner_->enqueue(rows, in, packed, state, out, launch);
    std::memcpy(part.data<std::byte>(), before.data(), before.size());
  }

 private:
  std::unique_ptr<ops::GdnMix::Kernel> inner_;
};

TEST_F(SelfTest, FindsAGdnMixThatForgetsAFold) {
  const Planted<ops::GdnMix> planted("cpu.no_fold", make<GdnForgets<&ops::GdnStateView::state>, ops::GdnMix>);
  table_.gdn_mix = planted.list;
  expect_found("gdn_mix", "cpu.no_fold", "state after");
}

TEST_F(SelfTest, FindsAGdnMixThatForgetsTheColumnsBeforeABoundary) {
  const Planted<ops::GdnMix> planted("cpu.no_columns", make<GdnForgets<&ops::GdnStateView::boundary_columns>, ops::GdnMix>);
  table_.gdn_mix = planted.list;
  expect_found("gdn_mix", "cpu.no_columns", "boundary columns after");
}

TEST_F(SelfTest, FindsAGdnMixWhoseRingIsNotWritten) {
  const Planted<ops::GdnMix> planted("cpu.no_ring", make<GdnForgets<&ops::GdnStateView::ring_u>, ops::GdnMix>);
  table_.gdn_mix = planted.list;
  expect_found("gdn_mix", "cpu.no_ring");
}

TEST_F(SelfTest, FindsAGdnMixThatStoresTheFoldOfDrafts) {
  class StoresAlways : public GdnForgets<&ops::GdnStateView::state> {
   public:
    StoresAlways(const ops::GdnMix::Problem& problem, ops::Device& device)
        : GdnForgets(problem, device), inner_(plain<ops::GdnMix>().make(problem, device).value()) {}
    void enqueue(const Rows& rows, const ops::GdnInputs& in, const Buffer& packed, const ops::GdnStateView& state, const ops::Activation& out,
                 Launch& launch) const override {
      std::vector<ops::RowRun> runs(rows.runs.begin(), rows.runs.end());
      for (ops::RowRun& run : runs) run.committed = true;
      Rows committed = rows;
      committed.runs = runs;
      inner_->enqueue(committed, in, packed, state, out, launch);
    }

   private:
    std::unique_ptr<ops::GdnMix::Kernel> inner_;
  };
  const Planted<ops::GdnMix> planted("cpu.stores_drafts", make<StoresAlways, ops::GdnMix>);
  table_.gdn_mix = planted.list;
  expect_found("gdn_mix", "cpu.stores_drafts", "state after a verify across a boundary");
}

/// plain, made for a problem that differs in one number.
template <class Op, class Spoil>
Result<std::unique_ptr<typename Op::Kernel>> spoiled(const typename Op::Problem& problem, ops::Device& device) {
  typename Op::Problem wrong = problem;
  Spoil{}(wrong);
  return plain<Op>().make(wrong, device);
}

struct Epsilon {
  void operator()(auto& problem) const { problem.eps = 0.05f; }
};

TEST_F(SelfTest, FindsAnotherEpsilonInEveryNorm) {
  const Planted<ops::AttnIn> attn_in("cpu.eps", spoiled<ops::AttnIn, Epsilon>);
  const Planted<ops::GdnIn> gdn_in("cpu.eps", spoiled<ops::GdnIn, Epsilon>);
  const Planted<ops::MtpIn> mtp_in("cpu.eps", spoiled<ops::MtpIn, Epsilon>);
  const Planted<ops::Head> head("cpu.eps", spoiled<ops::Head, Epsilon>);
  table_.attn_in = attn_in.list;
  table_.gdn_in = gdn_in.list;
  table_.mtp_in = mtp_in.list;
  table_.head = head.list;
  std::vector<std::string> ops;
  for (const auto& fault : report().faults) ops.push_back(fault.op);
  EXPECT_THAT(ops, ::testing::UnorderedElementsAre("attn_in", "gdn_in", "mtp_in", "head"));
}

TEST_F(SelfTest, FindsRotaryAnglesOfAnotherAxis) {
  struct Axes {
    void operator()(ops::AttnIn::Problem& problem) const { problem.mrope_section = {32, 0, 0}; }
  };
  const Planted<ops::AttnIn> planted("cpu.axes", spoiled<ops::AttnIn, Axes>);
  table_.attn_in = planted.list;
  expect_found("attn_in", "cpu.axes", "query of 1 prompt row:");
}

TEST_F(SelfTest, FindsHeadsThatReadTheirNeighboursKeys) {
  struct Heads {
    void operator()(ops::Attention::Problem& problem) const { std::reverse(problem.kv_head.begin(), problem.kv_head.end()); }
  };
  const Planted<ops::Attention> planted("cpu.heads", spoiled<ops::Attention, Heads>);
  table_.attention = planted.list;
  expect_found("attention", "cpu.heads");
}

TEST_F(SelfTest, FindsAnEmbeddingOfTheWrongPositions) {
  class Embed : public ops::Embed::Kernel {
   public:
    Embed(const ops::Embed::Problem& problem, ops::Device& device) : inner_(plain<ops::Embed>().make(problem, device).value()) {}
    std::string_view arithmetic() const override { return "test"; }
    size_t packed_bytes() const override { return inner_->packed_bytes(); }
    std::string_view table_layout() const override { return inner_->table_layout(); }
    void pack(const ops::LinearSource& table, Buffer& packed, Stream& stream) const override { inner_->pack(table, packed, stream); }
    void enqueue(const Rows& rows, const Buffer& packed, const TensorView& x, Launch& launch) const override {
      std::fill_n(rows.slots.position_delta.data<int32_t>(), rows.slots.position_delta.shape[0], 0);
      inner_->enqueue(rows, packed, x, launch);
    }
    void enqueue_lookup(const TensorView& tokens, const Buffer& packed, const TensorView& x, Launch& launch) const override {
      inner_->enqueue_lookup(tokens, packed, x, launch);
    }

   private:
    std::unique_ptr<ops::Embed::Kernel> inner_;
  };
  const Planted<ops::Embed> planted("cpu.no_delta", make<Embed, ops::Embed>);
  table_.embed = planted.list;
  expect_found("embed", "cpu.no_delta", "positions of 1 decode row");
}

/// The plain sampler, parts of which a test replaces.
class PlainSampler : public ops::Sample::Kernel {
 public:
  PlainSampler(const ops::Sample::Problem& problem, ops::Device& device) : inner_(plain<ops::Sample>().make(problem, device).value()) {}
  std::string_view arithmetic() const override { return "test"; }
  size_t workspace_bytes(int64_t max_rows) const override { return inner_->workspace_bytes(max_rows); }
  void enqueue(const TensorView& runs, const TensorView& logits, const TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out,
               Launch& launch) const override {
    inner_->enqueue(runs, logits, masks, sampler, slots, out, launch);
  }
  void enqueue_argmax(const TensorView& logits, const TensorView& ids, Launch& launch) const override { inner_->enqueue_argmax(logits, ids, launch); }
  void enqueue_candidates(const TensorView& runs, const TensorView& logits, int32_t first_id, int32_t num_candidates, const TensorView& masks, const ops::SamplerTables& sampler,
                          const ops::SlotTables& slots, const TensorView& candidates, Launch& launch) const override {
    inner_->enqueue_candidates(runs, logits, first_id, num_candidates, masks, sampler, slots, candidates, launch);
  }
  void enqueue_drawing(const TensorView& runs, const TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out,
                       Launch& launch) const override {
    inner_->enqueue_drawing(runs, gathered, num_candidates, sampler, slots, out, launch);
  }
  void enqueue_argmax_candidates(const TensorView& logits, int32_t first_id, const TensorView& keys, Launch& launch) const override {
    inner_->enqueue_argmax_candidates(logits, first_id, keys, launch);
  }
  void enqueue_argmax_of(const TensorView& gathered, const TensorView& ids, Launch& launch) const override { inner_->enqueue_argmax_of(gathered, ids, launch); }

 protected:
  std::unique_ptr<ops::Sample::Kernel> inner_;
};

TEST_F(SelfTest, FindsASamplerThatTakesTheHighestIdOnTies) {
  class Sampler : public PlainSampler {
   public:
    using PlainSampler::PlainSampler;
    void enqueue_argmax(const TensorView& logits, const TensorView& ids, Launch&) const override {
      const int64_t vocab = logits.shape[1];
      for (int64_t row = 0; row < logits.shape[0]; ++row) {
        const float* values = logits.data<float>() + row * vocab;
        const auto last = std::max_element(std::reverse_iterator(values + vocab), std::reverse_iterator(values));
        ids.data<int32_t>()[row] = static_cast<int32_t>(last.base() - values) - 1;
      }
    }
  };
  const Planted<ops::Sample> planted("cpu.last_tie", make<Sampler, ops::Sample>);
  table_.sample = planted.list;
  expect_found("sample", "cpu.last_tie", "most likely tokens");
}

TEST_F(SelfTest, FindsASamplerWithoutLogitBias) {
  class Sampler : public PlainSampler {
   public:
    using PlainSampler::PlainSampler;
    void enqueue(const TensorView& runs, const TensorView& logits, const TensorView& masks, const ops::SamplerTables& sampler,
                 const ops::SlotTables& slots, const ops::SampleOutput& out, Launch& launch) const override {
      auto* params = sampler.params.data<ops::SlotSampling>();
      std::vector<ops::SlotSampling> given(params, params + sampler.params.shape[0]);
      for (int64_t slot = 0; slot < sampler.params.shape[0]; ++slot) params[slot].num_logit_bias = 0;
      inner_->enqueue(runs, logits, masks, sampler, slots, out, launch);
      for (int64_t slot = 0; slot < sampler.params.shape[0]; ++slot) params[slot].num_logit_bias = given[static_cast<size_t>(slot)].num_logit_bias;
    }
  };
  const Planted<ops::Sample> planted("cpu.no_bias", make<Sampler, ops::Sample>);
  table_.sample = planted.list;
  expect_found("sample", "cpu.no_bias", "tokens: element");
}

TEST_F(SelfTest, FindsASamplerThatForgetsACandidate) {
  class Sampler : public PlainSampler {
   public:
    using PlainSampler::PlainSampler;
    void enqueue_candidates(const TensorView& runs, const TensorView& logits, int32_t first_id, int32_t num_candidates, const TensorView& masks, const ops::SamplerTables& sampler,
                            const ops::SlotTables& slots, const TensorView& candidates, Launch& launch) const override {
      inner_->enqueue_candidates(runs, logits, first_id, num_candidates, masks, sampler, slots, candidates, launch);
      for (int64_t row = 0; row < candidates.shape[0]; ++row) candidates.data<uint64_t>()[row * (1 + num_candidates) + 10] = 0;
    }
  };
  const Planted<ops::Sample> planted("cpu.forgets", make<Sampler, ops::Sample>);
  table_.sample = planted.list;
  expect_found("sample", "cpu.forgets", "candidates");
}

TEST_F(SelfTest, FindsACopyThatLeavesOutATail) {
  class Copies : public ops::StateCopy::Kernel {
   public:
    Copies(const ops::StateCopy::Problem& problem, ops::Device& device) : inner_(plain<ops::StateCopy>().make(problem, device).value()) {}
    std::string_view arithmetic() const override { return "test"; }
    void enqueue(std::span<const ops::StateCopy::Copy> copies, Launch&) const override {
      for (const ops::StateCopy::Copy& copy : copies) {
        const size_t bytes = copy.destination.size_bytes() / 16 * 16;
        if (copy.source.buffer == nullptr) std::memset(copy.destination.data<std::byte>(), 0, bytes);
        else std::memcpy(copy.destination.data<std::byte>(), copy.source.data<std::byte>(), bytes);
      }
    }
    void store_hidden(const Rows& rows, const TensorView& hidden, const TensorView& window, const TensorView& boundary_hidden, Launch& launch) const override {
      inner_->store_hidden(rows, hidden, window, boundary_hidden, launch);
    }

   private:
    std::unique_ptr<ops::StateCopy::Kernel> inner_;
  };
  const Planted<ops::StateCopy> planted("cpu.by_sixteen", make<Copies, ops::StateCopy>);
  table_.state_copy = planted.list;
  expect_found("state_copy", "cpu.by_sixteen", "copies of u8");
}

TEST_F(SelfTest, FindsACandidateThatCannotBeMade) {
  const Planted<ops::MlpIn> planted("cpu.unbuilt", [](const ops::MlpIn::Problem&, ops::Device&) -> Result<std::unique_ptr<ops::MlpIn::Kernel>> {
    return make_error(ErrorCode::kUnsupported, "its program does not build");
  });
  table_.mlp_in = planted.list;
  expect_found("mlp_in", "cpu.unbuilt", "its program does not build");
}

// What the choice makes of it.

TEST_F(SelfTest, TestsTheNextCandidateWhereTheFirstIsWrong) {
  class Zero : public MlpInWrapper {
    using MlpInWrapper::MlpInWrapper;
    void enqueue(const Rows&, const TensorView&, const Buffer&, const ops::Activation& out, Launch& launch) const override {
      launch.stream.fill_zero(out.data);
    }
  };
  const ops::Candidate<ops::MlpIn> list[] = {{"cpu.first", plain<ops::MlpIn>().accepts, make<Zero, ops::MlpIn>},
                                             {"cpu.second", plain<ops::MlpIn>().accepts, make<Zero, ops::MlpIn>},
                                             plain<ops::MlpIn>()};
  table_.mlp_in = list;
  const SelfTestReport found = report();
  EXPECT_THAT(found.faults, ElementsAre(Field(&SelfTestReport::Fault::candidate, "cpu.first"), Field(&SelfTestReport::Fault::candidate, "cpu.second")));
  EXPECT_EQ(found.num_tested, 2);
}

TEST_F(SelfTest, UsesTheWholeProblemWhereTheSmallOneIsRefused) {
  const ops::Candidate<ops::Sample> list[] = {
      {"cpu.large_only",
       [](const ops::Sample::Problem& problem, const ops::DeviceTraits&) {
         return problem.vocab_size == 248320 ? ops::accept() : ops::refuse("not the model's vocabulary");
       },
       plain<ops::Sample>().make},
      plain<ops::Sample>()};
  table_.sample = list;
  const SelfTestReport found = report();
  EXPECT_THAT(found.faults, IsEmpty());
  EXPECT_EQ(found.num_tested, 1);
}

TEST_F(SelfTest, ADisabledCandidateIsNeitherTestedNorChosen) {
  const Planted<ops::MlpIn> planted("cpu.wrong", [](const ops::MlpIn::Problem&, ops::Device&) -> Result<std::unique_ptr<ops::MlpIn::Kernel>> {
    return make_error(ErrorCode::kInternal, "not to be made");
  });
  table_.mlp_in = planted.list;
  ops::SelectionRules rules;
  for (const auto& fault : report().faults) rules.disabled.emplace(fmt::format("{} {}", fault.op, fault.candidate), fault.reason);
  ASSERT_EQ(rules.disabled.size(), 1u);

  const SelfTestReport again = report(rules);
  EXPECT_EQ(again.num_tested, 0);
  EXPECT_THAT(again.faults, IsEmpty());
  const ops::MlpIn::Problem problem{.hidden = 128, .intermediate = 128, .gate = {128, 128}, .up = {128, 128}};
  EXPECT_EQ(ops::select(table_.mlp_in, problem, device_->traits(), rules).chosen, &planted.list[1]);
  KernelCache cache(table_, *device_, rules);
  EXPECT_OK(cache.get<ops::MlpIn>(problem));
}

TEST_F(SelfTest, APlainThatMisreadsOneCodeStopsTheStart) {
  class OneCode : public LinearWrapper {
    using LinearWrapper::LinearWrapper;
    void pack(const ops::LinearSource& weight, Buffer& packed, Stream& stream) const override {
      auto* codes = weight.weight.data<uint8_t>();
      if (weight.weight.dtype == DType::kE4M3) std::replace(codes, codes + weight.weight.shape.num_elements(), uint8_t{0x81}, uint8_t{0x80});
      inner_->pack(weight, packed, stream);
    }
  };
  const ops::Candidate<ops::DownResidual> list[] = {{"cpu.plain", plain<ops::DownResidual>().accepts, make<OneCode, ops::DownResidual>}};
  table_.down_residual = list;
  const auto failed = self_test(plan_, plan_.ranks[0], table_, {}, *device_);
  ASSERT_FALSE(failed.has_value());
  EXPECT_THAT(failed.error().message, AllOf(HasSubstr("cpu.plain cannot be used"), HasSubstr("0x81")));
}

}  // namespace
}  // namespace quern::worker
