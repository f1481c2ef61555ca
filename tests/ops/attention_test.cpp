#include "ops/cases.h"
#include "ops/linear_case.h"

// attn_in and attention.

namespace quern::ops::testing {
namespace {

constexpr float kEps = 1e-6f;

std::vector<float> frequencies(int64_t rotary_dim) {
  std::vector<float> inv_freq;
  for (int64_t i = 0; i < rotary_dim / 2; ++i)
    inv_freq.push_back(static_cast<float>(std::pow(1e7, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim))));
  return inv_freq;
}

/// Offset of an index of a slot in a [num_blocks, num_kv_heads, 64, head_dim] cache, in elements.
int64_t kv_offset(const SlotTables& slots, int64_t slot, int64_t index, int64_t kv_head, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t block = slots.block_tables.data<int32_t>()[slot * slots.block_tables.shape[1] + index / 64];
  return ((block * num_kv_heads + kv_head) * 64 + index % 64) * head_dim;
}

struct AttnInCase {
  /// Extents that no kernel is made for, or those that some are.
  struct Shape {
    int64_t hidden = 160, nq = 4, nkv = 2, d = 32, rotary = 24;
    std::array<int32_t, 3> mrope_section = {4, 4, 4};
    std::array<WeightScheme, 3> schemes = {WeightScheme::kFp8Block, WeightScheme::kBF16, WeightScheme::kFp8Tensor};
  };
  int64_t hidden, nq, nkv, d, rotary;
  Bed bed;
  Random random{51};
  LinearCase q, k, v;
  TensorView norm = bed.tensor(DType::kBF16, {hidden}, random.normals(hidden, 0.2f));
  TensorView q_norm = bed.tensor(DType::kBF16, {d}, random.normals(d, 0.2f)), k_norm = bed.tensor(DType::kBF16, {d}, random.normals(d, 0.2f));
  std::vector<float> x = random.normals(140 * hidden);
  SlotTables slots = make_slots(bed, 2, 0, 4);
  TensorView query, gate, key_cache, value_cache, k_scale, v_scale;
  AttnIn::Problem problem;

