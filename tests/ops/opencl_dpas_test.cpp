#include <numeric>
#include <set>

#include "backends/opencl/programs.h"
#include "backends/opencl/tiled_linear.h"
#include "ops/linear_case.h"

// The linear layers of "opencl.dpas", on Xe2 or with its matrix units emulated (device opencl-emulated:N). Weights keep their values and activations are half with a
// power of two a row, exact for bf16 inputs down to 2^-25 of a row's largest: errors are those of bf16 outputs and of sums in another order.

namespace quern::ops::testing {
namespace {

using std::string_view;

constexpr float kEps = 1e-6f;
constexpr double kBound = 6e-3;  // three or four roundings to bf16
constexpr WeightScheme kTiledSchemes[] = {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor, WeightScheme::kBF16, WeightScheme::kF16};
constexpr RowKind kKinds[] = {RowKind::kDecode, RowKind::kPrompt};

#define ONLY_DPAS() \
  if (candidate_under_test() != "opencl.dpas") GTEST_SKIP() << "this test is about opencl.dpas"

/// A residual layer on rows of one kind.
struct Layer {
  Bed& bed;
  std::unique_ptr<DownResidual::Kernel> kernel;
  Buffer* packed;
  Layer(Bed& b, const LinearSource& source, bool adds) : bed(b), kernel(make_kernel<DownResidual>(b, {source.shape, ActivationLayout::kPlain, DType::kBF16, adds})) {
    packed = &bed.packed(*kernel);
    kernel->pack(source, *packed, bed.stream());
  }
  void run(const TensorView& in, const TensorView& x, RowKind kind) {
    Launch launch = bed.launch(*kernel, in.shape[0]);
    kernel->enqueue(KindRows(in.shape[0], kind).rows, {ActivationLayout::kPlain, in, {}}, *packed, x, launch);
  }
};

TEST(Dpas, MultipliesEverySchemeForEveryCutOfTheRows) {
  ONLY_DPAS();
  constexpr int64_t kIn = 384, kOut = 72;  // features end inside a tile
  for (const WeightScheme scheme : kTiledSchemes)
    for (const RowKind kind : kKinds) {
      const int64_t kRows = scheme == WeightScheme::kFp8Block && kind == RowKind::kPrompt ? 140 : 41;  // prompts of more than 128 rows take the large tiles
      SCOPED_TRACE(fmt::format("{} {}", weight_scheme_name(scheme), kind == RowKind::kDecode ? "decode" : "prompt"));
      Bed bed;
      Random random(4);
      const LinearCase linear(bed, random, {kOut, kIn, scheme});
      const TensorView in = bed.tensor(DType::kBF16, {kRows, kIn}, random.normals(kRows * kIn));
      const TensorView before = bed.tensor(DType::kBF16, {kRows, kOut}, random.normals(kRows * kOut));
      const TensorView x = bed.tensor(DType::kBF16, {kRows, kOut});
      Layer layer(bed, linear.source, true);
      const auto run = [&](const std::vector<int64_t>& pieces) {  // then the rest
        bed.stream().copy(before, x);
        int64_t first = 0;
        const auto run_next = [&](int64_t count) {
          layer.run(rows_from(in, first, count), rows_from(x, first, count), kind);
          first += count;
        };
        for (const int64_t piece : pieces) run_next(piece);
        run_next(kRows - first);
        return Bed::bytes(x);
      };
      const std::string together = run({});
      EXPECT_TRUE(run({1, 7, 9}) == together);
      Vector expected;
      for (int64_t row = 0; row < kRows; ++row) {
        const Vector y = multiply(linear.dense, row_of(in, row));
        for (int64_t i = 0; i < kOut; ++i) expected.push_back(y[static_cast<size_t>(i)] + Bed::get(before, row * kOut + i));
      }
      EXPECT_LE(relative_rms(Bed::values(x), expected), kBound);
    }
}

TEST(Dpas, OutResidualGivesTheBitsOfDownResidual) {
  ONLY_DPAS();
  constexpr int64_t kIn = 256, kOut = 40, kRows = 35;
  for (const RowKind kind : kKinds) {
    Bed bed;
    Random random(7);
    const LinearCase linear(bed, random, {kOut, kIn, WeightScheme::kFp8Block});
    const TensorView in = bed.tensor(DType::kBF16, {kRows, kIn}, random.normals(kRows * kIn));
    const std::vector<float> before = random.normals(kRows * kOut);
    const TensorView down = bed.tensor(DType::kBF16, {kRows, kOut}, before), out = bed.tensor(DType::kBF16, {kRows, kOut}, before);
    Layer(bed, linear.source, true).run(in, down, kind);
    const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(linear.source, packed, bed.stream());
    Launch launch = bed.launch(*kernel, kRows);
    kernel->enqueue(KindRows(kRows, kind).rows, {ActivationLayout::kPlain, in, {}}, packed, out, launch);
    EXPECT_TRUE(Bed::bytes(out) == Bed::bytes(down));
  }
}

TEST(Dpas, DecodesEveryFiniteCodeInEveryColumnOfABlock) {
  ONLY_DPAS();
  constexpr int64_t kCodes = 256, kColumns = kScaleBlock;
  for (const RowKind kind : kKinds) {
    Bed bed;
    LinearSource source;
    source.shape = {.out_features = kCodes, .in_features = kColumns, .scheme = WeightScheme::kFp8Block};
    source.weight = bed.tensor(DType::kE4M3, {kCodes, kColumns});
    const auto code_of = [](int64_t row, int64_t column) {
      const auto code = static_cast<uint8_t>(row + column);
      return e4m3_is_nan(code) ? uint8_t{0} : code;
    };
    for (int64_t i = 0; i < kCodes * kColumns; ++i) source.weight.data<uint8_t>()[i] = code_of(i / kColumns, i % kColumns);
    source.scale = bed.tensor(DType::kF32, {2, 1}, std::vector<float>{0.5f, 4.0f});
    std::vector<float> unit(static_cast<size_t>(kColumns * kColumns), 0.0f);
    for (int64_t i = 0; i < kColumns; ++i) unit[static_cast<size_t>(i * kColumns + i)] = 1.0f;
    const TensorView in = bed.tensor(DType::kBF16, {kColumns, kColumns}, unit), x = bed.zeros(DType::kBF16, {kColumns, kCodes});
    Layer(bed, source, false).run(in, x, kind);
    for (int64_t column = 0; column < kColumns; ++column)
      for (int64_t row = 0; row < kCodes; ++row)
        ASSERT_EQ(Bed::get(x, column * kCodes + row), kE4M3Table[code_of(row, column)] * (row < 128 ? 0.5f : 4.0f)) << "code " << int{code_of(row, column)} << ", column " << column;
  }
}

TEST(Dpas, TakesRowsFarBeyondHalfAndBlocksOfScaleZero) {
  ONLY_DPAS();
  constexpr int64_t kIn = 256, kOut = 16, kRows = 9;
  for (const RowKind kind : kKinds) {
    Bed bed;
    Random random(6);
    LinearCase linear(bed, random, {kOut, kIn, WeightScheme::kFp8Block});
    linear.source.scale.data<float>()[0] = 0.0f;  // the first 128 columns count for nothing
    std::vector<float> inputs = random.normals(kRows * kIn);
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] *= std::ldexp(1.0f, static_cast<int>(i / kIn) * 30 - 120);  // 2^-120 ... 2^120 by row
    const TensorView in = bed.tensor(DType::kBF16, {kRows, kIn}, inputs), x = bed.zeros(DType::kBF16, {kRows, kOut});
    Layer(bed, linear.source, false).run(in, x, kind);
    for (int64_t row = 1; row < kRows; ++row) {  // of 2^-120, products are below f32's smallest
      Vector expected, inputs_of_row = row_of(in, row);
      std::fill_n(inputs_of_row.begin(), 128, 0.0);
      expected = multiply(linear.dense, inputs_of_row);
      std::vector<float> actual;
      for (const double value : row_of(x, row)) actual.push_back(static_cast<float>(value));
      EXPECT_LE(relative_rms(actual, expected), kBound) << row;
    }
  }
}

TEST(Dpas, MlpInIsSiluOfGateTimesUpOfTheNormedInput) {
  ONLY_DPAS();
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kBF16})
    for (const RowKind kind : kKinds) {
      SCOPED_TRACE(weight_scheme_name(scheme));
      Bed bed;
      Random random(3);
      constexpr int64_t kHidden = 256, kWidth = 40, kRows = 21;
      const LinearCase gate(bed, random, {kWidth, kHidden, scheme}), up(bed, random, {kWidth, kHidden, scheme});
      const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
      const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden)), out = bed.tensor(DType::kBF16, {kRows, kWidth});
      const auto kernel = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack({norm, gate.source, up.source}, packed, bed.stream());
      Launch launch = bed.launch(*kernel, kRows);
      kernel->enqueue(KindRows(kRows, kind).rows, x, packed, {ActivationLayout::kPlain, out, {}}, launch);
      Vector expected;
      for (int64_t row = 0; row < kRows; ++row) {
        const Vector u = rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0), g = multiply(gate.dense, u), v = multiply(up.dense, u);
        for (size_t i = 0; i < g.size(); ++i) expected.push_back(silu(g[i]) * v[i]);
      }
      EXPECT_LE(relative_rms(Bed::values(out), expected), kBound);
    }
}

