#include "worker/selftest.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "worker/problems.h"
#include "worker/selftest_ops.h"

namespace quern::worker {
namespace {

using selftest::Trial;

/// Caps on the extents of an instance; a candidate that refuses them all is tested on the problem itself.
constexpr int64_t kCaps[] = {512, 2048};

/// Visits the problems and tests what `select` chooses for each under the rules, as the KernelCache will.
class Tester {
 public:
  Tester(const ops::KernelTable& table, ops::SelectionRules rules, ops::Device& device, ops::Stream& stream, std::vector<std::vector<int32_t>> row_counts)
      : table_(table), rules_(std::move(rules)), device_(device), stream_(stream), row_counts_(std::move(row_counts)) {}

  template <class Op>
  void operator()(const typename Op::Problem& problem, const std::string&) {
    if (status_) status_ = test<Op>(problem);
  }

  /// Once more with what was found wrong disabled: the next of a list takes its place, perhaps for other problems as well.
  bool found_more() { return status_.has_value() && std::exchange(num_known_, report_.faults.size()) != report_.faults.size(); }
  Result<SelfTestReport> take() {
    if (!status_) return status_.error();
    return std::move(report_);
  }

 private:
  template <class Op>
  Result<void> test(const typename Op::Problem& problem) {
    const ops::CandidateList<Op>& list = table_.list<Op>();
    const ops::Choice<Op> choice = ops::select(list, problem, device_.traits(), rules_);
    if (choice.chosen == nullptr) return {};  // a fault took the only candidate that was allowed: loading says so
    const ops::Candidate<Op>& plain = list.candidates().back();
    if (choice.chosen == &plain || !tested_.insert(fmt::format("{} {} {}", Op::kName, choice.chosen->name, describe(problem))).second) return {};
    ++report_.num_tested;
    const typename Op::Problem instance = small_instance(*choice.chosen, problem);
    ASSIGN_OR_RETURN(const std::string reason, compare(*choice.chosen, plain, instance));
    if (reason.empty()) return {};
    report_.faults.push_back({std::string(Op::kName), std::string(choice.chosen->name), fmt::format("{} {}", describe(instance), reason)});
    rules_.disabled.emplace(fmt::format("{} {}", Op::kName, choice.chosen->name), reason);
    return {};
  }

  template <class Op>
  typename Op::Problem small_instance(const ops::Candidate<Op>& candidate, const typename Op::Problem& problem) {
    for (const int64_t cap : kCaps) {
      typename Op::Problem instance{selftest::reduced(problem, cap)};
      if (candidate.accepts(instance, device_.traits()).accepted) return instance;
    }
    return problem;
  }

  /// What is wrong with `candidate`; empty: nothing.
  template <class Op>
  Result<std::string> compare(const ops::Candidate<Op>& candidate, const ops::Candidate<Op>& plain, const typename Op::Problem& problem) {
    const auto made = candidate.make(problem, device_);
    if (!made) return fmt::format("cannot be made: {}", made.error().message);
    ASSIGN_OR_RETURN(const auto reference, plain.make(problem, device_));
    for (const std::vector<int32_t>& rows : row_counts_) {
      ASSIGN_OR_RETURN(const auto expected, outputs<Op>(plain.name, problem, *reference, rows));
      for (const selftest::Output& output : expected)
        if (std::none_of(output.values.begin(), output.values.end(), [](float value) { return std::isfinite(value); }))
          return make_error(ErrorCode::kInternal, "{} cannot be used on {}: {} {}, {}, has no finite value", plain.name, device_.traits().name, Op::kName,
                            describe(problem), output.name);
      ASSIGN_OR_RETURN(const auto actual, outputs<Op>(candidate.name, problem, **made, rows));
      if (std::string found = selftest::difference(expected, actual); !found.empty()) return found;
    }
    return std::string();
  }
  template <class Op>
  Result<std::vector<selftest::Output>> outputs(std::string_view name, const typename Op::Problem& problem, const typename Op::Kernel& kernel, const std::vector<int32_t>& rows) {
    Trial trial(device_, stream_, rows);
    if (auto done = selftest::run(problem, kernel, trial); !done) return done.error().with_context(fmt::format("self-test of {} {}", Op::kName, name));
    return trial.take();
  }