  AttnInCase(DType activation, DType kv, int threads, const Shape& s)
      : hidden(s.hidden),
        nq(s.nq),
        nkv(s.nkv),
        d(s.d),
        rotary(s.rotary),
        bed(threads),
        q(bed, random, {nq * 2 * d, hidden, s.schemes[0]}),
        k(bed, random, {nkv * d, hidden, s.schemes[1]}),
        v(bed, random, {nkv * d, hidden, s.schemes[2]}) {
    problem = {hidden, nq, nkv, d, q.source.shape, k.source.shape, v.source.shape, kEps, activation, kv, frequencies(rotary), 1.0f, s.mrope_section};
    key_cache = bed.tensor(kv, {8, nkv, 64, d});
    value_cache = bed.tensor(kv, {8, nkv, 64, d});
    std::vector<float> k_scales, v_scales;
    for (int64_t head = 0; head < nkv; ++head) {
      k_scales.push_back(0.02f + 0.03f * static_cast<float>(head));
      v_scales.push_back(0.03f - 0.02f * static_cast<float>(head % 2));
    }
    k_scale = bed.tensor(DType::kF32, {nkv}, k_scales);
    v_scale = bed.tensor(DType::kF32, {nkv}, v_scales);
  }
  AttnInCase(DType activation, DType kv, int threads = 2, int64_t width = 160) : AttnInCase(activation, kv, threads, Shape{.hidden = width}) {}
  /// Rows [first, first + n) of x as one run of slot 1 at its cursor, which advances; `positions` (t, h, w) a row where given.
  void run(int64_t first, int64_t n, const std::vector<int32_t>& positions = {}, RowKind kind = RowKind::kPrompt) {
    const auto kernel = make_kernel<AttnIn>(bed, problem);
    Buffer& packed = bed.packed(*kernel);
    kernel->pack({norm, q.source, k.source, v.source, q_norm, k_norm}, packed, bed.stream());
    const TensorView in = bed.tensor(problem.activation, {n, hidden},
                                     std::span(x).subspan(static_cast<size_t>(first * hidden), static_cast<size_t>(n * hidden)));
    const Step step(bed, {{1, 0, static_cast<int32_t>(n), kind, true}}, slots);
    if (!positions.empty()) std::copy(positions.begin(), positions.end(), step.rows.positions.data<int32_t>());
    query = bed.tensor(problem.activation, {n, nq, d});
    gate = bed.tensor(problem.activation, {n, nq, d});
    Launch launch = bed.launch(*kernel, n);
    kernel->enqueue(step.rows, in, packed, query, gate, {key_cache, value_cache, k_scale, v_scale}, launch);
    EXPECT_OK(bed.stream().finish());  // copies of what the kernel holds, which goes now
    slots.cursor.data<int32_t>()[1] += static_cast<int32_t>(n);
  }
  /// Whether FP8 weights meet FP8 activations.
  [[nodiscard]] bool quantises() const {
    if (candidate_under_test().starts_with("cuda.mma.e4m3")) return problem.activation == DType::kBF16 && hidden % kScaleBlock == 0;
    const WeightScheme scheme = q.source.shape.scheme;
    return candidate_under_test().starts_with("cuda.sm90") && is_fp8(scheme) && k.source.shape.scheme == scheme && v.source.shape.scheme == scheme;
  }
  Vector input(int64_t row) const {
    Vector result;
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = x[static_cast<size_t>(row * hidden + i)];
      result.push_back(problem.activation == DType::kBF16 ? round_bf16(value) : value);
    }
    return result;
  }
  /// Query, gate, key and value of a row, each [heads * d].
  std::array<Vector, 4> reference(int64_t row, const std::array<int, 3>& position) {
    const Vector u = rms_norm(input(row), Bed::doubles(norm), kEps, 1.0);
    const auto project = [&](const LinearCase& linear) { return multiply(linear.dense, quantises() ? seen_by(linear.source.shape, u) : u); };
    const Vector q_and_gate = project(q), keys = project(k);
    std::vector<int> positions;
    for (int i = 0; i < rotary / 2; ++i)
      positions.push_back(position[static_cast<size_t>(i % 3)]);  // equal sections: every frequency in turn
    const auto width = static_cast<size_t>(d);
    std::array<Vector, 4> result;
    const auto add = [&](Vector& to, Vector head, const TensorView* weight) {
      if (weight != nullptr) {
        head = rms_norm(head, Bed::doubles(*weight), kEps, 1.0);
        rotate(head.data(), problem.inv_freq, positions);
      }
      to.insert(to.end(), head.begin(), head.end());
    };
    for (size_t head = 0; head < static_cast<size_t>(nq); ++head) {
      add(result[0], testing::row(q_and_gate, 2 * head, width), &q_norm);
      add(result[1], testing::row(q_and_gate, 2 * head + 1, width), nullptr);
    }
    for (size_t head = 0; head < static_cast<size_t>(nkv); ++head) add(result[2], testing::row(keys, head, width), &k_norm);
    result[3] = project(v);
    return result;
  }
  std::vector<float> cached(const TensorView& cache, const TensorView& scale, int64_t index) {
    std::vector<float> result;
    for (int64_t head = 0; head < nkv; ++head)
      for (int64_t i = 0; i < d; ++i)
        result.push_back(Bed::get(cache, kv_offset(slots, 1, index, head, nkv, d) + i) *
                         (cache.dtype == DType::kE4M3 ? Bed::get(scale, head) : 1.0f));
    return result;
  }
  /// A row at its own position is what the reference says, in the cache to within `cache_bound`.
  void expect_near(int64_t row, double cache_bound) {
    const auto position = static_cast<int>(row);
    const auto [q_of_row, gate_of_row, key, value] = reference(row, {position, position, position});
    EXPECT_LT(relative_rms(Bed::values(query.at(row)), q_of_row), 8e-3);
    EXPECT_LT(relative_rms(Bed::values(gate.at(row)), gate_of_row), 8e-3);
    EXPECT_LT(relative_rms(cached(key_cache, k_scale, row), key), cache_bound);
    EXPECT_LT(relative_rms(cached(value_cache, v_scale, row), value), cache_bound);
  }
};

TEST(AttnIn, ProjectsNormsRotatesAndWritesTheCacheInEveryDtype) {
  for (const auto& [activation, kv] :
       {std::pair{DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kF32, DType::kE4M3}, {DType::kBF16, DType::kE4M3}}) {
    SCOPED_TRACE(fmt::format("{} with {} cache", dtype_name(activation), dtype_name(kv)));
    AttnInCase c(activation, kv);
    c.run(0, 140);
    // f32: two norms and a product; bf16: three roundings of 2^-9; e4m3: 2^-4 at most in relative terms, 2^-4 / sqrt(3) in the mean.
    const double bound = activation == DType::kF32 ? 3e-6 : 8e-3, cache_bound = kv == DType::kE4M3 ? 4e-2 : bound;
    for (const int64_t row : {0, 1, 63, 64, 139}) {
      const auto position = static_cast<int>(row);
      const auto [query, gate, key, value] = c.reference(row, {position, position, position});
      EXPECT_LT(relative_rms(Bed::values(c.query.at(row)), query), bound);
      EXPECT_LT(relative_rms(Bed::values(c.gate.at(row)), gate), bound);
      EXPECT_LT(relative_rms(c.cached(c.key_cache, c.k_scale, row), key), cache_bound);
      EXPECT_LT(relative_rms(c.cached(c.value_cache, c.v_scale, row), value), cache_bound);
    }
    int64_t written = 0;
    for (const float value : Bed::values(c.key_cache)) written += !std::isnan(value);
    EXPECT_EQ(written, 140 * c.nkv * c.d) << "blocks of other slots and indices are left alone";
  }
}

