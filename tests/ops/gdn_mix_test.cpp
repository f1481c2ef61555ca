#include <bit>
#include <cstring>
#include <limits>
#include <numeric>

#include "ops/bed.h"
#include "ops/cases.h"
#include "ops/reference.h"

namespace quern::ops::testing {
namespace {

constexpr int64_t kMaxDrafts = 4, kSlots = 3;

/// Inputs of one sequence's layer, the weights, and a device whose slots hold NaN but for a cleared state.
class GdnBed {
 public:
  GdnBed(const GdnExtent& extent, DType activation, DType ring, int threads = 2, int64_t max_length = 220, int64_t num_slots = kSlots)
      : extent_(extent), activation_(activation), bed_(threads) {
    problem_.num_k_heads = extent.nk;
    problem_.num_v_heads = extent.nv;
    problem_.d_k = extent.dk;
    problem_.d_v = extent.dv;
    problem_.k_head.assign(extent.k_head.begin(), extent.k_head.begin() + extent.nv);
    problem_.k_max = kMaxDrafts;
    problem_.activation = activation;
    problem_.ring = ring;
    channels_ = 2 * extent.nk * extent.dk + extent.nv * extent.dv;
    Random random(71);
    conv1d_ = bed_.tensor(DType::kBF16, {channels_, 4}, random.normals(channels_ * 4, 0.5f));
    std::vector<float> a_log, dt_bias, norm;
    for (int64_t i = 0; i < extent.nv; ++i) {
      a_log.push_back(std::log(0.01f + 0.3f * static_cast<float>(random.uniform())));  // as observed at 27B
      dt_bias.push_back(random.normal());
    }
    for (int64_t i = 0; i < extent.dv; ++i) norm.push_back(0.87f + 0.1f * random.normal());
    a_log_ = bed_.tensor(DType::kBF16, {extent.nv}, a_log);
    dt_bias_ = bed_.tensor(DType::kF32, {extent.nv}, rounded(dt_bias));
    norm_ = bed_.tensor(DType::kF32, {extent.dv}, rounded(norm));
    qkv_ = bed_.tensor(activation, {max_length, channels_}, random.normals(max_length * channels_));
    z_ = bed_.tensor(activation, {max_length, extent.nv * extent.dv}, random.normals(max_length * extent.nv * extent.dv));
    b_ = bed_.tensor(activation, {max_length, extent.nv}, random.normals(max_length * extent.nv));
    a_ = bed_.tensor(activation, {max_length, extent.nv}, random.normals(max_length * extent.nv, 2.0f));
    kernel_ = make_kernel<GdnMix>(bed_, problem_);
    packed_ = &bed_.packed(*kernel_);
    kernel_->pack({conv1d_, a_log_, dt_bias_, norm_}, *packed_, bed_.stream());

    slots_ = make_slots(bed_, num_slots, kMaxDrafts, 1);
    const int64_t ring_length = 64 + kMaxDrafts + 1, window = 3 + kMaxDrafts + 1;
    state_.state = bed_.tensor(DType::kF32, {num_slots, extent.nv, extent.dv, extent.dk});
    state_.ring_k = bed_.tensor(ring_dtype(), {num_slots, ring_length, extent.nk, extent.dk});
    state_.ring_u = bed_.tensor(ring_dtype(), {num_slots, ring_length, extent.nv, extent.dv});
    state_.ring_g = bed_.tensor(DType::kF32, {num_slots, ring_length, extent.nv});
    state_.conv_window = bed_.tensor(activation, {num_slots, window, channels_});
    state_.boundary_columns = bed_.tensor(activation, {num_slots, 3, channels_});
    clear(0);
  }

  /// What state_copy and the worker do for a new sequence: the state is cleared, nothing else.
  void clear(int64_t slot) {
    bed_.stream().fill_zero(state_.state.at(slot));
    slots_.cursor.data<int32_t>()[slot] = slots_.boundary.data<int32_t>()[slot] = 0;
  }

