#include <fmt/format.h>

#include "backends/platforms.h"
#include "bench.h"
#include "ops/kernel_table.h"
#include "ops/sample.h"

namespace quern {
namespace {

using ops::TensorView;

constexpr int64_t kKHeads = 16, kVHeads = 48, kGdnDim = 128, kQHeads = 24, kKvHeads = 4, kHeadDim = 256, kVocab = 248320, kTokens = 248077, kDrafts = 3;
constexpr int kLayers = 8;  // whose states together are more than the L2 cache holds

/// Where the sequences of a decode step stand in their chunks of 64 rows.
enum class Cursors {
  kHalf,      // all have half a chunk: nobody folds
  kSpread,    // evenly: of 64 sequences one ends its chunk and folds it
  kEnd,       // all end their chunks
  kOverdue,   // all stand behind a chunk whose fold is due, as after a verify that ended it
};

/// The tables of a step in which each of `num_runs` sequences has `rows` rows at index `cursor`, or from there on where `cursors` says, or up to `spread` later; then `beside` others a decode row each.
struct Step {
  std::vector<ops::RowRun> runs;
  ops::Rows rows;
  int64_t ring_rows = 0;  // of all sequences, since their last boundaries
  Step(Bench& bench, int32_t num_runs, int32_t num_rows, int32_t cursor, ops::RowKind kind, const TensorView& block_tables, Cursors cursors = Cursors::kHalf,
       int32_t spread = 0, int32_t beside = 0) {
    const int32_t all_runs = num_runs + beside, all_rows = num_runs * num_rows + beside;
    std::vector<ops::RunEntry> entries(static_cast<size_t>(all_runs));
    std::vector<int32_t> row_runs(static_cast<size_t>(all_rows)), indices, slot_cursors, slot_boundaries;
    for (int32_t r = 0; r < num_runs; ++r) {
      const int32_t chunk = cursor / 64 * 64;
      const int32_t at = cursors == Cursors::kSpread ? chunk + (r + 64 - num_rows) % 64 : cursors == Cursors::kEnd ? chunk + 64 - num_rows : cursors == Cursors::kOverdue ? chunk + 1 : cursor + static_cast<int32_t>(int64_t{r} * spread / num_runs);
      slot_cursors.push_back(at);
      slot_boundaries.push_back(cursors == Cursors::kOverdue ? chunk - 64 : chunk);
      ring_rows += at - slot_boundaries.back();
      runs.push_back({r, r * num_rows, num_rows, kind, kind == ops::RowKind::kPrompt || num_rows == 1});
      for (int32_t i = 0; i < num_rows; ++i) indices.push_back(at + i);
    }
    for (int32_t r = 0; r < beside; ++r) {
      slot_cursors.push_back(1056);
      slot_boundaries.push_back(1024);
      ring_rows += slot_cursors.back() - slot_boundaries.back();
      runs.push_back({num_runs + r, num_runs * num_rows + r, 1, ops::RowKind::kDecode, true});
      indices.push_back(slot_cursors.back());
    }
    ops::fill_run_tables(runs, entries, row_runs);
    std::vector<int32_t> table;
    for (const ops::RunEntry& entry : entries) table.insert(table.end(), {entry.slot, entry.first_row, entry.num_rows, entry.flags});
    rows.num_rows = all_rows;
    rows.runs = runs;
    rows.run_table = bench.ints({all_runs, ops::kRunFields}, table);
    rows.row_runs = bench.ints({rows.num_rows}, row_runs);
    rows.given_tokens = rows.tokens = rows.indices = bench.ints({rows.num_rows}, indices);
    rows.run_positions = bench.tensor(DType::kI32, {all_runs, 3});
    rows.positions = bench.tensor(DType::kI32, {rows.num_rows, 3});
    rows.slots.cursor = bench.ints({all_runs}, slot_cursors);
    rows.slots.boundary = bench.ints({all_runs}, slot_boundaries);
    rows.slots.last_token = bench.tensor(DType::kI32, {all_runs});
    rows.slots.position_delta = bench.tensor(DType::kI32, {all_runs});
    rows.slots.drafts = bench.tensor(DType::kI32, {all_runs, kDrafts});
    rows.slots.block_tables = block_tables;
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
};

template <class Op>
std::unique_ptr<typename Op::Kernel> make(Bench& bench, const ops::SelectionRules& rules, const typename Op::Problem& problem, Json& results) {
  const auto choice = ops::select(backends::kernel_table(ops::Platform::kCuda).list<Op>(), problem, bench.device().traits(), rules);
  CHECK_MSG(choice.chosen != nullptr, fmt::format("no kernel takes {}", Op::kName));
  results["candidates"][std::string(Op::kName)] = choice.chosen->name;
  return choice.chosen->make(problem, bench.device()).value();
}

class Mixers {
 public:
  Mixers(Bench& bench, const Selection& selection, double read_limit, const ops::SelectionRules& rules, Json& results)
      : bench_(bench), selection_(selection), read_limit_(read_limit), rules_(rules), results_(results) {}