/// What kernels take that know no other widths: of rows of either kind, in every size of their work-groups.
TEST(AttnIn, OfWholeBlocksProjectsRowsOfBothKinds) {
  if (candidate_under_test().starts_with("cuda.sm90")) GTEST_SKIP() << "activations become FP8 there";
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const auto& [kind, n] : {std::pair{RowKind::kPrompt, int64_t{35}}, {RowKind::kPrompt, 140}, {RowKind::kDecode, 1}, {RowKind::kDecode, 7}, {RowKind::kDecode, 35}}) {
      SCOPED_TRACE(fmt::format("{} cache, {} {} rows", dtype_name(kv), n, kind == RowKind::kPrompt ? "prompt" : "decode"));
      AttnInCase c(DType::kBF16, kv, 2, 256);
      c.run(0, n, {}, kind);
      for (const int64_t row : {int64_t{0}, n / 2, n - 1}) c.expect_near(row, kv == DType::kE4M3 ? 4e-2 : 8e-3);
    }
}

/// The model's heads, for which there are kernels of their own: an odd number of them, and frequencies that do not fill a warp.
TEST(AttnIn, OfHeadsOf256ElementsProjectsNormsAndRotates) {
  const std::array<WeightScheme, 3> plain = {WeightScheme::kBF16, WeightScheme::kBF16, WeightScheme::kBF16};
  for (const auto& [rotary, section] : {std::pair{int64_t{64}, std::array{11, 11, 10}}, {256, {43, 43, 42}}, {48, {8, 8, 8}}})
    for (const DType kv : {DType::kBF16, DType::kE4M3})
      for (const auto& [kind, n] : {std::pair{RowKind::kPrompt, int64_t{70}}, {RowKind::kDecode, 9}, {RowKind::kDecode, 3}}) {
        SCOPED_TRACE(fmt::format("{} of 256 turned, {} cache, {} rows", rotary, dtype_name(kv), n));
        AttnInCase c(DType::kBF16, kv, 2, {.hidden = 128, .nq = 4, .nkv = 1, .d = 256, .rotary = rotary, .mrope_section = section, .schemes = plain});
        std::vector<int32_t> positions;
        for (int32_t row = 0; row < static_cast<int32_t>(n); ++row)
          for (const int32_t position : {row + 3000, 2 * row, 77}) positions.push_back(position);
        c.run(0, n, positions, kind);
        for (const int64_t row : {int64_t{0}, n - 1}) {
          const auto at = static_cast<int>(row);
          const auto [query, gate, key, value] = c.reference(row, {at + 3000, 2 * at, 77});
          EXPECT_LT(relative_rms(Bed::values(c.query.at(row)), query), 8e-3);
          EXPECT_LT(relative_rms(Bed::values(c.gate.at(row)), gate), 8e-3);
          EXPECT_LT(relative_rms(c.cached(c.key_cache, c.k_scale, row), key), kv == DType::kE4M3 ? 4e-2 : 8e-3);
          EXPECT_LT(relative_rms(c.cached(c.value_cache, c.v_scale, row), value), kv == DType::kE4M3 ? 4e-2 : 8e-3);
        }
        int64_t written = 0;
        for (const float x : Bed::values(c.key_cache)) written += !std::isnan(x);
        EXPECT_EQ(written, n * c.nkv * c.d) << "blocks of other slots and indices are left alone";
      }
}

/// The same of weights that share a scheme, without which some kernels take none, and of so many rows that they change their shape.
TEST(AttnIn, OfOneSchemeProjectsRowsOfBothKinds) {
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kBF16})
    for (const auto& [kind, n] : {std::pair{RowKind::kPrompt, int64_t{140}}, {RowKind::kDecode, 2}, {RowKind::kDecode, 11}, {RowKind::kDecode, 140}}) {
      SCOPED_TRACE(fmt::format("{}, {} {} rows", weight_scheme_name(scheme), n, kind == RowKind::kPrompt ? "prompt" : "decode"));
      AttnInCase c(DType::kBF16, DType::kBF16, 2, {.hidden = 256, .schemes = {scheme, scheme, scheme}});
      c.run(0, n, {}, kind);
      for (const int64_t row : {int64_t{0}, n / 2, n - 1}) c.expect_near(row, 8e-3);
    }
}

