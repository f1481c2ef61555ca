// Every scheme from a generated checkpoint to staged memory. The expected numbers are computed here from the planned codes and scales.

#include <cmath>
#include <string>
#include <vector>

#include "weights/made_checkpoint.h"
#include "weights/slices.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;
using ::testing::Contains;
using testing::cut;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MadeCheckpoint;
using testing::stage;
using testing::SynthOptions;
using tools::SynthScheme;

/// A planned linear as the numbers that its codes and scales mean by model-spec.md 2.
std::vector<float> expected(MadeCheckpoint& made, const std::string& name, const std::string& scale_name) {
  std::vector<float> numbers = made.values(name);
  if (scale_name.empty()) return numbers;
  const Shape shape = made.tensor(name).shape, scale_shape = made.tensor(scale_name).shape;
  const std::vector<float> scales = made.values(scale_name);
  const int64_t columns = shape[1];
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t r = static_cast<int64_t>(i) / columns, c = static_cast<int64_t>(i) % columns;
    size_t at = 0;
    if (scale_shape == Shape{ceil_div(shape[0], 128), ceil_div(columns, 128)}) {
      at = static_cast<size_t>(r / 128 * scale_shape[1] + c / 128);
    } else if (scales.size() > 1) {
      at = static_cast<size_t>(r);
    }
    numbers[i] *= scales[at];
  }
  return numbers;
}

struct Expectation {
  const char* name;
  WeightScheme scheme;
  const char* scale;  // parameter, or empty
  bool static_input = false;
};

struct SchemeCase {
  SynthScheme scheme;
  std::vector<Expectation> linears;
  bool fp8_kv = false;
};

const SchemeCase kCases[] = {
    {SynthScheme::kBf16,
     {{"layers.0.mlp.up_proj", WeightScheme::kBF16, ""}, {"mtp.fc", WeightScheme::kBF16, ""}, {"lm_head", WeightScheme::kBF16, ""}}},
    {SynthScheme::kBlockFp8,
     {{"layers.0.mlp.up_proj", WeightScheme::kFp8Block, "weight_scale_inv"},
      {"layers.1.linear_attn.in_proj_qkv", WeightScheme::kFp8Block, "weight_scale_inv"},
      {"layers.3.self_attn.k_proj", WeightScheme::kFp8Block, "weight_scale_inv"},
      {"mtp.layers.0.self_attn.q_proj", WeightScheme::kFp8Block, "weight_scale_inv"},
      {"layers.0.linear_attn.in_proj_a", WeightScheme::kBF16, ""},
      {"embed_tokens", WeightScheme::kBF16, ""}}},
    {SynthScheme::kBlockFp8Vocab,
     {{"embed_tokens", WeightScheme::kFp8Block, "weight_scale_inv"}, {"lm_head", WeightScheme::kFp8Block, "weight_scale_inv"}}},
    {SynthScheme::kStaticFp8,
     {{"layers.0.mlp.up_proj", WeightScheme::kFp8Tensor, "weight_scale", true},
      {"layers.3.self_attn.o_proj", WeightScheme::kFp8Tensor, "weight_scale", true},
      {"layers.0.linear_attn.in_proj_z", WeightScheme::kBF16, ""},
      {"mtp.layers.0.mlp.up_proj", WeightScheme::kBF16, ""}},
     true},
    {SynthScheme::kChannelFp8, {{"layers.0.mlp.down_proj", WeightScheme::kFp8Channel, "weight_scale"}}},
    {SynthScheme::kFp8Dynamic,
     {{"layers.0.mlp.down_proj", WeightScheme::kFp8Channel, "weight_scale"}, {"layers.0.linear_attn.in_proj_b", WeightScheme::kBF16, ""}}},
    {SynthScheme::kModelOptFp8,
     {{"layers.0.linear_attn.out_proj", WeightScheme::kFp8Tensor, "weight_scale", true},
      {"mtp.layers.0.mlp.up_proj", WeightScheme::kBF16, ""}},
     true},
    {SynthScheme::kMixed,
     {{"layers.0.mlp.up_proj", WeightScheme::kFp8Tensor, "weight_scale", true},
      {"layers.0.linear_attn.in_proj_qkv", WeightScheme::kFp8Channel, "weight_scale"},
      {"mtp.layers.0.mlp.up_proj", WeightScheme::kFp8Block, "weight_scale"}},
     true},
    {SynthScheme::kHybrid,
     {{"layers.0.mlp.up_proj", WeightScheme::kFp8Tensor, "weight_scale", true},
      {"layers.0.linear_attn.in_proj_qkv", WeightScheme::kBF16, ""},
      {"mtp.layers.0.mlp.up_proj", WeightScheme::kFp8Block, "weight_scale_inv"}},
     true},
};