  void gdn_mix() {
    ops::GdnMix::Problem problem;
    problem.num_k_heads = kKHeads;
    problem.num_v_heads = kVHeads;
    problem.d_k = problem.d_v = kGdnDim;
    for (int32_t head = 0; head < kVHeads; ++head) problem.k_head.push_back(head / static_cast<int32_t>(kVHeads / kKHeads));
    problem.k_max = kDrafts;
    problem.ring = selection_.ring;
    results_["gdn_ring_dtype"] = dtype_name(selection_.ring);
    fmt::print("gdn_mix: rings of {}\n", dtype_name(selection_.ring));
    const auto kernel = make<ops::GdnMix>(bench_, rules_, problem, results_);
    const int64_t channels = (2 * kKHeads + kVHeads) * kGdnDim;
    const auto packed = bench_.device().allocate(kernel->packed_bytes(), "weights").value();
    kernel->pack({bench_.random(DType::kBF16, {channels, 4}), bench_.filled({kVHeads}, -3), bench_.filled({kVHeads}, 0.5f), bench_.filled({kGdnDim}, 1)}, *packed,
                 bench_.stream());
    for (const auto& [runs, rows] : {std::pair{1, 1}, {1, 4}, {4, 1}, {16, 1}, {16, 4}, {64, 1}, {256, 1}})
      if (selection_.has(runs)) {
        mix(*kernel, *packed, channels, runs, rows, 1056, ops::RowKind::kDecode, "gdn_mix");
        // Rows of a verify are folded by the step after it.
        if (runs >= 64) mix(*kernel, *packed, channels, runs, rows, 1056, ops::RowKind::kDecode, "gdn_mix, 1 of 64 folds", Cursors::kSpread);
        if (rows == 1) mix(*kernel, *packed, channels, runs, rows, 1056, ops::RowKind::kDecode, "gdn_mix, all fold", Cursors::kEnd);
        if (runs <= 16) mix(*kernel, *packed, channels, runs, rows, 1056, ops::RowKind::kDecode, "gdn_mix, folds are due", Cursors::kOverdue);
      }
    for (const int rows : {512, 1024, 2048, 8192})
      if (selection_.has(rows)) mix(*kernel, *packed, channels, 1, rows, 0, ops::RowKind::kPrompt, "gdn_mix");
    if (selection_.has(512)) {
      mix(*kernel, *packed, channels, 4, 512, 0, ops::RowKind::kPrompt, "gdn_mix");
      for (const int beside : {64, 256}) mix(*kernel, *packed, channels, 1, 512, 0, ops::RowKind::kPrompt, fmt::format("gdn_mix, {} decode rows beside", beside), Cursors::kHalf, beside);
    }
  }