TEST(AttnIn, TurnsEachFrequencyWithItsOwnAxisForImages) {
  AttnInCase c(DType::kF32, DType::kF32);
  c.run(0, 2, {5, 90, 17, 1000, 3, 200});
  EXPECT_LT(relative_rms(Bed::values(c.query.at(0)), c.reference(0, {5, 90, 17})[0]), 3e-6);
  EXPECT_LT(relative_rms(Bed::values(c.query.at(1)), c.reference(1, {1000, 3, 200})[0]), 3e-6);
  EXPECT_LT(relative_rms(c.cached(c.key_cache, c.k_scale, 1), c.reference(1, {1000, 3, 200})[2]), 3e-6);
}

TEST(AttnIn, SaturatesWhatDoesNotFitTheCacheInsteadOfWritingNaN) {
  AttnInCase c(DType::kBF16, DType::kE4M3);
  for (TensorView* scale : {&c.k_scale, &c.v_scale})
    for (int64_t i = 0; i < c.nkv; ++i) Bed::set(*scale, i, 1e-5f);
  c.run(0, 3);
  float largest = 0;
  for (int64_t index = 0; index < 3; ++index)
    for (const float value : c.cached(c.value_cache, c.v_scale, index)) {
      ASSERT_TRUE(std::isfinite(value));
      largest = std::max(largest, std::abs(value));
    }
  EXPECT_FLOAT_EQ(largest, kE4M3Max * 1e-5f);
}

TEST(AttnIn, GivesARowTheSameBitsAloneInABatchAndOnAnyThreads) {
  AttnInCase whole(DType::kBF16, DType::kBF16, 1);
  whole.run(0, 140);
  for (const int threads : {1, 2, 3}) {
    AttnInCase c(DType::kBF16, DType::kBF16, threads);
    std::string query, gate;
    int64_t first = 0;
    for (const int64_t n : {1, 2, 64, 1, 72}) {
      c.run(first, n);
      first += n;
      query += Bed::bytes(c.query);
      gate += Bed::bytes(c.gate);
    }
    EXPECT_EQ(query, Bed::bytes(whole.query));
    EXPECT_EQ(gate, Bed::bytes(whole.gate));
    EXPECT_EQ(Bed::bytes(c.key_cache), Bed::bytes(whole.key_cache));
    EXPECT_EQ(Bed::bytes(c.value_cache), Bed::bytes(whole.value_cache));
  }
}

struct AttentionCase {
  int64_t nq, nkv = 2, d, length, slot = 1;
  Bed bed;
  Random random{61};
  Attention::Problem problem;
  SlotTables slots;
  TensorView query, gate;  // [length, nq, d]
  KvCacheView kv;