TEST(Schemes, StageTheNumbersThatAreStored) {
  for (const SchemeCase& c : kCases) {
    SCOPED_TRACE(tools::synth_scheme_names()[static_cast<size_t>(c.scheme)]);
    MadeCheckpoint made(c.scheme);
    LoadOptions strict;
    strict.strict = true;
    const auto source = made.open(strict);
    ASSERT_OK(source);
    const Inventory& inventory = (*source)->inventory();
    EXPECT_TRUE(inventory.has_mtp);
    EXPECT_EQ(inventory.fp8_kv_declared, c.fp8_kv);
    EXPECT_THAT(inventory.unknown, IsEmpty());
    for (const Expectation& e : c.linears) {
      SCOPED_TRACE(e.name);
      const std::string name = std::string(e.name) + ".weight";
      const ops::LinearShape& linear = inventory.linears.at(name);
      EXPECT_EQ(linear.scheme, e.scheme);
      EXPECT_EQ(linear.static_input_scale, e.static_input);
      const std::vector<float> whole = expected(made, name, *e.scale != '\0' ? fmt::format("{}.{}", e.name, e.scale) : "");
      for (const bool in_place : {true, false}) {
        EXPECT_EQ(stage(**source, name, {}, in_place), whole);
        // Cuts on scale blocks, and one at odd places.
        const int64_t rows = linear.out_features, columns = linear.in_features;
        for (const Slice& slice : {Slice{rows > 128 ? 128 : 0, -1, 0, -1}, Slice{0, -1, columns > 128 ? 128 : 0, -1},
                                   Slice{rows / 3, rows / 3 + 2, 5, columns - 3}, Slice{rows / 2, rows / 2, 0, -1}}) {
          EXPECT_EQ(stage(**source, name, slice, in_place), cut(whole, columns, slice));
        }
        // Pieces, joined: on scale blocks, then with a joint where the blocks end by chance, as those of a small model's heads do.
        const int64_t block = std::min<int64_t>(128, rows);
        if (rows < 16) continue;
        for (const Slice& slice : {Slice{0, block, 0, -1, {{block, rows}}}, Slice{rows / 3, rows / 3 + 1, 3, -1, {{rows / 3 + 1, rows / 3 + 2}, {rows / 3 + 2, rows / 3 + 2}}},
                                   Slice{block - 7, block - 5, 0, -1, {{block - 2, block}, {block, std::min(rows, block + 9)}}}}) {
          EXPECT_EQ(stage(**source, name, slice, in_place), cut(whole, columns, slice));
        }
      }
    }
  }
}

TEST(Schemes, RefusePiecesWhoseScaleBlocksDoNotMeetOnOneGrid) {
  const auto offset_of = [](const Slice& slice, int64_t rows, int64_t first = 0) {
    const auto found = scale_rows_of(RowPieces(slice, rows), first);
    return found ? found->offset : -1;
  };
  EXPECT_EQ(offset_of({0, 128, 0, -1, {{256, 384}, {512, 520}}}, 640), 0);
  EXPECT_EQ(offset_of({0, 16, 0, -1, {{32, 48}, {112, 160}}}, 160), 80);  // 16 + 16 + 16 rows of the first block, 32 of the second
  EXPECT_EQ(offset_of({0, 16, 0, -1, {{120, 140}, {300, 310}}}, 640), -1);
  EXPECT_EQ(offset_of({100, 130}, 640, 30), 2);
  EXPECT_EQ(offset_of({4, 4}, 640), 0);

  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const auto source = made.open();
  ASSERT_OK(source);
  quern::testing::HostDevice device(/*in_place=*/true);
  auto stream = device.make_stream();
  const std::string name = "layers.0.mlp.up_proj.weight";
  ASSERT_GT((*source)->inventory().linears.at(name).out_features, 256);
  const auto staged = (*source)->linear(name, {0, 16, 0, -1, {{120, 140}, {250, 260}}}, device, **stream);
  ASSERT_FALSE(staged);
  EXPECT_THAT(staged.error().message, ::testing::HasSubstr("up_proj"));
  EXPECT_THAT(staged.error().message, ::testing::HasSubstr("one grid of 128"));
}