  void attention() {
    ops::Attention::Problem problem{kQHeads, kKvHeads, kHeadDim, {}};
    for (int32_t head = 0; head < kQHeads; ++head) problem.kv_head.push_back(head / static_cast<int32_t>(kQHeads / kKvHeads));
    const auto kernel = make<ops::Attention>(bench_, rules_, problem, results_);
    for (const auto& [runs, rows, context, spread] :
         {std::tuple{1, 1, 1024, 0}, {1, 4, 1024, 0}, {16, 1, 1024, 0}, {64, 1, 1024, 0}, {64, 1, 1024, 1024}, {256, 1, 1024, 0}, {1, 1, 32768 - 64, 0}, {1, 1, 131072 - 64, 0}, {1, 4, 131072 - 64, 0}})
      if (selection_.has(runs)) attend(*kernel, DType::kBF16, runs, rows, context, spread, ops::RowKind::kDecode);
    for (const int rows : {512, 1024, 2048, 8192})
      if (selection_.has(rows)) attend(*kernel, DType::kBF16, 1, rows, 0, 0, ops::RowKind::kPrompt);
    problem.kv = DType::kE4M3;
    const auto of_codes = make<ops::Attention>(bench_, rules_, problem, results_);
    for (const auto& [runs, rows, context, spread] : {std::tuple{1, 1, 1024, 0}, {64, 1, 1024, 0}, {256, 1, 1024, 0}, {256, 1, 1024, 1024}, {1, 1, 131072 - 64, 0}})
      if (selection_.has(runs)) attend(*of_codes, DType::kE4M3, runs, rows, context, spread, ops::RowKind::kDecode);
    for (const int rows : {512, 8192})
      if (selection_.has(rows)) attend(*of_codes, DType::kE4M3, 1, rows, 0, 0, ops::RowKind::kPrompt);
  }

  void sample() {
    const auto kernel = make<ops::Sample>(bench_, rules_, {kVocab, kTokens, kDrafts}, results_);
    for (const int runs : {1, 16, 64, 256}) {
      if (!selection_.has(runs)) continue;
      const TensorView logits = normals(runs * (kDrafts + 1));
      const Step step(bench_, runs, 1, 1056, ops::RowKind::kDecode, {});
      ops::SamplerTables tables;
      tables.params = bench_.tensor(DType::kU8, {runs, static_cast<int64_t>(sizeof(ops::SlotSampling))});
      tables.counts = bench_.tensor(DType::kI32, {runs, kVocab});
      tables.in_prompt = bench_.tensor(DType::kU8, {runs, kVocab});
      const int64_t per_run = kDrafts + 1, width = 1 + ops::kMaxLogprobs;
      const ops::SampleOutput out{bench_.tensor(DType::kI32, {runs, per_run}), bench_.tensor(DType::kI32, {runs}), bench_.tensor(DType::kI32, {runs}),
                                  bench_.tensor(DType::kF32, {runs, per_run, width}), bench_.tensor(DType::kI32, {runs, per_run, width}), bench_.tensor(DType::kI32, {runs, per_run})};
      ops::Launch launch{bench_.stream(), bench_.tensor(DType::kU8, {static_cast<int64_t>(std::max<size_t>(kernel->workspace_bytes(runs * per_run), 64))})};
      for (const TensorView& table : {tables.counts, tables.in_prompt}) bench_.stream().fill_zero(table);
      const TensorView drafts = bench_.tensor(DType::kI32, {runs});
      add("best of a draft's logits", runs, ops::RowKind::kDecode, bench_.seconds([&] { kernel->enqueue_argmax(logits.part(0, runs), drafts, launch); }), static_cast<double>(runs) * kVocab * 4, 0);
      ops::SamplingParams greedy, plain, usual, nucleus;  // usual: as Qwen recommends
      greedy.temperature = 0;
      usual.top_k = 20;
      usual.top_p = nucleus.top_p = 0.95f;
      ops::SamplingParams penalised = usual;
      penalised.presence_penalty = 1.5f;
      for (const auto& [name, params] :
           {std::pair{"sample greedy", greedy}, {"sample T 1", plain}, {"sample T 1 k 20 p .95", usual}, {"sample T 1 k 20 p .95, presence", penalised}, {"sample p .95", nucleus}})
        for (const int draws : {1, static_cast<int>(per_run)}) {
          std::vector<ops::SlotSampling> slots(static_cast<size_t>(runs), ops::to_slot_sampling(params));
          bench_.stream().copy_to_device(slots.data(), tables.params);
          std::vector<int32_t> entries;
          for (int32_t r = 0; r < runs; ++r)  // with drafts: all count as accepted
            entries.insert(entries.end(), {r, draws, r * draws, draws > 1 ? ops::kSyntheticAcceptance + static_cast<int32_t>(kDrafts) : 0, -1});
          const TensorView table = bench_.ints({runs, ops::kSampleRunFields}, entries);
          add(fmt::format("{}, {} draws", name, draws), runs, ops::RowKind::kDecode,
              bench_.seconds([&] { kernel->enqueue(table, logits.part(0, runs * draws), {}, tables, step.rows.slots, out, launch); }), static_cast<double>(runs) * draws * kVocab * 4, 0);
        }
      bench_.release();
    }
  }