  /// `real`: heads of the model's size, six to a kv head. Else an uneven shard of small ones: two heads of one kv head, three of the next.
  AttentionCase(DType activation, DType kv_dtype, int threads = 2, bool real = false, int64_t num_tokens = 1101)
      : nq(real ? 12 : 5), d(real ? 256 : 32), length(num_tokens), bed(threads), slots(make_slots(bed, 2, 0, (num_tokens + 63) / 64)) {
    problem = {nq, nkv, d, {0, 0, 1, 1, 1}, activation, kv_dtype};
    if (real) problem.kv_head = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
    query = bed.tensor(activation, {length, nq, d}, random.normals(length * nq * d, 2.0f));
    gate = bed.tensor(activation, {length, nq, d}, random.normals(length * nq * d));
    kv.k = bed.tensor(kv_dtype, {2 * ((length + 63) / 64), nkv, 64, d});
    kv.v = bed.tensor(kv_dtype, {2 * ((length + 63) / 64), nkv, 64, d});
    kv.k_scale = bed.tensor(DType::kF32, {nkv}, std::vector<float>{0.5f, 2.0f});
    kv.v_scale = bed.tensor(DType::kF32, {nkv}, std::vector<float>{0.25f, 0.125f});
    for (int64_t index = 0; index < length; ++index)
      for (int64_t head = 0; head < nkv; ++head)
        for (int64_t i = 0; i < d; ++i) {
          Bed::set(kv.k, kv_offset(slots, slot, index, head, nkv, d) + i, random.normal());
          Bed::set(kv.v, kv_offset(slots, slot, index, head, nkv, d) + i, random.normal());
        }
  }
  /// Makes keys and values of an index NaN, or from `index` on: a row before it must not read them.
  void poison(int64_t index) {
    for (int64_t head = 0; head < nkv; ++head)
      for (int64_t i = 0; i < d; ++i)
        for (const TensorView& cache : {kv.k, kv.v}) Bed::set(cache, kv_offset(slots, slot, index, head, nkv, d) + i, std::nanf(""));
  }
  void poison_from(int64_t index) {
    for (; index < length; ++index) poison(index);
  }
  TensorView run(int64_t first, int64_t n, int32_t first_index = 0, RowKind kind = RowKind::kDecode) {
    slots.cursor.data<int32_t>()[slot] = static_cast<int32_t>(first);
    const auto kernel = make_kernel<Attention>(bed, problem);
    const Step step(bed, {{static_cast<int32_t>(slot), 0, static_cast<int32_t>(n), kind, true}}, slots);
    const TensorView out = bed.tensor(problem.activation, {n, nq * d});
    Launch launch = bed.launch(*kernel, n);
    kernel->enqueue(step.rows, rows(query, first, n), rows(gate, first, n), kv, first_index, {ActivationLayout::kPlain, out, {}}, launch);
    return out;
  }
  static TensorView rows(TensorView view, int64_t first, int64_t n) {
    view.offset_bytes = view.at(first).offset_bytes;
    return view.first(n);
  }
  Vector reference(int64_t index, int64_t first_index = 0) {
    Vector out;
    for (int64_t head = 0; head < nq; ++head) {
      const int64_t kv_head = problem.kv_head[static_cast<size_t>(head)];
      const bool scaled = problem.kv == DType::kE4M3;
      const double k_scale = scaled ? Bed::get(kv.k_scale, kv_head) : 1.0, v_scale = scaled ? Bed::get(kv.v_scale, kv_head) : 1.0;
      Vector scores, o(static_cast<size_t>(d), 0.0);
      double max = -1e300, sum = 0;
      for (int64_t j = first_index; j <= index; ++j) {
        double score = 0;
        for (int64_t i = 0; i < d; ++i)
          score += Bed::get(query, (index * nq + head) * d + i) * k_scale * Bed::get(kv.k, kv_offset(slots, slot, j, kv_head, nkv, d) + i);
        scores.push_back(score / std::sqrt(static_cast<double>(d)));
        max = std::max(max, scores.back());
      }
      for (int64_t j = first_index; j <= index; ++j) {
        const double weight = std::exp(scores[static_cast<size_t>(j - first_index)] - max);
        sum += weight;
        for (int64_t i = 0; i < d; ++i)
          o[static_cast<size_t>(i)] += weight * v_scale * Bed::get(kv.v, kv_offset(slots, slot, j, kv_head, nkv, d) + i);
      }
      for (int64_t i = 0; i < d; ++i) out.push_back(o[static_cast<size_t>(i)] / sum * sigmoid(Bed::get(gate, (index * nq + head) * d + i)));
    }
    return out;
  }
};

TEST(Attention, IsTheGatedSoftmaxOverAllEarlierKeysAtEveryLength) {
  for (const auto& [activation, kv] :
       {std::pair{DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kF32, DType::kE4M3}, {DType::kBF16, DType::kE4M3}})
    for (const int64_t length : kAttentionLengths) {
      AttentionCase c(activation, kv);
      c.poison_from(length);
      // f32: dots of 32 and sums of positive weights; bf16: output and gate are rounded, three times 2^-9 / sqrt(3).
      EXPECT_LT(relative_rms(Bed::values(c.run(length - 1, 1)), c.reference(length - 1)), activation == DType::kF32 ? 3e-6 : 6e-3)
          << dtype_name(activation) << " with " << dtype_name(kv) << " cache, " << length << " keys";
    }
}

TEST(Attention, GivesARowTheSameBitsAloneInAPromptAndOnAnyThreads) {
  AttentionCase whole(DType::kBF16, DType::kBF16, 1);
  const std::string expected = Bed::bytes(whole.run(480, 200));
  for (const int threads : {1, 3}) {
    AttentionCase c(DType::kBF16, DType::kBF16, threads);
    std::string pieces, alone;
    for (const auto& [first, n] : {std::pair{480, 32}, {512, 64}, {576, 1}, {577, 103}}) pieces += Bed::bytes(c.run(first, n));
    EXPECT_EQ(pieces, expected) << threads;
    for (int64_t row = 480; row < 680; ++row) alone += Bed::bytes(c.run(row, 1));
    EXPECT_EQ(alone, expected) << threads;
  }
}