TEST(Dpas, GdnInProjectsWeightsOfBothDtypesFromRowsOfBothKindsInOneStep) {
  ONLY_DPAS();
  Bed bed;
  Random random(5);
  constexpr int64_t kHidden = 256, kQkv = 80, kZ = 32, kHeads = 6, kPrompt = 35, kRows = 44;
  const LinearCase qkv(bed, random, {kQkv, kHidden, WeightScheme::kFp8Block}), z(bed, random, {kZ, kHidden, WeightScheme::kFp8Block});
  const LinearCase b(bed, random, {kHeads, kHidden, WeightScheme::kBF16}), a(bed, random, {kHeads, kHidden, WeightScheme::kBF16});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f)), x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const auto kernel = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm, qkv.source, z.source, b.source, a.source}, packed, bed.stream());
  const GdnInputs out{bed.tensor(DType::kBF16, {kRows, kQkv}), bed.tensor(DType::kBF16, {kRows, kZ}), bed.tensor(DType::kBF16, {kRows, kHeads}),
                      bed.tensor(DType::kBF16, {kRows, kHeads})};
  const RowRun runs[] = {{0, 0, 1, RowKind::kDecode, true}, {1, 1, kPrompt, RowKind::kPrompt, true}, {2, 1 + kPrompt, 5, RowKind::kDecode, false}};  // and padding
  Rows rows;
  rows.num_rows = kRows;
  rows.runs = runs;
  Launch launch = bed.launch(*kernel, kRows);
  kernel->enqueue(rows, x, packed, out, launch);
  for (const auto& [weight, view] : {std::pair{&qkv, out.qkv}, {&z, out.z}, {&b, out.b}, {&a, out.a}}) {
    Vector expected;
    for (int64_t row = 0; row < kRows; ++row)
      for (const double y : multiply(weight->dense, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0))) expected.push_back(y);
    EXPECT_LE(relative_rms(Bed::values(view), expected), kBound);
  }
}