 private:
  /// Logits about as a model has them.
  TensorView normals(int64_t rows) {
    std::vector<float> values(static_cast<size_t>(kVocab));
    SplitMix64 bits(3);
    for (float& value : values) {
      float sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits.next() >> 40) * 0x1p-24f - 0.5f;
      value = 5 * sum;
    }
    const TensorView view = bench_.tensor(DType::kF32, {rows, kVocab});
    for (int64_t row = 0; row < rows; ++row) bench_.stream().copy_to_device(values.data(), view.at(row));
    CHECK(bench_.stream().finish().has_value());
    return view;
  }

  void mix(const ops::GdnMix::Kernel& kernel, const ops::Buffer& packed, int64_t channels, int runs, int rows, int cursor, ops::RowKind kind,
           std::string_view what, Cursors cursors = Cursors::kHalf, int beside = 0) {
    const Step step(bench_, runs, rows, cursor, kind, {}, cursors, 0, beside);
    const int64_t slots = runs + beside;
    const int64_t n = step.rows.num_rows, ring = 64 + kDrafts + 1, window = 3 + kDrafts + 1;
    std::vector<ops::GdnStateView> states;
    for (int i = 0; i < kLayers; ++i) {
      ops::GdnStateView& s = states.emplace_back();
      s.state = bench_.tensor(DType::kF32, {slots, kVHeads, kGdnDim, kGdnDim});
      s.ring_k = bench_.tensor(selection_.ring, {slots, ring, kKHeads, kGdnDim});
      s.ring_u = bench_.tensor(selection_.ring, {slots, ring, kVHeads, kGdnDim});
      s.ring_g = bench_.tensor(DType::kF32, {slots, ring, kVHeads});
      s.conv_window = bench_.tensor(DType::kBF16, {slots, window, channels});
      s.boundary_columns = bench_.tensor(DType::kBF16, {slots, 3, channels});
    }
    const ops::GdnInputs in{bench_.random(DType::kBF16, {n, channels}), bench_.random(DType::kBF16, {n, kVHeads * kGdnDim}), bench_.random(DType::kBF16, {n, kVHeads}),
                            bench_.random(DType::kBF16, {n, kVHeads})};
    const ops::Activation out{ops::ActivationLayout::kPlain, bench_.tensor(DType::kBF16, {n, kVHeads * kGdnDim}), {}};
    ops::Launch launch = launch_for(kernel, n);
    const double seconds = bench_.seconds([&] {
                             for (const ops::GdnStateView& state : states) kernel.enqueue(step.rows, in, packed, state, out, launch);
                           }) /
                           kLayers;
    // States, of which decode rows need the upper halves where there are such, and what rings hold are read once. The recurrent form's useful work: two products with the state and one update of it a row.
    const int64_t element_bytes = kernel.state_layout() == ops::GdnStateLayout::kHalves && kind == ops::RowKind::kDecode ? 2 : 4;
    const int64_t state_bytes = slots * kVHeads * kGdnDim * kGdnDim * element_bytes, ring_bytes = step.ring_rows * (kKHeads + kVHeads) * kGdnDim * static_cast<int64_t>(dtype_size(selection_.ring));
    add(what, runs, kind, seconds, static_cast<double>(state_bytes + ring_bytes), 6.0 * static_cast<double>(n * kVHeads * kGdnDim * kGdnDim), rows);
    bench_.release();
  }