  /// Rows of tokens [first, first + rows) of the sequence as one run, `draft` of them possibly fed with other values than the sequence's:
  /// row i uses the inputs of token `source[i]`. Returns the output's bytes.
  std::string enqueue(int64_t slot, const std::vector<int64_t>& source, RowKind kind, bool committed) {
    const Bed::Temporaries temporaries(bed_);
    const auto rows = static_cast<int64_t>(source.size());
    const GdnInputs in{gather(qkv_, source), gather(z_, source), gather(b_, source), gather(a_, source)};
    const TensorView out = bed_.tensor(activation_, {rows, extent_.nv * extent_.dv});
    const Step step(bed_, {{static_cast<int32_t>(slot), 0, static_cast<int32_t>(rows), kind, committed}}, slots_);
    Launch launch = bed_.launch(*kernel_, rows);
    kernel_->enqueue(step.rows, in, *packed_, state_, {ActivationLayout::kPlain, out, {}}, launch);
    return Bed::bytes(out);
  }
  /// Committed rows of several slots in one step: the next `rows` of each. Their outputs, one after the other.
  std::vector<std::string> feed_together(const std::vector<std::pair<int64_t, int64_t>>& slot_and_rows, RowKind kind = RowKind::kPrompt) {
    std::vector<RowRun> runs;
    for (const auto& [slot, rows] : slot_and_rows) runs.push_back({static_cast<int32_t>(slot), 0, static_cast<int32_t>(rows), kind, true});
    return feed_runs(std::move(runs));
  }
  /// The same of runs of any kind, with padding among them; where their rows stand is filled in.
  std::vector<std::string> feed_runs(std::vector<RowRun> runs) {
    std::vector<int64_t> source;
    for (RowRun& run : runs) {
      run.first_row = static_cast<int32_t>(source.size());
      for (int64_t i = 0; i < run.num_rows; ++i) source.push_back(cursor(run.slot) + i);
    }
    const Bed::Temporaries temporaries(bed_);
    const GdnInputs in{gather(qkv_, source), gather(z_, source), gather(b_, source), gather(a_, source)};
    const TensorView out = bed_.tensor(activation_, {std::ssize(source), extent_.nv * extent_.dv});
    const Step step(bed_, runs, slots_);
    Launch launch = bed_.launch(*kernel_, std::ssize(source));
    kernel_->enqueue(step.rows, in, *packed_, state_, {ActivationLayout::kPlain, out, {}}, launch);
    const std::string bytes = Bed::bytes(out);
    const size_t row_bytes = bytes.size() / source.size();
    std::vector<std::string> outputs;
    for (const RowRun& run : runs) {
      outputs.push_back(bytes.substr(static_cast<size_t>(run.first_row) * row_bytes, static_cast<size_t>(run.num_rows) * row_bytes));
      if (run.num_rows > 0) advance(run.slot, run.num_rows, run.num_rows, true);
    }
    return outputs;
  }
  /// What `sample` does at the end of a step.
  void advance(int64_t slot, int64_t rows, int64_t accepted, bool committed) {
    int32_t& cursor = slots_.cursor.data<int32_t>()[slot];
    slots_.boundary.data<int32_t>()[slot] = static_cast<int32_t>((committed ? cursor + rows : cursor) / 64 * 64);
    cursor += static_cast<int32_t>(accepted);
  }
  /// Committed rows of tokens [cursor, cursor + rows).
  std::string feed(int64_t slot, int64_t rows, RowKind kind) {
    std::string out = enqueue(slot, range(cursor(slot), rows), kind, true);
    advance(slot, rows, rows, true);
    return out;
  }
  std::string feed_all(int64_t slot, int64_t length, int64_t chunk, RowKind kind) {
    std::string out;
    while (cursor(slot) < length) out += feed(slot, std::min(chunk, length - cursor(slot)), kind);
    return out;
  }
  /// A verify of [next token, drafts...], of which `accepted` rows prove right; the other drafts are other tokens' inputs.
  std::string verify(int64_t slot, int64_t drafts, int64_t accepted) {
    std::vector<int64_t> source = range(cursor(slot), drafts + 1);
    for (int64_t i = accepted; i <= drafts; ++i) source[static_cast<size_t>(i)] = 219 - i;
    const std::string out = enqueue(slot, source, RowKind::kDecode, false);
    advance(slot, drafts + 1, accepted, false);
    return out.substr(0, static_cast<size_t>(accepted * extent_.nv * extent_.dv) * dtype_size(activation_));
  }
  static std::vector<int64_t> range(int64_t first, int64_t n) {
    std::vector<int64_t> result;
    for (int64_t i = 0; i < n; ++i) result.push_back(first + i);
    return result;
  }
  int64_t cursor(int64_t slot) const { return slots_.cursor.data<int32_t>()[slot]; }
  int64_t boundary(int64_t slot) const { return slots_.boundary.data<int32_t>()[slot]; }

  /// Everything that later rows may read of a slot: state, ring rows since the boundary, the three columns before cursor and boundary.
  std::string live_state(int64_t slot) {
    std::string bytes = Bed::bytes(state_.state.at(slot));
    for (int64_t index = boundary(slot); index < cursor(slot); ++index)
      for (const TensorView* ring : {&state_.ring_k, &state_.ring_u, &state_.ring_g})
        bytes += Bed::bytes(ring->at(slot).at(index % ring->shape[1]));
    for (int64_t index = std::max<int64_t>(0, cursor(slot) - 3); index < cursor(slot); ++index)
      bytes += Bed::bytes(state_.conv_window.at(slot).at(index % state_.conv_window.shape[1]));
    if (boundary(slot) > 0) bytes += Bed::bytes(state_.boundary_columns.at(slot));
    return bytes;
  }