  const ops::KernelTable& table_;
  ops::SelectionRules rules_;
  ops::Device& device_;
  ops::Stream& stream_;
  std::vector<std::vector<int32_t>> row_counts_;
  std::set<std::string> tested_;
  SelfTestReport report_;
  size_t num_known_ = 0;
  Result<void> status_;
};

/// Decodes every E4M3 code in every column of a scale block by multiplying with unit vectors.
Result<void> check_e4m3(ops::WeightScheme scheme, DType activation, const ops::Candidate<ops::DownResidual>& plain, ops::Device& device, ops::Stream& stream) {
  constexpr int64_t kCodes = 256, kColumns = ops::kScaleBlock;
  const auto code_of = [](int64_t row, int64_t column) {
    const auto code = static_cast<uint8_t>(row + column);
    return e4m3_is_nan(code) ? uint8_t{0} : code;
  };
  const auto scale_of = [&](int64_t row) {  // powers of two: every product is exact in all dtypes
    if (scheme == ops::WeightScheme::kFp8Tensor) return 0.5f;
    return scheme == ops::WeightScheme::kFp8Block ? (row < kCodes / 2 ? 0.5f : 4.0f) : std::ldexp(1.0f, static_cast<int>(row % 5) - 2);
  };
  Trial trial(device, stream);
  ops::DownResidual::Problem problem;
  problem.linear = {.out_features = kCodes, .in_features = kColumns, .scheme = scheme};
  problem.activation = activation;
  std::vector<std::byte> codes;
  for (int64_t i = 0; i < kCodes * kColumns; ++i) codes.push_back(std::byte{code_of(i / kColumns, i % kColumns)});
  ops::LinearSource weight;
  weight.shape = problem.linear;
  ASSIGN_OR_RETURN(weight.weight, trial.upload(codes, DType::kE4M3, {kCodes, kColumns}));
  const bool block = scheme == ops::WeightScheme::kFp8Block;
  const Shape scale_shape = block ? Shape{2, 1} : scheme == ops::WeightScheme::kFp8Channel ? Shape{kCodes} : Shape{1};
  ASSIGN_OR_RETURN(weight.scale, trial.tensor(DType::kF32, scale_shape, [&](int64_t i) { return scale_of(block ? i * kCodes / 2 : i); }));
  ASSIGN_OR_RETURN(const auto kernel, plain.make(problem, device));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(*kernel, [&](ops::Buffer& buffer) { kernel->pack(weight, buffer, stream); }));
  for (const ops::RowKind kind : {ops::RowKind::kPrompt, ops::RowKind::kDecode}) {
    const Shape square{kColumns, kColumns};
    ASSIGN_OR_RETURN(const selftest::Step step, trial.step({{.slot = 0, .num_rows = kColumns / 2, .kind = kind},
                                                            {.slot = 2, .num_rows = kColumns / 2, .kind = kind}}, {}));
    ASSIGN_OR_RETURN(const ops::TensorView in, trial.tensor(activation, square, [](int64_t i) { return i % kColumns == i / kColumns ? 1.0f : 0.0f; }));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.tensor(activation, {kColumns, kCodes}, [](int64_t) { return 0.0f; }));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(*kernel, kColumns));
    kernel->enqueue(step.rows, {ops::ActivationLayout::kPlain, in, {}}, *packed, x, launch);
    ASSIGN_OR_RETURN(const std::vector<float> values, trial.read(x));
    for (int64_t column = 0; column < kColumns; ++column)
      for (int64_t row = 0; row < kCodes; ++row) {
        const uint8_t code = code_of(row, column);
        const float found = values[static_cast<size_t>(column * kCodes + row)], wanted = kE4M3Table[code] * scale_of(row);
        if (!(std::abs(found - wanted) <= 0x1p-7f * std::abs(wanted)))  // half of the distance to the next code would be 2^-5
          return make_error(ErrorCode::kInternal, "{} cannot be used on {}: it decodes E4M3 code {:#04x} with scale {} as {}, not {} ({}, column {})",
                            plain.name, device.traits().name, code, scale_of(row), found, wanted, ops::weight_scheme_name(scheme), column);
      }
  }
  return {};
}

/// Of every FP8 scheme that the model has.
Result<void> check_e4m3(const ExecutionPlan& plan, const ops::KernelTable& table, ops::Device& device, ops::Stream& stream) {
  std::set<ops::WeightScheme> schemes;
  for (const auto& [name, linear] : plan.inventory.linears)
    if (ops::is_fp8(linear.scheme)) schemes.insert(linear.scheme);
  const auto candidates = table.down_residual.candidates();
  for (const ops::WeightScheme scheme : schemes)
    if (!candidates.empty()) RETURN_IF_ERROR(check_e4m3(scheme, plan.activation, candidates.back(), device, stream));
  return {};
}

}  // namespace

Result<SelfTestReport> self_test(const ExecutionPlan& plan, const RankPlan& rank, const ops::KernelTable& table, const ops::SelectionRules& rules, ops::Device& device,
                                 const std::vector<std::vector<int32_t>>& row_counts) {
  ASSIGN_OR_RETURN(const auto stream, device.make_stream());
  RETURN_IF_ERROR(check_e4m3(plan, table, device, *stream));
  const Problems problems(rank.config, rank.inventory, rank.shard, plan.numerics());
  std::vector<std::vector<int32_t>> rows = row_counts;
  if (rows.empty()) rows.push_back(selftest::kRowCounts);
  Tester tester(table, rules, device, *stream, std::move(rows));
  do problems.for_each(plan.with_mtp, tester);
  while (tester.found_more());
  return tester.take();
}

}  // namespace quern::worker