TEST(Schemes, NeedNoMemoryOfTheirOwnWhereTheDeviceReadsTheFile) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const auto source = made.open();
  ASSERT_OK(source);
  quern::testing::HostDevice device(/*in_place=*/true);
  auto stream = device.make_stream();
  const auto staged = (*source)->linear("layers.0.mlp.up_proj.weight", {}, device, **stream);
  ASSERT_OK(staged);
  EXPECT_EQ(device.allocated_bytes(), staged->source.scale.size_bytes());
  (*source)->done_with("layers.0.mlp.up_proj.weight");
  EXPECT_EQ(stage(**source, "layers.0.mlp.up_proj.weight"),
            expected(made, "layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight_scale_inv"));
}

TEST(Schemes, HaveTheSpreadOfTrainedWeights) {
  for (const SynthScheme scheme : {SynthScheme::kBf16, SynthScheme::kBlockFp8, SynthScheme::kStaticFp8, SynthScheme::kFp8Dynamic}) {
    MadeCheckpoint made(scheme);
    const auto source = made.open();
    ASSERT_OK(source);
    const std::vector<float> numbers = stage(**source, "layers.0.mlp.up_proj.weight");
    double sum = 0, squares = 0;
    for (const float x : numbers) {
      sum += x;
      squares += static_cast<double>(x) * x;
    }
    const double n = static_cast<double>(numbers.size()), wanted = 1 / std::sqrt(160.0);
    EXPECT_NEAR(sum / n, 0, 0.02 * wanted);
    EXPECT_NEAR(std::sqrt(squares / n), wanted, 0.27 * wanted);  // a tensor's one scale varies by a quarter
  }
}

TEST(Schemes, TakeSingleScalesOfAnyShapeAlike) {
  std::vector<std::vector<float>> numbers;
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{1, 1}}) {
    for (const SynthScheme scheme : {SynthScheme::kStaticFp8, SynthScheme::kModelOptFp8}) {
      MadeCheckpoint made(scheme, [&](SynthOptions& options) { options.scale_shape = shape; });
      const auto source = made.open();
      ASSERT_OK(source);
      const Inventory& inventory = (*source)->inventory();
      // 64 x 160 fits no block, q_norm is small: one element never means a block here.
      EXPECT_EQ(inventory.linears.at("layers.3.self_attn.v_proj.weight").scheme, WeightScheme::kFp8Tensor) << shape.to_string();
      EXPECT_TRUE(inventory.linears.at("layers.3.self_attn.v_proj.weight").static_input_scale);
      EXPECT_EQ(inventory.kv_scales.at(3).k, std::vector<float>{0.125f});
      EXPECT_EQ(inventory.kv_scales.at(3).v, std::vector<float>{0.25f});
      quern::testing::HostDevice device(true);
      auto stream = device.make_stream();
      const auto staged = (*source)->linear("layers.3.self_attn.v_proj.weight", {}, device, **stream);
      ASSERT_OK(staged);
      EXPECT_EQ(staged->source.input_scale, 0.0625f);
      EXPECT_EQ(staged->source.scale.shape, Shape{1});
      EXPECT_OK((*stream)->finish());
      numbers.push_back(testing::dequantised(*staged));
    }
  }
  for (const auto& n : numbers) EXPECT_EQ(n, numbers.front());
}

TEST(Schemes, AcceptF32Gates) {
  MadeCheckpoint made(SynthScheme::kBf16, [](SynthOptions& options) { options.f32_gates = true; });
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_EQ((*source)->inventory().vectors.at("layers.0.linear_attn.A_log").first, DType::kF32);
  EXPECT_EQ((*source)->inventory().vectors.at("layers.0.linear_attn.dt_bias").first, DType::kBF16);
  quern::testing::HostDevice device(false);
  auto stream = device.make_stream();
  const auto staged = (*source)->vector("layers.0.linear_attn.A_log", {}, device, **stream);
  ASSERT_OK(staged);
  EXPECT_OK((*stream)->finish());
  const std::vector<float> values = made.values("layers.0.linear_attn.A_log");
  EXPECT_EQ(std::vector<float>(staged->view.data<float>(), staged->view.data<float>() + values.size()), values);
  EXPECT_LT(*std::max_element(values.begin(), values.end()), 0);
}