TEST(Dpas, HeadGathersRowsAndGivesF32Logits) {
  ONLY_DPAS();
  for (const WeightScheme scheme : {WeightScheme::kBF16, WeightScheme::kFp8Channel}) {
    Bed bed;
    Random random(8);
    constexpr int64_t kHidden = 256, kVocab = 50, kRows = 12;
    const LinearCase lm_head(bed, random, {kVocab, kHidden, scheme});
    const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f)), x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<Head>(bed, {kHidden, kVocab, lm_head.source.shape, false, kEps, DType::kBF16});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(lm_head.source, packed, bed.stream());
    const std::vector<int32_t> named{11, -1, 3, 0};
    const TensorView logit_rows = bed.ints({4}, named), hidden = bed.tensor(DType::kBF16, {kRows, kHidden}), logits = bed.tensor(DType::kF32, {4, kVocab});
    Launch launch = bed.launch(*kernel, kRows);
    kernel->enqueue(KindRows(kRows, RowKind::kPrompt).rows, x, norm, logit_rows, packed, hidden, logits, launch);
    for (size_t i = 0; i < named.size(); ++i) {
      if (named[i] < 0) continue;
      std::vector<float> actual;
      for (const double value : row_of(logits, static_cast<int64_t>(i))) actual.push_back(static_cast<float>(value));
      EXPECT_LE(relative_rms(actual, multiply(lm_head.dense, row_of(hidden, named[i]))), 1e-4) << "of the rounded hidden";
    }
  }
}

TEST(Dpas, BuildsOnlyProgramsThatXpuCheckKnows) {
  std::set<std::string_view> known;
  for (const opencl::DeclaredProgram& program : opencl::declarations().programs)
    if (program.unit == "dpas") known.insert(program.definitions);
  using opencl::DpasProgram, opencl::Epilogue;
  std::vector<DpasProgram> programs;
  for (const auto& [weight, scaled] : {std::pair{DType::kE4M3, false}, {DType::kE4M3, true}, {DType::kBF16, false}, {DType::kF16, false}}) {
    for (const bool pair : {false, true})
      for (const bool mixed : {false, true}) {
        if (mixed && (pair || weight != DType::kE4M3)) continue;
        for (const int64_t rows : {1, 8, 32})
          for (const bool norms : {false, true})
            if (norms || (!pair && !mixed) || rows == 32) programs.push_back({.weight = weight, .scaled = scaled, .pair = pair, .rows = rows, .norms = norms, .mixed = mixed});
      }
    for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kAddResidual, Epilogue::kPair})
      for (const bool large : {false, true}) programs.push_back({.weight = weight, .scaled = scaled, .large = large, .epilogue = epilogue});
  }
  for (const DpasProgram& program : programs) EXPECT_TRUE(known.contains(program.definitions())) << program.definitions();
}