  /// The recurrence in double precision over the first `length` tokens; the outputs of all of them.
  Vector reference(int64_t length, Vector* state = nullptr) {
    GdnReference reference{static_cast<size_t>(extent_.nk),
                           static_cast<size_t>(extent_.nv),
                           static_cast<size_t>(extent_.dk),
                           static_cast<size_t>(extent_.dv),
                           {problem_.k_head.begin(), problem_.k_head.end()},
                           Bed::doubles(conv1d_),
                           Bed::doubles(a_log_),
                           Bed::doubles(dt_bias_),
                           Bed::doubles(norm_)};
    Vector out;
    for (int64_t i = 0; i < length; ++i)
      for (const double y :
           reference.next(Bed::doubles(qkv_.at(i)), Bed::doubles(z_.at(i)), Bed::doubles(b_.at(i)), Bed::doubles(a_.at(i))))
        out.push_back(y);
    if (state != nullptr) *state = reference.state;
    return out;
  }
  /// The stored state transposed to the reference's [nv, dk, dv].
  std::vector<float> stored_state(int64_t slot) {
    std::vector<float> s = Bed::values(state_.state.at(slot));
    from_layout(kernel_->state_layout(), s, extent_.dv * extent_.dk);
    std::vector<float> result(s.size());
    for (int64_t h = 0; h < extent_.nv; ++h)
      for (int64_t c = 0; c < extent_.dv; ++c)
        for (int64_t i = 0; i < extent_.dk; ++i)
          result[static_cast<size_t>((h * extent_.dk + i) * extent_.dv + c)] =
              s[static_cast<size_t>((h * extent_.dv + c) * extent_.dk + i)];
    return result;
  }
  std::vector<float> floats(const std::string& bytes) {
    const TensorView view = bed_.tensor(activation_, {static_cast<int64_t>(bytes.size() / dtype_size(activation_))});
    std::memcpy(view.data<std::byte>(), bytes.data(), bytes.size());
    return Bed::values(view);
  }
  GdnStateView& state() { return state_; }

 private:
  [[nodiscard]] DType ring_dtype() const { return problem_.ring; }
  static std::vector<float> rounded(std::vector<float> x) {
    for (float& value : x) value = round_bf16(value);
    return x;
  }
  TensorView gather(const TensorView& all, const std::vector<int64_t>& source) {
    // As in a workspace, the memory of a tensor ends with a word: a kernel may read that in which the last value lies.
    TensorView out = bed_.tensor(all.dtype, {(std::ssize(source) * all.shape[1] + 1) / 2 * 2});
    out.shape = {std::ssize(source), all.shape[1]};
    for (size_t i = 0; i < source.size(); ++i)
      std::memcpy(out.at(static_cast<int64_t>(i)).data<std::byte>(), all.at(source[i]).data<std::byte>(), all.at(source[i]).size_bytes());
    return out;
  }

  GdnExtent extent_;
  DType activation_;
  Bed bed_;
  GdnMix::Problem problem_;
  int64_t channels_ = 0;
  TensorView conv1d_, a_log_, dt_bias_, norm_, qkv_, z_, b_, a_;
  std::unique_ptr<GdnMix::Kernel> kernel_;
  Buffer* packed_ = nullptr;
  SlotTables slots_;
  GdnStateView state_;
};

TEST(GdnStateLayout, HalvesLoseNothingAndTheUpperOnesAreTheNearestBf16) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto with_bits = [](uint32_t bits) { return std::bit_cast<float>(bits); };
  std::vector<float> values = {0.0f, -0.0f, 1.0f, -1.0f, kInfinity, -kInfinity, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(),
                               // Halfway between two bf16, on either side of it, and where rounding up takes the next exponent.
                               with_bits(0x3f808000), with_bits(0x3f807fff), with_bits(0xbf818000), with_bits(0xbf818001), with_bits(0x3fffffff)};
  Random random(5);
  while (values.size() < 192) values.push_back(random.normal() * std::exp2(static_cast<float>(values.size() % 40) - 30));
  const std::vector<float> before = values;
  constexpr int64_t kHead = 64;
  to_layout(GdnStateLayout::kHalves, values, kHead);
  for (size_t i = 0; i < before.size(); ++i) {
    uint16_t upper;
    std::memcpy(&upper, reinterpret_cast<const std::byte*>(values.data() + i / kHead * kHead) + 2 * (i % kHead), sizeof upper);
    const float rounded = std::bit_cast<float>(uint32_t{upper} << 16);
    if (std::isinf(before[i])) EXPECT_EQ(rounded, before[i]);
    else EXPECT_LE(std::abs(rounded - before[i]), std::abs(before[i] - round_bf16(before[i]))) << before[i];
  }
  from_layout(GdnStateLayout::kHalves, values, kHead);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(before[i]));

  std::vector<float> none = {kNaN, -kNaN, with_bits(0x7fffffff), with_bits(0xffffffff)};  // the last but one is what NVIDIA's units make
  to_layout(GdnStateLayout::kHalves, none, 2);
  for (const size_t head : {0, 1}) {
    uint16_t upper[2];
    std::memcpy(upper, none.data() + 2 * head, sizeof upper);
    for (const uint16_t half : upper) EXPECT_TRUE(std::isnan(std::bit_cast<float>(uint32_t{half} << 16))) << half;
  }
  from_layout(GdnStateLayout::kHalves, none, 2);
  for (const float value : none) EXPECT_TRUE(std::isnan(value));

  values = before;
  to_layout(GdnStateLayout::kF32, values, kHead);
  EXPECT_EQ(std::memcmp(values.data(), before.data(), before.size() * sizeof(float)), 0);
}