  void attend(const ops::Attention::Kernel& kernel, DType dtype, int runs, int rows, int context, int spread, ops::RowKind kind) {
    const int64_t blocks = (context + spread + rows + 63) / 64;
    std::vector<int32_t> table;
    for (int64_t i = 0; i < runs * blocks; ++i) table.push_back(static_cast<int32_t>(i));
    const Step step(bench_, runs, rows, context, kind, bench_.ints({runs, blocks}, table), Cursors::kHalf, spread);
    const int64_t n = step.rows.num_rows;
    std::vector<ops::KvCacheView> caches;
    for (int i = 0; i < kLayers; ++i) {
      ops::KvCacheView& kv = caches.emplace_back();
      kv.k = bench_.tensor(dtype, {runs * blocks, kKvHeads, 64, kHeadDim});
      kv.v = bench_.tensor(dtype, {runs * blocks, kKvHeads, 64, kHeadDim});
    }
    const TensorView query = bench_.random(DType::kBF16, {n, kQHeads, kHeadDim}), gate = bench_.random(DType::kBF16, {n, kQHeads, kHeadDim});
    const ops::Activation out{ops::ActivationLayout::kPlain, bench_.tensor(DType::kBF16, {n, kQHeads * kHeadDim}), {}};
    ops::Launch launch = launch_for(kernel, n);
    const double seconds = bench_.seconds([&] {
                             for (const ops::KvCacheView& kv : caches) kernel.enqueue(step.rows, query, gate, kv, 0, out, launch);
                           }) /
                           kLayers;
    const double length = context + spread * (runs - 1) / (2.0 * runs), keys = length + (rows + 1) / 2.0;  // of a sequence, and of a row, on average
    add(fmt::format("attention at {}{}{}", context, spread > 0 ? fmt::format(" to {}", context + spread) : "", dtype == DType::kE4M3 ? ", e4m3" : ""), runs, kind, seconds,
        runs * (length + rows) * kKvHeads * kHeadDim * 2 * static_cast<double>(dtype_size(dtype)), 4.0 * static_cast<double>(n * kQHeads * kHeadDim) * keys, rows);
    bench_.release();
  }

  ops::Launch launch_for(const ops::Kernel& kernel, int64_t rows) {
    return {bench_.stream(), bench_.tensor(DType::kU8, {static_cast<int64_t>(std::max<size_t>(kernel.workspace_bytes(rows), 64))})};
  }
  void add(std::string_view what, int runs, ops::RowKind kind, double seconds, double bytes, double flops, int rows = 1) {
    const char* name = kind == ops::RowKind::kPrompt ? "P" : "D";
    results_["results"].push_back({{"what", what}, {"kind", name}, {"runs", runs}, {"rows", rows}, {"us", seconds * 1e6}, {"gb_s", bytes / seconds / 1e9},
                                   {"share_of_read_limit", bytes / seconds / read_limit_}, {"tflops", flops / seconds / 1e12}});
    fmt::print("{} {:3} x {:4} rows  {:34} {:9.2f} us  {:6.0f} GB/s ({:.3f} of the read limit)  {:6.1f} TFLOPS\n", name, runs, rows, what, seconds * 1e6, bytes / seconds / 1e9,
               bytes / seconds / read_limit_, flops / seconds / 1e12);
  }

  Bench& bench_;
  const Selection& selection_;
  double read_limit_;
  const ops::SelectionRules& rules_;
  Json& results_;
};

}  // namespace

void bench_mixers(Bench& bench, const Selection& selection, double read_limit, const ops::SelectionRules& rules, Json& results) {
  Mixers mixers(bench, selection, read_limit, rules, results);
  if (selection.has("gdn_mix")) mixers.gdn_mix();
  if (selection.has("attention")) mixers.attention();
  if (selection.has("sample")) mixers.sample();
}

}  // namespace quern