TEST(Schemes, AcceptF32BlockScales) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const std::string name = "layers.0.mlp.up_proj.weight_scale_inv";
  const std::vector<float> scales = made.values(name);
  const std::vector<float> whole = expected(made, "layers.0.mlp.up_proj.weight", name);
  const Shape shape = made.tensor(name).shape;
  ASSERT_TRUE(made.erase(name));
  made.add(std::string(testing::kPrefix) + name, DType::kF32, shape, scales);
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_EQ(stage(**source, "layers.0.mlp.up_proj.weight"), whole);
}

TEST(Schemes, ReadTheTextOnlyAndTheOtherPrefixes) {
  for (const std::string prefix : {"model.", "language_model.model."}) {
    MadeCheckpoint made(SynthScheme::kBlockFp8);
    for (auto& file : made.plan().files) {
      for (auto& tensor : file.tensors) {
        if (tensor.name.starts_with(testing::kPrefix)) tensor.name = prefix + tensor.name.substr(testing::kPrefix.size());
        if (tensor.name == "lm_head.weight" && prefix.starts_with("language_model")) tensor.name = "language_model.lm_head.weight";
      }
    }
    made.plan().index = nullptr;
    // One file: the plan's files merged.
    for (size_t i = 1; i < made.plan().files.size(); ++i) {
      for (auto& tensor : made.plan().files[i].tensors) made.plan().files[0].tensors.push_back(std::move(tensor));
    }
    made.plan().files.resize(1);
    made.plan().files[0].name = "model.safetensors";
    EXPECT_OK(made.open()) << prefix;
  }
  MadeCheckpoint flattened(SynthScheme::kBf16, [](SynthOptions& options) {
    Json text = options.config["text_config"];
    options.config = text;
  });
  EXPECT_OK(flattened.open());
}