TEST(GdnMix, EqualsTheRecurrenceForEveryHeadMapAndLength) {
  for (const GdnExtent& extent : kGdnExtents)
    for (const int64_t length : kGdnLengths) {
      GdnBed bed(extent, DType::kF32, DType::kF32);
      Vector state;
      const Vector expected = bed.reference(length, &state);
      const std::vector<float> out = bed.floats(bed.feed_all(0, length, length, RowKind::kPrompt));
      // Sums of up to 64 + d_k products in f32, decays below one: errors do not grow along the sequence.
      EXPECT_LT(relative_rms(out, expected), 5e-6) << extent.nk << "/" << extent.nv << ", length " << length;
      EXPECT_EQ(bed.boundary(0), length / 64 * 64);
      if (length % 64 == 0) {
        EXPECT_LT(relative_rms(bed.stored_state(0), state), 5e-6) << "state at length " << length;
      }
    }
}

TEST(GdnMix, StaysNearTheRecurrenceInBf16WithARingInEitherDtype) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    GdnBed bed(kGdnExtents[0], DType::kBF16, ring);
    const Vector expected = bed.reference(200);
    // y, beta and the output are rounded to bf16 (2^-9 relative at most each), k and u too where the ring is.
    EXPECT_LT(relative_rms(bed.floats(bed.feed_all(0, 200, 64, RowKind::kPrompt)), expected), 1e-2) << dtype_name(ring);
  }
}

TEST(GdnMix, GivesTheSameBitsForEveryCutKindAndNumberOfThreads) {
  for (const DType ring : {DType::kF32, DType::kBF16})
    for (const GdnExtent& extent : kGdnExtents) {
      GdnBed whole(extent, DType::kBF16, ring);
      const std::string expected = whole.feed_all(0, 200, 200, RowKind::kPrompt), state = whole.live_state(0);
      for (const auto& [chunk, kind] : {std::pair{int64_t{64}, RowKind::kPrompt},
                                        {1, RowKind::kDecode},
                                        {7, RowKind::kDecode},
                                        {64, RowKind::kDecode},
                                        {199, RowKind::kPrompt}})
        for (const int threads : {1, 3}) {
          GdnBed bed(extent, DType::kBF16, ring, threads);
          EXPECT_EQ(bed.feed_all(0, 200, chunk, kind), expected) << "rows at a time: " << chunk << ", threads: " << threads;
          EXPECT_EQ(bed.live_state(0), state) << "rows at a time: " << chunk << ", threads: " << threads;
        }
    }
}

TEST(GdnMix, RollsBackToWhatWasAcceptedAlsoAcrossABoundary) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    GdnBed plain(kGdnExtents[0], DType::kBF16, ring);
    const std::string expected = plain.feed_all(0, 210, 1, RowKind::kDecode);
    for (const int64_t prompt : {1, 5, 59, 60, 61, 62, 63, 64, 65, 126})
      for (int64_t accepted = 1; accepted <= kMaxDrafts + 1; ++accepted) {
        SCOPED_TRACE(fmt::format("prompt {}, {} of {} rows accepted", prompt, accepted, kMaxDrafts + 1));
        GdnBed bed(kGdnExtents[0], DType::kBF16, ring);
        std::string out = bed.feed_all(0, prompt, prompt, RowKind::kPrompt);
        out += bed.verify(0, kMaxDrafts, accepted);
        EXPECT_EQ(bed.boundary(0), prompt / 64 * 64) << "a verify stores no fold";
        out += bed.verify(0, 2, 1);
        while (bed.cursor(0) < 200)
          out += bed.verify(0, bed.cursor(0) % (kMaxDrafts + 1), bed.cursor(0) % 3 == 0 ? 1 : bed.cursor(0) % (kMaxDrafts + 1) + 1);
        out += bed.feed(0, 210 - bed.cursor(0), RowKind::kDecode);
        EXPECT_EQ(out, expected);
        EXPECT_EQ(bed.live_state(0), plain.live_state(0));
      }
  }
}

TEST(GdnMix, OfTheModelsHeadsStaysNearTheRecurrenceForRowsOfBothKinds) {
  for (const DType ring : {DType::kF32, DType::kBF16})
    for (const auto& [chunk, kind] :
         {std::pair{int64_t{200}, RowKind::kPrompt}, {64, RowKind::kPrompt}, {1, RowKind::kDecode}, {5, RowKind::kDecode}}) {
      if (few_launches() && chunk == 1) continue;
      SCOPED_TRACE(fmt::format("{} ring, {} {} rows at a time", dtype_name(ring), chunk, kind == RowKind::kPrompt ? "prompt" : "decode"));
      GdnBed bed(kGdnRealHeads, DType::kBF16, ring);
      Vector state;
      const Vector expected = bed.reference(200);
      EXPECT_LT(relative_rms(bed.floats(bed.feed_all(0, 200, chunk, kind)), expected), 1e-2);
      GdnBed whole(kGdnRealHeads, DType::kBF16, ring);
      static_cast<void>(whole.reference(128, &state));
      whole.feed_all(0, 128, chunk, kind);
      if (kind == RowKind::kDecode) whole.feed(0, 1, kind);  // stores a fold that is due
      EXPECT_LT(relative_rms(whole.stored_state(0), state), 1e-2);
      EXPECT_EQ(whole.boundary(0), 128);
    }
}