/// W x of rows that are all x, on a device of its own; W [16, x.size()] with block scales 1, 2, 3 ... along K.
std::vector<float> multiply_on(opencl::Device& device, const std::vector<uint8_t>& codes, const std::vector<float>& x, RowKind kind, int64_t rows = 1) {
  const auto in_features = std::ssize(x), blocks = in_features / kScaleBlock;
  const LinearShape shape{.out_features = 16, .in_features = in_features, .scheme = WeightScheme::kFp8Block};
  const auto& dpas = backends::kernel_table(Platform::kOpenCl).list<DownResidual>().candidates().front();
  const auto kernel = dpas.make({shape, ActivationLayout::kPlain, DType::kBF16, false}, device).value();
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto tensor = [&](DType dtype, const Shape& extents) {
    buffers.push_back(device.allocate(static_cast<size_t>(extents.num_elements()) * dtype_size(dtype), "test").value());
    return TensorView{buffers.back().get(), 0, dtype, extents};
  };
  const auto stream = device.make_stream().value();
  LinearSource source;
  source.shape = shape;
  source.weight = tensor(DType::kE4M3, {16, in_features});
  std::copy(codes.begin(), codes.end(), source.weight.data<uint8_t>());
  source.scale = tensor(DType::kF32, {1, blocks});
  std::iota(source.scale.data<float>(), source.scale.data<float>() + blocks, 1.0f);
  const TensorView packed = tensor(DType::kU8, {static_cast<int64_t>(kernel->packed_bytes())});
  kernel->pack(source, *packed.buffer, *stream);
  const TensorView in = tensor(DType::kBF16, {rows, in_features}), out = tensor(DType::kBF16, {rows, 16});
  for (int64_t i = 0; i < rows * in_features; ++i) Bed::set(in, i, x[static_cast<size_t>(i % in_features)]);
  Launch launch{*stream, tensor(DType::kU8, {static_cast<int64_t>(kernel->workspace_bytes(rows))})};
  kernel->enqueue(KindRows(rows, kind).rows, {ActivationLayout::kPlain, in, {}}, *packed.buffer, out, launch);
  EXPECT_OK(stream->finish());
  return Bed::values(out);
}

TEST(Dpas, ScalesOperandsWhereMatrixUnitsFlushHalfSubnormals) {
  ONLY_DPAS();
  const std::string name = device_under_test();
  const auto flushing = opencl::Device::open(std::stoi(name.substr(name.find(':') + 1)), {.inspectable = true, .emulates_xe2 = true, .emulates_flushing = true}).value();
  const auto exact = opencl::Device::open(std::stoi(name.substr(name.find(':') + 1)), {.inspectable = true, .emulates_xe2 = true}).value();
  EXPECT_TRUE(flushing->flushes_half_subnormals().value());
  EXPECT_FALSE(exact->flushes_half_subnormals().value());

  // The smallest codes, which are half subnormals unless scaled: a row of ones gives their sums.
  std::vector<uint8_t> codes(16 * 128);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i / 128);  // 0 .. 15
  for (const RowKind kind : kKinds) {
    const std::vector<float> sums = multiply_on(*flushing, codes, std::vector<float>(128, 1.0f), kind);
    for (size_t code = 0; code < 16; ++code) EXPECT_EQ(sums[code], 128.0f * kE4M3Table[code]) << code;
  }
}