TEST(Schemes, FollowAnIndexOfSizedShards) {
  MadeCheckpoint made(SynthScheme::kFp8Dynamic, [](SynthOptions& options) { options.shard_bytes = 300'000; });
  EXPECT_GT(made.plan().files.size(), 2u);
  EXPECT_OK(made.open());
}

TEST(Schemes, LoadMergedProjectionsAsRowsOfOne) {
  for (const SynthScheme scheme : {SynthScheme::kBf16, SynthScheme::kFp8Dynamic, SynthScheme::kStaticFp8}) {
    SCOPED_TRACE(tools::synth_scheme_names()[static_cast<size_t>(scheme)]);
    MadeCheckpoint made(scheme);
    const std::string parent = "layers.0.mlp.";
    std::vector<float> gate = made.values(parent + "gate_proj.weight"), up = made.values(parent + "up_proj.weight"), both = gate;
    both.insert(both.end(), up.begin(), up.end());
    const bool fp8 = scheme != SynthScheme::kBf16;
    std::vector<float> scales, gate_numbers = expected(made, parent + "gate_proj.weight", fp8 ? parent + "gate_proj.weight_scale" : ""),
                               up_numbers = expected(made, parent + "up_proj.weight", fp8 ? parent + "up_proj.weight_scale" : "");
    const Shape shape = made.tensor(parent + "gate_proj.weight").shape;
    for (const char* member : {"gate_proj", "up_proj"}) {
      ASSERT_TRUE(made.erase(parent + member + ".weight"));
      if (!fp8) continue;
      for (const float s : made.values(parent + member + ".weight_scale")) scales.push_back(s);
      ASSERT_TRUE(made.erase(parent + member + ".weight_scale"));
      EXPECT_EQ(made.erase(parent + member + ".input_scale"), scheme == SynthScheme::kStaticFp8);
    }
    const std::string merged = std::string(testing::kPrefix) + parent + "gate_up_proj";
    made.add(merged + ".weight", fp8 ? DType::kE4M3 : DType::kBF16, {2 * shape[0], shape[1]}, both);
    if (fp8) made.add(merged + ".weight_scale", DType::kBF16, {static_cast<int64_t>(scales.size())}, scales);
    if (scheme == SynthScheme::kStaticFp8) made.add(merged + ".input_scale", DType::kBF16, {1}, {0.25f});
    const auto source = made.open();
    ASSERT_OK(source);
    EXPECT_EQ(stage(**source, parent + "gate_proj.weight"), gate_numbers);
    EXPECT_EQ(stage(**source, parent + "up_proj.weight"), up_numbers);
    EXPECT_THAT((*source)->inventory().notes, Contains(HasSubstr("gate_up_proj.weight is read as the rows of gate_proj, up_proj")));
  }
}

TEST(Schemes, LoadMergedBlockScalesThatStraddleASegment) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const std::string parent = "layers.0.linear_attn.";
  // qkv has 160 rows here and z 96: z begins inside the second scale block.
  const Shape qkv = made.tensor(parent + "in_proj_qkv.weight").shape, z = made.tensor(parent + "in_proj_z.weight").shape;
  ASSERT_NE(qkv[0] % 128, 0);
  std::vector<float> codes = made.values(parent + "in_proj_qkv.weight");
  for (const float x : made.values(parent + "in_proj_z.weight")) codes.push_back(x);
  for (const char* member : {"in_proj_qkv", "in_proj_z"}) {
    ASSERT_TRUE(made.erase(parent + member + ".weight"));
    ASSERT_TRUE(made.erase(parent + member + ".weight_scale_inv"));
  }
  const int64_t rows = qkv[0] + z[0], columns = qkv[1], grid_columns = ceil_div(columns, 128);
  std::vector<float> scales;
  for (int64_t i = 0; i < ceil_div(rows, 128) * grid_columns; ++i) scales.push_back(0.25f * static_cast<float>(i + 1));
  const std::string merged = std::string(testing::kPrefix) + parent + "in_proj_qkvz";
  made.add(merged + ".weight", DType::kE4M3, {rows, columns}, codes);
  made.add(merged + ".weight_scale_inv", DType::kBF16, {ceil_div(rows, 128), grid_columns}, scales);
  std::vector<float> z_numbers;
  for (int64_t r = qkv[0]; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      z_numbers.push_back(codes[static_cast<size_t>(r * columns + c)] * scales[static_cast<size_t>(r / 128 * grid_columns + c / 128)]);
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_EQ(stage(**source, parent + "in_proj_z.weight"), z_numbers);
}

TEST(KvScales, AreFoundInEverySpelling) {
  struct Spelling {
    const char *key, *value;
  };
  for (const Spelling& s :
       {Spelling{"k_scale", "v_scale"}, Spelling{"attn.k_scale", "attn.v_scale"}, Spelling{"k_proj.k_scale", "v_proj.v_scale"},
        Spelling{"k_proj.output_scale", "v_proj.output_scale"}, Spelling{"qkv_proj.k_scale", "qkv_proj.v_scale"}}) {
    MadeCheckpoint made(SynthScheme::kBlockFp8);
    const std::string attention = std::string(testing::kPrefix) + "layers.3.self_attn.";
    made.add(attention + s.key, DType::kF32, {}, {0.5f});
    made.add(attention + s.value, DType::kBF16, {2}, {0.25f, 2.0f});  // one per kv head
    const auto source = made.open();
    ASSERT_OK(source);
    EXPECT_EQ((*source)->inventory().kv_scales.at(3).k, std::vector<float>{0.5f}) << s.key;
    EXPECT_EQ((*source)->inventory().kv_scales.at(3).v, (std::vector<float>{0.25f, 2.0f})) << s.value;
  }
}

TEST(KvScales, MayBeOneForBoth) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.add("mtp.layers.0.self_attn.kv_scale", DType::kF32, {1}, {0.5f});
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_EQ((*source)->inventory().kv_scales.at(-1).k, std::vector<float>{0.5f});
  EXPECT_EQ((*source)->inventory().kv_scales.at(-1).v, std::vector<float>{0.5f});
}

TEST(KvScales, OfQueriesAndOfLayersWithoutACacheAreIgnored) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const std::string q = std::string(testing::kPrefix) + "layers.3.self_attn.q_scale",
                    gdn = std::string(testing::kPrefix) + "layers.0.self_attn.k_scale";
  made.add(q, DType::kF32, {1});
  made.add(gdn, DType::kF32, {1});
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_TRUE((*source)->inventory().kv_scales.empty());
  EXPECT_THAT((*source)->inventory().ignored, ::testing::UnorderedElementsAre(q, gdn));
}

}  // namespace
}  // namespace quern::weights