TEST(GdnMix, OfTheModelsHeadsGivesTheSameBitsHoweverRowsOfAKindAreCut) {
  for (const DType ring : {DType::kF32, DType::kBF16})
    for (const RowKind kind : {RowKind::kPrompt, RowKind::kDecode}) {
      GdnBed whole(kGdnRealHeads, DType::kBF16, ring);
      const std::string expected = whole.feed_all(0, 210, kind == RowKind::kPrompt ? 210 : 1, kind), state = whole.live_state(0);
      for (const int64_t chunk : kind == RowKind::kPrompt ? std::vector<int64_t>{64, 128} : std::vector<int64_t>{3, 4, 7, 64, 210}) {
        SCOPED_TRACE(fmt::format("{} ring, {} {} rows at a time", dtype_name(ring), chunk, kind == RowKind::kPrompt ? "prompt" : "decode"));
        GdnBed bed(kGdnRealHeads, DType::kBF16, ring);
        EXPECT_EQ(bed.feed_all(0, 210, chunk, kind), expected);
        EXPECT_EQ(bed.live_state(0), state);
      }
    }
}

TEST(GdnMix, OfTheModelsHeadsRollsBackToWhatWasAcceptedAlsoAcrossABoundary) {
  const int64_t end = few_launches() ? 140 : 210;
  for (const int64_t prompt : few_launches() ? std::vector<int64_t>{62} : std::vector<int64_t>{5, 59, 62, 63, 64, 126}) {
    GdnBed plain(kGdnRealHeads, DType::kBF16, DType::kBF16);
    std::string expected = plain.feed_all(0, prompt, prompt, RowKind::kPrompt);
    while (plain.cursor(0) < end) expected += plain.feed(0, 1, RowKind::kDecode);
    for (int64_t accepted = few_launches() ? kMaxDrafts : 1; accepted <= (few_launches() ? kMaxDrafts : kMaxDrafts + 1); ++accepted) {
      SCOPED_TRACE(fmt::format("prompt {}, {} of {} rows accepted", prompt, accepted, kMaxDrafts + 1));
      GdnBed bed(kGdnRealHeads, DType::kBF16, DType::kBF16);
      std::string out = bed.feed_all(0, prompt, prompt, RowKind::kPrompt);
      out += bed.verify(0, kMaxDrafts, accepted);
      EXPECT_EQ(bed.boundary(0), prompt / 64 * 64) << "a verify stores no fold";
      while (bed.cursor(0) < end - 10)
        out += bed.verify(0, bed.cursor(0) % (kMaxDrafts + 1), bed.cursor(0) % 3 == 0 ? 1 : bed.cursor(0) % (kMaxDrafts + 1) + 1);
      while (bed.cursor(0) < end) out += bed.feed(0, 1, RowKind::kDecode);
      EXPECT_EQ(out, expected);
      EXPECT_EQ(bed.live_state(0), plain.live_state(0));
    }
  }
}

TEST(GdnMix, OfTheModelsHeadsMixesManyRunsAsIfAlone) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(dtype_name(ring));
    GdnBed alone(kGdnRealHeads, DType::kBF16, ring), both(kGdnRealHeads, DType::kBF16, ring);
    std::string expected = alone.feed_all(0, 64, 64, RowKind::kPrompt);
    while (alone.cursor(0) < 130) expected += alone.feed(0, 1, RowKind::kDecode);
    both.clear(2);
    std::string first = both.feed_all(0, 64, 64, RowKind::kPrompt), second = both.feed_all(2, 64, 64, RowKind::kPrompt);
    while (both.cursor(0) < 130) {
      first += both.feed(0, 1, RowKind::kDecode);
      if (both.cursor(2) < 130) second += both.feed(2, std::min<int64_t>(2, 130 - both.cursor(2)), RowKind::kDecode);
    }
    EXPECT_EQ(first, expected);
    EXPECT_EQ(second, expected);
  }
}

/// Whether a slot of a whole layer has the decode rows' outputs and the state of a sequence by itself that takes one row after the other behind its prompt.
void expect_as_alone(GdnBed& together, DType ring, int64_t slot, int64_t prompt, int64_t rows, const std::string& outputs) {
  GdnBed alone(kGdnLayer, DType::kBF16, ring, 2, 80, 1);
  alone.feed(0, prompt, RowKind::kPrompt);
  std::string expected;
  for (int64_t i = 0; i < rows; ++i) expected += alone.feed(0, 1, RowKind::kDecode);
  EXPECT_EQ(outputs, expected);
  EXPECT_EQ(together.live_state(slot), alone.live_state(0));
}