TEST(Attention, OfTheModelsHeadsStaysNearTheSoftmaxForRowsOfBothKinds) {
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt})
      for (const auto& [first, n, first_index] : {std::tuple{int64_t{0}, int64_t{1}, 0}, {0, 5, 0}, {1, 3, 1}, {60, 9, 0}, {510, 4, 0}, {700, 1, 1}, {1000, 100, 0}}) {
        if (few_launches() && first != 60 && first != (kind == RowKind::kDecode ? 700 : 1000)) continue;  // over a block; two splits behind an empty slot, tiles of a prompt
        SCOPED_TRACE(fmt::format("{} cache, {} rows {} to {}", dtype_name(kv), kind == RowKind::kPrompt ? "prompt" : "decode", first, first + n));
        AttentionCase c(DType::kBF16, kv, 2, true);
        c.poison_from(first + n);
        if (first_index == 1) c.poison(0);
        const std::vector<float> out = Bed::values(c.run(first, n, first_index, kind));
        for (int64_t row = 0; row < n; row += std::max<int64_t>(1, n / 3)) {
          const std::span<const float> actual(out.data() + row * c.nq * c.d, static_cast<size_t>(c.nq * c.d));
          // Weights may be rounded to bf16 beside output and gate: four times 2^-9 / sqrt(3).
          EXPECT_LT(relative_rms(actual, c.reference(first + row, first_index)), 6e-3) << row;
        }
      }
}

TEST(Attention, OfTheModelsHeadsGivesARowTheSameBitsHoweverRowsOfItsKindAreCut) {
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt}) {
      SCOPED_TRACE(fmt::format("{} cache, {} rows", dtype_name(kv), kind == RowKind::kPrompt ? "prompt" : "decode"));
      AttentionCase c(DType::kBF16, kv, 2, true);
      const std::string expected = Bed::bytes(c.run(448, 200, 0, kind));
      for (const auto& pieces : {std::vector<int64_t>{64, 136}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 155}, {128, 1, 71}}) {
        std::string bytes;
        int64_t first = 448;
        for (const int64_t n : pieces) {
          bytes += Bed::bytes(c.run(first, n, 0, kind));
          first += n;
        }
        EXPECT_EQ(bytes, expected) << pieces.size() << " pieces";
      }
    }
}

TEST(Attention, OfTheModelsHeadsGivesARowTheSameBitsHoweverManySequencesDecode) {
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const auto& [first, n] : {std::pair{int64_t{63}, int64_t{1}}, {64, 1}, {1023, 2}, {1097, 4}}) {
      AttentionCase c(DType::kBF16, kv, 2, true);
      c.poison_from(first + n);
      const std::string alone = Bed::bytes(c.run(first, n));
      const auto kernel = make_kernel<Attention>(c.bed, c.problem);
      const bool fast = candidate_under_test().starts_with("cuda.") && !candidate_under_test().ends_with("plain");
      for (const int64_t num_runs : {2, 9, 30, 150, 400, 700}) {  // all of them the same rows
        if (num_runs * n > 160 && !fast) continue;  // plain kernels take long
        if (num_runs > 150 && first < 1000) continue;
        std::vector<RowRun> runs;
        std::vector<float> query, gate;
        for (int64_t run = 0; run < num_runs; ++run) {
          runs.push_back({static_cast<int32_t>(c.slot), static_cast<int32_t>(run * n), static_cast<int32_t>(n), RowKind::kDecode, true});
          for (const auto& [from, to] : {std::pair{c.query, &query}, {c.gate, &gate}})
            for (const float value : Bed::values(AttentionCase::rows(from, first, n))) to->push_back(value);
        }
        const Step step(c.bed, runs, c.slots);
        const Shape shape{num_runs * n, c.nq, c.d};
        const TensorView out = c.bed.tensor(DType::kBF16, {num_runs * n, c.nq * c.d});
        Launch launch = c.bed.launch(*kernel, num_runs * n);
        kernel->enqueue(step.rows, c.bed.tensor(DType::kBF16, shape, query), c.bed.tensor(DType::kBF16, shape, gate), c.kv, 0,
                        {ActivationLayout::kPlain, out, {}}, launch);
        const std::string bytes = Bed::bytes(out);
        for (int64_t run = 0; run < num_runs; ++run)
          EXPECT_EQ(bytes.substr(static_cast<size_t>(run) * alone.size(), alone.size()), alone)
              << num_runs << " runs of " << n << " rows at " << first << ", number " << run;
      }
    }
}