TEST(Dpas, FaultsPlantedInTheKernelsChangeTheResult) {
  ONLY_DPAS();
  const std::string name = device_under_test();
  const auto ordinal = std::stoi(name.substr(name.find(':') + 1));
  Random random(12);
  std::vector<uint8_t> codes(16 * 256);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(126) | random.below(2) << 7);
  const std::vector<float> x = [&] {
    std::vector<float> values;
    for (int i = 0; i < 256; ++i) values.push_back(round_bf16(random.normal()));
    return values;
  }();
  const auto right = opencl::Device::open(ordinal, {.inspectable = true, .emulates_xe2 = true}).value();
  struct Fault {
    const char *what, *unit, *from, *to;
    RowKind kind;
    int64_t rows = 1;
  };
  const Fault faults[] = {
      {"lane", "dpas", "shared[split][t][g * 8 + m][lane]", "shared[split][t][g * 8 + m][lane ^ 1]", RowKind::kDecode},
      {"K offset of rows", "dpas", "operands[k / 16 + half_k]", "operands[k / 16]", RowKind::kDecode},
      {"block of rows", "dpas", "load_activations(from[m] + block * BLOCK)", "load_activations(from[m])", RowKind::kDecode, 3},
      {"scale of rows", "dpas", "row_scale[m] = inverse_of(inverse)", "row_scale[m] = inverse", RowKind::kDecode},
      {"K offset of weights", "dpas", "DWORDS(type, block * BLOCK + k)", "DWORDS(type, block * BLOCK)", RowKind::kDecode},
      {"scale of the block before", "dpas", "scales[t * blocks + block]", "scales[t * blocks]", RowKind::kDecode},
      {"K offset of many rows", "dpas", "block * BLOCK + k + half_k * 16", "block * BLOCK + k", RowKind::kDecode, 9},
      {"place of many rows", "dpas_operands", "block * BLOCK + i * 16 + lane", "block * BLOCK + i * 16 + (lane ^ 1)", RowKind::kDecode, 9},
      {"scale of many rows", "dpas_operands", "inverse_of(inverse);\n  }", "inverse;\n  }", RowKind::kDecode, 9},
      {"bit mask of a code", "dpas", "0x3f803f80u", "0x3f003f80u", RowKind::kDecode},
      {"order of codes in a dword", "tile16", "(uint)p[2] << 8 | (uint)p[1] << 16", "(uint)p[1] << 8 | (uint)p[2] << 16", RowKind::kDecode},
      {"K offset of rows", "dpas", "(int2)(k + 16, row + i * 8)", "(int2)(k, row + i * 8)", RowKind::kPrompt},
      {"ratio of scales", "dpas", "s[j][block - 1] / s[j][block]", "s[j][block] / s[j][block - 1]", RowKind::kPrompt},
      {"row", "dpas", "sums[i][j] = MAD(a[half_k][i]", "sums[i][j] = MAD(a[half_k][MT - 1 - i]", RowKind::kPrompt},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.what);
    int num_planted = 0;
    const auto plant = [&](string_view unit, std::string& source) {
      if (unit != fault.unit) return;
      for (size_t at = source.find(fault.from); at != std::string::npos; at = source.find(fault.from, at + 1)) {
        source.replace(at, std::string(fault.from).size(), fault.to);
        ++num_planted;
      }
    };
    const auto wrong = opencl::Device::open(ordinal, {.inspectable = true, .emulates_xe2 = true, .edit_source = plant, .program_cache = {}}).value();
    const std::vector<float> expected = multiply_on(*right, codes, x, fault.kind, fault.rows),
                             actual = multiply_on(*wrong, codes, x, fault.kind, fault.rows);
    EXPECT_GT(num_planted, 0) << "the text is not in the source any more";
    EXPECT_GT(relative_rms(actual, Vector(expected.begin(), expected.end())), 5 * kBound);  // the lost bit of a code is a twelfth of it at most
  }
}

TEST(Dpas, RefusesWhatItWasNotMadeForWithAReason) {
  DeviceTraits b60 = backends::traits_by_name("b60").value(), other = b60;
  other.architecture = 0;
  const auto& dpas = backends::kernel_table(Platform::kOpenCl).list<DownResidual>().candidates().front();
  ASSERT_EQ(dpas.name, "opencl.dpas");
  const DownResidual::Problem good{{64, 256, WeightScheme::kFp8Block}, ActivationLayout::kPlain, DType::kBF16, true};
  EXPECT_TRUE(dpas.accepts(good, b60).accepted);
  EXPECT_FALSE(dpas.accepts(good, other).accepted);
  for (const DownResidual::Problem& bad : {DownResidual::Problem{{64, 200, WeightScheme::kFp8Block}, ActivationLayout::kPlain, DType::kBF16, true},
                                           DownResidual::Problem{{64, 256, WeightScheme::kF32}, ActivationLayout::kPlain, DType::kBF16, true},
                                           DownResidual::Problem{{0, 256, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kBF16, true},
                                           DownResidual::Problem{{64, 256, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kF32, true}}) {
    const Verdict verdict = dpas.accepts(bad, b60);
    EXPECT_FALSE(verdict.accepted);
    EXPECT_NE(verdict.reason, "");
  }
}

}  // namespace
}  // namespace quern::ops::testing