TEST(GdnMix, OfAWholeLayerMixesDecodeRowsOfManySlotsAsIfAlone) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    if (few_launches() && ring == DType::kF32) continue;  // which the next test has
    SCOPED_TRACE(dtype_name(ring));
    constexpr int64_t kMany = 17;  // so many that a GPU's blocks take several heads and sequences one after the other
    const auto prompt_of = [](int64_t slot) { return 11 + 3 * slot; };
    GdnBed together(kGdnLayer, DType::kBF16, ring, 2, 80, kMany);
    std::vector<std::pair<int64_t, int64_t>> prompts;
    for (int64_t slot = 0; slot < kMany; ++slot) {
      together.clear(slot);
      prompts.emplace_back(slot, prompt_of(slot));
    }
    together.feed_together(prompts);
    const std::vector<int64_t> rounds = few_launches() ? std::vector<int64_t>{4, 1} : std::vector<int64_t>{1, 1, 3, 2, 4, 1};  // rows of every slot; the last ones pass a boundary
    std::vector<std::string> outputs(kMany);
    for (const int64_t rows : rounds) {
      std::vector<std::pair<int64_t, int64_t>> runs;
      for (int64_t slot = 0; slot < kMany; ++slot) runs.emplace_back(slot, rows);
      const std::vector<std::string> out = together.feed_together(runs, RowKind::kDecode);
      for (size_t slot = 0; slot < out.size(); ++slot) outputs[slot] += out[slot];
    }
    for (const int64_t slot : few_launches() ? std::vector<int64_t>{kMany - 1} : std::vector<int64_t>{0, 8, kMany - 1}) {
      SCOPED_TRACE(fmt::format("slot {}", slot));
      expect_as_alone(together, ring, slot, prompt_of(slot), std::accumulate(rounds.begin(), rounds.end(), int64_t{0}), outputs[static_cast<size_t>(slot)]);
    }
  }
}

TEST(GdnMix, OfAWholeLayerMixesRowsWhereverTheyStandAmongOtherRunsAndPadding) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    if (few_launches() && ring == DType::kBF16) continue;
    SCOPED_TRACE(dtype_name(ring));
    constexpr int32_t kMany = 21;                                       // decoding: several more than a GPU's blocks begin with
    const auto ends_soon = [](int64_t slot) { return slot % 6 == 1; };  // a chunk, which is folded: at once or a step later
    const auto prompt_of = [&](int64_t slot) { return ends_soon(slot) ? 63 - slot / 6 % 2 : 1 + slot; };
    GdnBed together(kGdnLayer, DType::kBF16, ring, 2, 80, kMany + 1);
    std::vector<std::pair<int64_t, int64_t>> prompts;
    for (int64_t slot = 0; slot <= kMany; ++slot) {
      together.clear(slot);
      if (slot < kMany) prompts.emplace_back(slot, prompt_of(slot));
    }
    together.feed_together(prompts);
    std::vector<std::string> outputs(kMany);
    const std::vector<int32_t> rounds = few_launches() ? std::vector<int32_t>{1, 1} : std::vector<int32_t>{1, 1, 2, 1};
    for (const int32_t rows : rounds) {
      const RowRun padding{-1, 0, 0, RowKind::kDecode, true};
      std::vector<RowRun> runs{padding, {kMany, 0, 3, RowKind::kPrompt, true}, padding};
      for (int32_t slot = 0; slot < kMany; ++slot) {
        if (slot == 15) runs.push_back(padding);
        runs.push_back({slot, 0, rows, RowKind::kDecode, true});
      }
      const std::vector<std::string> out = together.feed_runs(runs);
      for (size_t i = 0; i < runs.size(); ++i)
        if (runs[i].num_rows > 0 && runs[i].slot < kMany) outputs[static_cast<size_t>(runs[i].slot)] += out[i];
    }
    for (const int64_t slot : few_launches() ? std::vector<int64_t>{13} : std::vector<int64_t>{0, 1, 13, 14, 19, 20}) {
      SCOPED_TRACE(fmt::format("slot {}", slot));
      expect_as_alone(together, ring, slot, prompt_of(slot), std::accumulate(rounds.begin(), rounds.end(), int64_t{0}), outputs[static_cast<size_t>(slot)]);
    }
  }
}

TEST(GdnMix, OfTheModelsHeadsTakesPromptsThatBeginAndEndInsideAChunk) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    if (few_launches() && ring == DType::kF32) continue;
    GdnBed bed(kGdnRealHeads, DType::kBF16, ring);
    Vector state;
    const Vector expected = bed.reference(192, &state);
    std::string out;
    for (const int64_t rows : {3, 40, 30, 60, 59})
      out += bed.feed(0, rows, RowKind::kPrompt);  // inside a chunk, to its last row, over a boundary, to the next
    EXPECT_LT(relative_rms(bed.floats(out), expected), 1e-2) << dtype_name(ring);
    EXPECT_LT(relative_rms(bed.stored_state(0), state), 1e-2) << dtype_name(ring);
    EXPECT_EQ(bed.boundary(0), 192);
  }
}

