#include "worker/shard.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/json.h"
#include "model/tensors.h"
#include "support/test_support.h"
#include "weights/slices.h"

namespace quern::worker {
namespace {

model::ModelConfig config_27b(std::string_view file = "config.fp8.json") {
  const Json json = read_json_file(quern::testing::data_path(fmt::format("qwen3.6-27b/{}", file))).value();
  return model::parse_config(json, "Qwen3.6-27B").value();
}
Shard rank_of(const model::ModelConfig& config, int32_t rank, int32_t size) { return make_shard(config, rank, size, 0, 1, {0, config.num_layers()}); }

TEST(Shard, HasTheHeadsBlocksAndIdsOfTheSpecification) {
  const model::ModelConfig config = config_27b();
  struct Expected {
    int32_t size;
    std::vector<int64_t> q, kv, v, k, mlp_blocks, vocab_blocks;
  };
  for (const Expected& e : {Expected{2, {12, 12}, {2, 2}, {24, 24}, {8, 8}, {68, 68}, {970, 970}},
                            Expected{3, {8, 8, 8}, {2, 2, 2}, {16, 16, 16}, {6, 6, 6}, {46, 45, 45}, {647, 647, 646}},
                            Expected{4, {6, 6, 6, 6}, {1, 1, 1, 1}, {12, 12, 12, 12}, {4, 4, 4, 4}, {34, 34, 34, 34}, {485, 485, 485, 485}},
                            Expected{8, {3, 3, 3, 3, 3, 3, 3, 3}, {1, 1, 1, 1, 1, 1, 1, 1}, {6, 6, 6, 6, 6, 6, 6, 6}, {2, 2, 2, 2, 2, 2, 2, 2}, {17, 17, 17, 17, 17, 17, 17, 17},
                                     {243, 243, 243, 243, 242, 242, 242, 242}}})
    for (int32_t rank = 0; rank < e.size; ++rank) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << e.size);
      const Shard s = rank_of(config, rank, e.size);
      const auto at = static_cast<size_t>(rank);
      EXPECT_EQ(s.q_heads.size(), e.q[at]);
      EXPECT_EQ(s.kv_heads.size(), e.kv[at]);
      EXPECT_EQ(s.v_heads.size(), e.v[at]);
      EXPECT_EQ(s.k_heads.size(), e.k[at]);
      EXPECT_EQ(s.intermediate.size(), 128 * e.mlp_blocks[at]);
      EXPECT_EQ(s.vocab.size(), 128 * e.vocab_blocks[at]);
    }
  EXPECT_EQ(rank_of(config, 1, 3).kv_heads, (Range{1, 3}));
  EXPECT_EQ(rank_of(config, 1, 3).kv_head, (std::vector<int32_t>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(rank_of(config, 1, 3).k_heads, (Range{5, 11}));
  EXPECT_EQ(rank_of(config, 2, 3).k_head, (std::vector<int32_t>{0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5}));
}

/// Every element of every tensor is with somebody, with one rank alone unless it is a head that several read, or is not cut at all.
TEST(Shard, PutsEveryRowAndColumnSomewhere) {
  const model::ModelConfig config = config_27b();
  for (const int32_t size : {1, 2, 3, 4, 7, 24})
    for (const model::TensorSpec& tensor : model::tensor_specs(config, true)) {
      SCOPED_TRACE(::testing::Message() << tensor.name << ", tp " << size);
      std::vector<int32_t> rows(static_cast<size_t>(tensor.shape[0])), columns(tensor.kind == model::TensorKind::kLinear ? static_cast<size_t>(tensor.shape[1]) : 1);
      for (int32_t rank = 0; rank < size; ++rank) {
        const auto slice = slice_of(rank_of(config, rank, size), config, tensor.name, true);
        ASSERT_TRUE(slice);
        const weights::RowPieces pieces(*slice, tensor.shape[0]);
        for (const Range& piece : pieces.pieces())
          for (int64_t row = piece.begin; row < piece.end; ++row) ++rows[static_cast<size_t>(row)];
        const Range kept = weights::clip(slice->column_begin, slice->column_end, std::ssize(columns));
        for (int64_t column = kept.begin; column < kept.end; ++column) ++columns[static_cast<size_t>(column)];
      }
      EXPECT_GE(*std::min_element(rows.begin(), rows.end()), 1);
      EXPECT_GE(*std::min_element(columns.begin(), columns.end()), 1);
      if (tensor.name.ends_with("_proj.weight") && tensor.name.find(".k_proj") == std::string::npos && tensor.name.find(".v_proj") == std::string::npos) {
        const bool by_rows = std::count(rows.begin(), rows.end(), size) != std::ssize(rows);
        for (const int32_t count : by_rows ? rows : columns) ASSERT_EQ(count, 1);
      }
    }
}

TEST(Shard, CutsBlockScalesOnWholeEntriesAtTheRealSizes) {
  const model::ModelConfig config = config_27b();
  const weights::Inventory inventory = weights::inventory_from_config(config, {}).value();
  for (const int32_t size : {2, 3, 4})
    for (int32_t rank = 0; rank < size; ++rank) {
      const Shard shard = rank_of(config, rank, size);
      for (const auto& [name, linear] : inventory.linears) {
        if (linear.scheme != ops::WeightScheme::kFp8Block) continue;
        const auto slice = slice_of(shard, config, name, true);
        const weights::RowPieces pieces(*slice, linear.out_features);
        for (const Range& piece : pieces.pieces()) {
          EXPECT_EQ(piece.begin % 128, 0) << name;
          EXPECT_EQ(piece.end % 128, 0) << name;
        }
        EXPECT_EQ(slice->column_begin % 128, 0) << name;
      }
    }
}

TEST(Shard, OfAStageHasItsLayersAndWhatStandsAtTheEnds) {
  const model::ModelConfig config = config_27b();
  const weights::Inventory inventory = weights::inventory_from_config(config, {}).value();
  const Shard first = make_shard(config, 0, 1, 0, 2, {0, 36}), last = make_shard(config, 0, 1, 1, 2, {36, 64});
  const auto keeps = [&](const Shard& shard, std::string_view tensor, bool has_mtp = true) { return slice_of(shard, config, tensor, has_mtp).has_value(); };
  EXPECT_TRUE(keeps(first, "layers.35.mlp.up_proj.weight"));
  EXPECT_FALSE(keeps(first, "layers.36.mlp.up_proj.weight"));
  EXPECT_FALSE(keeps(last, "layers.4.mlp.up_proj.weight"));
  EXPECT_FALSE(keeps(first, "lm_head.weight"));
  EXPECT_FALSE(keeps(first, "norm.weight"));
  EXPECT_FALSE(keeps(first, "mtp.fc.weight"));
  EXPECT_TRUE(keeps(last, "mtp.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(keeps(last, "embed_tokens.weight")) << "the drafter looks tokens up";
  EXPECT_FALSE(keeps(last, "embed_tokens.weight", false));
  // Together they have everything, and the embedding twice.
  const auto a = part_of(inventory, config, first, true), b = part_of(inventory, config, last, true);
  ASSERT_OK(a);
  ASSERT_OK(b);
  EXPECT_EQ(a->linears.size() + b->linears.size(), inventory.linears.size() + 1);
  EXPECT_EQ(a->vectors.size() + b->vectors.size(), inventory.vectors.size());
}

TEST(Shard, RefusesMoreRanksThanThereAreHeads) {
  const model::ModelConfig config = config_27b();
  EXPECT_OK(check_tp_size(config, 24));
  const auto refused = check_tp_size(config, 25);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, ::testing::HasSubstr("24 query heads"));
}

std::vector<int64_t> sizes_of(const std::vector<Range>& stages) {
  std::vector<int64_t> sizes;
  for (const Range& stage : stages) sizes.push_back(stage.size());
  return sizes;
}

TEST(SplitLayers, MakesTheSlowestStageAsFastAsItCanBe) {
  StageCosts costs{.layer_bytes = std::vector<double>(64, 1.0), .first_resident_bytes = 7, .last_bytes = 8, .bandwidth = {1, 1}, .memory_bytes = {1000, 1000}};
  EXPECT_EQ(sizes_of(split_layers(costs)), (std::vector<int64_t>{36, 28}));
  costs.bandwidth = {1, 2};  // the second card reads twice as fast
  EXPECT_EQ(sizes_of(split_layers(costs)), (std::vector<int64_t>{24, 40}));
  costs.bandwidth = {1, 1, 1, 1};
  costs.memory_bytes = {1000, 1000, 1000, 1000};
  const std::vector<int64_t> four = sizes_of(split_layers(costs));
  EXPECT_EQ(four.back(), 10);
  EXPECT_EQ(*std::max_element(four.begin(), four.end()), 18);
}

TEST(SplitLayers, KeepsWithinMemoryBeforeItLooksAtTime) {
  StageCosts costs{.layer_bytes = std::vector<double>(64, 1.0), .first_resident_bytes = 7, .last_bytes = 8, .bandwidth = {1, 1}, .memory_bytes = {40, 45}};
  EXPECT_EQ(sizes_of(split_layers(costs)), (std::vector<int64_t>{33, 31}));
  costs.memory_bytes = {20, 25};  // none fits: the overflow is shared out
  EXPECT_EQ(sizes_of(split_layers(costs)), (std::vector<int64_t>{30, 34}));
}

TEST(SplitLayers, TriesEveryCut) {
  // Against all cuts of a few uneven layers into three stages.
  StageCosts costs{.layer_bytes = {3, 1, 4, 1, 5, 9, 2, 6}, .first_resident_bytes = 2, .last_bytes = 3, .last_resident_bytes = 1, .bandwidth = {1, 2, 1}, .memory_bytes = {99, 99, 99}};
  const auto time = [&](int64_t begin, int64_t end, int64_t stage) {
    const double bytes = std::accumulate(costs.layer_bytes.begin() + begin, costs.layer_bytes.begin() + end, 0.0) + (stage == 2 ? costs.last_bytes : 0);
    return bytes / costs.bandwidth[static_cast<size_t>(stage)];
  };
  double best = 1e9;
  for (int64_t a = 1; a < 7; ++a)
    for (int64_t b = a + 1; b < 8; ++b) best = std::min(best, std::max({time(0, a, 0), time(a, b, 1), time(b, 8, 2)}));
  const std::vector<Range> stages = split_layers(costs);
  double found = 0;
  for (int64_t stage = 0; stage < 3; ++stage) found = std::max(found, time(stages[static_cast<size_t>(stage)].begin, stages[static_cast<size_t>(stage)].end, stage));
  EXPECT_EQ(found, best);
}

}  // namespace
}  // namespace quern::worker