/// Where many sequences decode, kernels share out their keys evenly: what is whole for one block or cut between two or more of them depends on the lengths of all.
TEST(Attention, OfTheModelsHeadsGivesARowTheSameBitsBesideSequencesOfOtherLengths) {
  const bool fast = candidate_under_test().starts_with("cuda.") && !candidate_under_test().ends_with("plain");
  const std::vector<int64_t> lengths = {5, 63, 64, 512, 1100, 1500, 2047, 4096, 4101};
  struct Many {
    int64_t num_runs;
    std::vector<size_t> lengths;  // of the sequences, over and over
  };
  const Many cases[] = {{2, {3, 4}}, {80, {4, 6, 5, 5, 4}}, {300, {3, 5, 3, 6, 4}}, {80, {0, 1, 2, 3, 1}}, {90, {7, 0, 4, 2, 0}}, {150, {8, 2, 7}}, {500, {8, 7, 8, 0, 8}}};
  for (const DType kv : {DType::kBF16, DType::kE4M3}) {
    AttentionCase c(DType::kBF16, kv, 2, true, few_launches() ? 513 : 4102);
    const auto kernel = make_kernel<Attention>(c.bed, c.problem);
    // The sequences have the same keys, and each its own length.
    SlotTables slots = make_slots(c.bed, 11, 0, c.slots.block_tables.shape[1]);
    std::vector<std::string> alone;
    std::vector<std::vector<float>> queries, gates;
    for (size_t i = 0; i < lengths.size() && lengths[i] < c.length; ++i) {
      const int64_t stride = slots.block_tables.shape[1];
      std::copy_n(c.slots.block_tables.data<int32_t>() + c.slot * stride, stride, slots.block_tables.data<int32_t>() + static_cast<int64_t>(i) * stride);
      slots.cursor.data<int32_t>()[i] = static_cast<int32_t>(lengths[i]);
      if (fast || lengths[i] == lengths[3] || lengths[i] == lengths[4]) alone.push_back(Bed::bytes(c.run(lengths[i], 1)));
      else alone.emplace_back();
      queries.push_back(Bed::values(AttentionCase::rows(c.query, lengths[i], 1)));
      gates.push_back(Bed::values(AttentionCase::rows(c.gate, lengths[i], 1)));
    }
    for (const auto& [num_runs, of] : cases) {
      if (num_runs > 2 && !fast) continue;  // plain kernels take long
      if (std::ranges::any_of(of, [&](size_t i) { return i >= alone.size(); })) continue;  // with few launches: one case, of many sequences that share blocks
      std::vector<RowRun> runs;
      std::vector<float> query, gate;
      for (int64_t run = 0; run < num_runs; ++run) {
        const size_t i = of[static_cast<size_t>(run) % of.size()];
        runs.push_back({static_cast<int32_t>(i), static_cast<int32_t>(run), 1, RowKind::kDecode, true});
        query.insert(query.end(), queries[i].begin(), queries[i].end());
        gate.insert(gate.end(), gates[i].begin(), gates[i].end());
      }
      const Step step(c.bed, runs, slots);
      const Shape shape{num_runs, c.nq, c.d};
      const TensorView many_queries = c.bed.tensor(DType::kBF16, shape, query), many_gates = c.bed.tensor(DType::kBF16, shape, gate), out = c.bed.tensor(DType::kBF16, {num_runs, c.nq * c.d});
      Launch launch = c.bed.launch(*kernel, num_runs);
      for (int again = 0; again < 2; ++again) {  // what blocks tell each other is forgotten in between
        kernel->enqueue(step.rows, many_queries, many_gates, c.kv, 0, {ActivationLayout::kPlain, out, {}}, launch);
        const std::string bytes = Bed::bytes(out);
        for (int64_t run = 0; run < num_runs; ++run) {
          const std::string& expected = alone[of[static_cast<size_t>(run) % of.size()]];
          EXPECT_TRUE(bytes.compare(static_cast<size_t>(run) * expected.size(), expected.size(), expected) == 0) << num_runs << " runs, number " << run;
        }
      }
    }
  }
}

/// Kernels may finish rows of few parts of 512 keys otherwise than those of many: rows on both sides of such a bound.
TEST(Attention, OfTheModelsHeadsGivesARowTheSameBitsAloneAndInAVerifyAtLongContexts) {
  AttentionCase c(DType::kBF16, DType::kBF16, 2, true, 4102);
  for (const int64_t first : few_launches() ? std::vector<int64_t>{4094} : std::vector<int64_t>{511, 1022, 2046, 4088, 4093, 4095, 4096}) {
    const int64_t n = 4;
    const std::string together = Bed::bytes(c.run(first, n));
    std::string alone;
    for (int64_t row = 0; row < n; ++row) alone += Bed::bytes(c.run(first + row, 1));
    EXPECT_EQ(together, alone) << "rows from " << first << " on";
  }
}