TEST(GdnMix, OfTheModelsHeadsTakesAPromptOfManyChunks) {
  constexpr int64_t kLength = 7 * 64 + 5;
  GdnBed whole(kGdnRealHeads, DType::kBF16, DType::kF32, 2, kLength), pieces(kGdnRealHeads, DType::kBF16, DType::kF32, 2, kLength);
  Vector state;
  static_cast<void>(whole.reference(7 * 64, &state));
  const Vector expected = whole.reference(kLength);
  const std::string out = whole.feed_all(0, kLength, kLength, RowKind::kPrompt);
  EXPECT_LT(relative_rms(whole.floats(out), expected), 1e-2);
  EXPECT_LT(relative_rms(whole.stored_state(0), state), 1e-2);
  EXPECT_EQ(pieces.feed_all(0, kLength, 320, RowKind::kPrompt), out);
  EXPECT_EQ(pieces.live_state(0), whole.live_state(0));
}

TEST(GdnMix, OfTheModelsHeadsSharesAKeyHeadAmongAnyNumberOfValueHeads) {
  const GdnExtent extent{2, 6, 128, 128, {0, 1, 1, 1, 1, 1}};
  GdnBed bed(extent, DType::kBF16, DType::kBF16);
  Vector state;
  const Vector expected = bed.reference(128, &state);
  EXPECT_LT(relative_rms(bed.floats(bed.feed_all(0, 128, 64, RowKind::kPrompt)), expected), 1e-2);
  EXPECT_LT(relative_rms(bed.stored_state(0), state), 1e-2);
  std::string rest = bed.feed(0, 20, RowKind::kPrompt);  // keys of a chunk that is not full are kept
  rest += bed.feed(0, 1, RowKind::kDecode);
  const Vector longer = bed.reference(149);
  EXPECT_LT(relative_rms(bed.floats(rest), std::span(longer).subspan(128 * 6 * 128)), 1e-2);
}

TEST(GdnMix, OfTheModelsHeadsFoldsWhatAVerifyLeftBeforeAPromptGoesOn) {
  for (const DType ring : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(dtype_name(ring));
    GdnBed bed(kGdnRealHeads, DType::kBF16, ring);
    Vector state;
    const Vector expected = bed.reference(192, &state);
    std::string out = bed.feed(0, 60, RowKind::kPrompt);
    const std::string verified =
        bed.enqueue(0, GdnBed::range(60, 4), RowKind::kDecode, false);  // all accepted: up to the boundary, whose fold is due
    bed.advance(0, 4, 4, false);
    out += verified;
    EXPECT_EQ(bed.boundary(0), 0);
    out += bed.feed(0, 128, RowKind::kPrompt);
    EXPECT_LT(relative_rms(bed.floats(out), expected), 1e-2);
    EXPECT_LT(relative_rms(bed.stored_state(0), state), 1e-2);
  }
}

TEST(GdnMix, OfTheModelsHeadsTakesShardsOfAnySize) {
  for (const GdnExtent& extent : kGdnRealShards) {
    SCOPED_TRACE(fmt::format("{} value heads to {} key heads", extent.nv, extent.nk));
    GdnBed bed(extent, DType::kBF16, DType::kBF16);
    Vector state;
    const Vector expected = bed.reference(138, &state);
    std::string out = bed.feed(0, 70, RowKind::kPrompt);
    out += bed.feed(0, 60, RowKind::kPrompt);  // from inside a chunk into the next
    out += bed.feed(0, 5, RowKind::kDecode);
    out += bed.feed(0, 3, RowKind::kPrompt);
    EXPECT_LT(relative_rms(bed.floats(out), expected), 1e-2);
    bed.clear(1);
    static_cast<void>(bed.reference(128, &state));
    bed.feed_all(1, 128, 64, RowKind::kPrompt);
    EXPECT_LT(relative_rms(bed.stored_state(1), state), 5e-3) << "rows of k, v and beta are bf16, the state is not";
  }
}

TEST(GdnMix, OfTheModelsHeadsMixesPromptsOfSeveralSlotsAsIfAlone) {
  GdnBed alone(kGdnRealHeads, DType::kBF16, DType::kBF16), together(kGdnRealHeads, DType::kBF16, DType::kBF16);
  const std::string expected = alone.feed_all(0, 130, 64, RowKind::kPrompt);
  const size_t row_bytes = expected.size() / 130;
  together.clear(1);
  together.clear(2);
  std::vector<std::string> first = together.feed_together({{0, 1}, {2, 1}, {1, 66}});
  EXPECT_EQ(first[0], expected.substr(0, row_bytes));
  EXPECT_EQ(first[1], expected.substr(0, row_bytes));
  EXPECT_EQ(first[2], expected.substr(0, 66 * row_bytes));
  GdnBed pairs(kGdnRealHeads, DType::kBF16, DType::kBF16);
  pairs.clear(2);
  const std::vector<std::string> whole = pairs.feed_together({{2, 130}, {0, 130}});
  EXPECT_EQ(whole[0], expected);
  EXPECT_EQ(whole[1], expected);
  EXPECT_EQ(pairs.live_state(2), alone.live_state(0));
  EXPECT_EQ(pairs.live_state(0), alone.live_state(0));
}

TEST(GdnMix, OfTheModelsHeadsFindsPromptsWhereverTheyStandAmongDecodeRuns) {
  constexpr std::array<int64_t, 2> kBefore = {10, 63}, kPrompts = {70, 130};  // rows of the decoding slots 0 and 1, and of the prompts of slots 2 and 3
  std::vector<std::string> expected, states;
  for (const int64_t rows : {kBefore[0], kBefore[1], kPrompts[0], kPrompts[1]}) {
    GdnBed alone(kGdnRealHeads, DType::kBF16, DType::kBF16);
    if (expected.size() < kBefore.size()) alone.feed(0, rows, RowKind::kPrompt);
    expected.push_back(expected.size() < kBefore.size() ? alone.feed(0, 1, RowKind::kDecode) : alone.feed(0, rows, RowKind::kPrompt));
    states.push_back(alone.live_state(0));
  }
  const RowRun padding{-1, 0, 0, RowKind::kDecode, true}, first{0, 0, 1, RowKind::kDecode, true}, second{1, 0, 1, RowKind::kDecode, true}, prompt{2, 0, kPrompts[0], RowKind::kPrompt, true},
      longer{3, 0, kPrompts[1], RowKind::kPrompt, true};
  for (const std::vector<RowRun>& runs : {std::vector{prompt, longer, first, second}, {first, second, longer, prompt}, {padding, first, prompt, padding, second, longer}, {longer, first, padding, second, prompt},
                                          {second, padding, longer, first}}) {
    GdnBed together(kGdnRealHeads, DType::kBF16, DType::kBF16, 2, 220, 4);
    for (const int64_t slot : {1, 2, 3}) together.clear(slot);
    together.feed_together({{0, kBefore[0]}, {1, kBefore[1]}});
    const std::vector<std::string> out = together.feed_runs(runs);
    for (size_t i = 0; i < runs.size(); ++i)
      if (runs[i].slot >= 0) {
        SCOPED_TRACE(fmt::format("slot {}, run {} of {}", runs[i].slot, i, runs.size()));
        EXPECT_EQ(out[i], expected[static_cast<size_t>(runs[i].slot)]);
        EXPECT_EQ(together.live_state(runs[i].slot), states[static_cast<size_t>(runs[i].slot)]);
      }
  }
}

TEST(GdnMix, KeepsTheStateOfTheBoundaryUntilAVerifyIsCommitted) {
  GdnBed bed(kGdnExtents[0], DType::kF32, DType::kF32), plain(kGdnExtents[0], DType::kF32, DType::kF32);
  bed.feed(0, 62, RowKind::kPrompt);
  plain.feed(0, 64, RowKind::kPrompt);
  const std::string before = Bed::bytes(bed.state().state.at(0));
  bed.verify(0, 4, 5);  // rows 62 .. 66, all right: the cursor passes the boundary, the state does not
  EXPECT_EQ(Bed::bytes(bed.state().state.at(0)), before);
  bed.verify(0, 4, 1);
  EXPECT_EQ(Bed::bytes(bed.state().state.at(0)), Bed::bytes(plain.state().state.at(0)));
  EXPECT_EQ(Bed::bytes(bed.state().boundary_columns.at(0)), Bed::bytes(plain.state().boundary_columns.at(0)));
  EXPECT_EQ(bed.boundary(0), 64);
}

TEST(GdnMix, MixesRunsOfSeveralSlotsAsIfAlone) {
  const GdnExtent& extent = kGdnExtents[0];
  GdnBed alone(extent, DType::kF32, DType::kF32), both(extent, DType::kF32, DType::kF32);
  const std::string expected = alone.feed_all(0, 130, 64, RowKind::kPrompt);
  both.clear(2);
  std::string first, second;
  while (both.cursor(0) < 130 || both.cursor(2) < 130) {  // interleaved, at different paces
    if (both.cursor(0) < 130) first += both.feed(0, std::min<int64_t>(64, 130 - both.cursor(0)), RowKind::kPrompt);
    if (both.cursor(2) < 130) second += both.feed(2, std::min<int64_t>(5, 130 - both.cursor(2)), RowKind::kDecode);
  }
  EXPECT_EQ(first, expected);
  EXPECT_EQ(second, expected);
  EXPECT_EQ(both.live_state(2), alone.live_state(0));
  both.clear(0);  // the slot's last owner left a ring and a window behind
  EXPECT_EQ(both.feed_all(0, 130, 64, RowKind::kPrompt), expected);
}

TEST(GdnMix, ReadsNothingOfUnusedRowsAndSlots) {
  GdnBed bed(kGdnExtents[1], DType::kF32, DType::kF32);  // all that is unused holds NaN
  for (const float y : bed.floats(bed.feed_all(0, 140, 3, RowKind::kDecode))) ASSERT_TRUE(std::isfinite(y));
}

TEST(GdnMix, RefusesARingOfEightBits) {
  const auto& candidate = backends::kernel_table(Platform::kCpu).list<GdnMix>().candidates().back();
  GdnMix::Problem problem;
  EXPECT_TRUE(candidate.accepts(problem, DeviceTraits{}).accepted);
  problem.ring = DType::kE4M3;
  EXPECT_THAT(candidate.accepts(problem, DeviceTraits{}).reason, ::testing::HasSubstr("e4m3"));
}

}  // namespace
}  // namespace quern::ops::testing