/// A fault shows, of a key in every element of a row, of a value in its own: kernels that widen codes by their bits alone would make numbers of them.
TEST(Attention, OnNvidiaGpusPassesOnWhatIsNoNumber) {
  if (platform_under_test() != "cuda") GTEST_SKIP() << "about kernels of CUDA";
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt})
      for (const int64_t index : {3, 40}) {
        SCOPED_TRACE(fmt::format("{} cache, {} rows, key {}", dtype_name(kv), kind == RowKind::kPrompt ? "prompt" : "decode", index));
        AttentionCase c(DType::kBF16, kv, 2, true);
        for (const bool keys : {true, false}) {
          const TensorView& cache = keys ? c.kv.k : c.kv.v;
          const int64_t at = kv_offset(c.slots, c.slot, index, 1, c.nkv, c.d) + 77;
          const float before = Bed::get(cache, at);
          Bed::set(cache, at, std::nanf(""));
          const std::vector<float> out = Bed::values(c.run(60, 8, 0, kind));
          Bed::set(cache, at, before);
          for (int64_t row = 0; row < 8; ++row)
            for (int64_t head = 0; head < c.nq; ++head)
              for (const int64_t i : {int64_t{0}, int64_t{77}, int64_t{200}})
                EXPECT_EQ(std::isnan(out[static_cast<size_t>((row * c.nq + head) * c.d + i)]), head >= 6 && (keys || i == 77)) << (keys ? "key, " : "value, ") << row << " " << head << " " << i;
        }
      }
}

TEST(Attention, OfTheModelsHeadsReadsNothingForRowsOfPadding) {
  for (const DType kv : {DType::kBF16, DType::kE4M3})
    for (const auto& [first, n, first_index] : {std::tuple{int64_t{510}, int64_t{2}, 0}, {63, 1, 0}, {1022, 3, 1}, {700, 0, 0}}) {
      SCOPED_TRACE(fmt::format("{} cache, {} of 4 rows at {}", dtype_name(kv), n, first));
      AttentionCase c(DType::kBF16, kv, 2, true);
      c.poison_from(first + n);
      if (first_index == 1) c.poison(0);
      const std::string expected = n > 0 ? Bed::bytes(c.run(first, n, first_index)) : std::string();
      c.slots.cursor.data<int32_t>()[c.slot] = static_cast<int32_t>(first);
      const auto kernel = make_kernel<Attention>(c.bed, c.problem);
      const Step step(c.bed, {{static_cast<int32_t>(c.slot), 0, 4, RowKind::kDecode, true}}, c.slots);
      for (int64_t row = n; row < 4; ++row) step.rows.indices.data<int32_t>()[row] = -1;
      const TensorView out = c.bed.tensor(DType::kBF16, {4, c.nq * c.d});
      Launch launch = c.bed.launch(*kernel, 4);
      kernel->enqueue(step.rows, AttentionCase::rows(c.query, first, 4), AttentionCase::rows(c.gate, first, 4), c.kv, first_index, {ActivationLayout::kPlain, out, {}}, launch);
      EXPECT_EQ(Bed::bytes(out).substr(0, expected.size()), expected);
    }
}

TEST(Attention, LeavesOutTheEmptySlotZeroOfTheMtpLayer) {
  AttentionCase c(DType::kF32, DType::kF32);
  c.poison(0);
  for (const int64_t index : {1, 2, 600}) EXPECT_LT(relative_rms(Bed::values(c.run(index, 1, 1)), c.reference(index, 1)), 3e-6) << index;
}

TEST(Attention, HalvesTheOutputWhereTheGateIsZero) {
  AttentionCase c(DType::kF32, DType::kF32);
  for (int64_t i = 0; i < c.gate.shape.num_elements(); ++i) Bed::set(c.gate, i, 100.0f);
  const std::vector<float> open = Bed::values(c.run(30, 4));
  for (int64_t i = 0; i < c.gate.shape.num_elements(); ++i) Bed::set(c.gate, i, 0.0f);
  const std::vector<float> half = Bed::values(c.run(30, 4));
  for (size_t i = 0; i < open.size(); ++i) EXPECT_EQ(half[i], open[i] * 0.5f);
}

TEST(Attention, SurvivesScoresThatOverflowAPlainExponential) {
  AttentionCase c(DType::kF32, DType::kF32);
  for (int64_t i = 0; i < c.query.shape.num_elements(); ++i) Bed::set(c.query, i, Bed::get(c.query, i) * 500.0f);
  EXPECT_LT(relative_rms(Bed::values(c.run(1000, 1)), c.reference(1000)), 1e-3);  // scores near 10^4: their own f32 rounding shows
}

}  // namespace
}  // namespace quern::ops::testing
