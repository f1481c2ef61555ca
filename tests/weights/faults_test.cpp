// Checkpoints that are wrong in one way each, and what a user reads about it (cases.md, LOAD and KVQ).

#include <fstream>
#include <string>

#include "weights/made_checkpoint.h"

namespace quern::weights {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kPrefix;
using testing::MadeCheckpoint;
using ::testing::Not;
using testing::SynthOptions;
using tools::SynthScheme;

std::string stored(std::string_view canonical) { return std::string(kPrefix) + std::string(canonical); }

TEST(CheckpointFaults, DirectoryWithoutWeightsNamesWhatItFound) {
  const quern::testing::TemporaryFolder folder;
  MadeCheckpoint made(SynthScheme::kBf16);
  EXPECT_THAT(open_weights(folder.path(), made.config(), {}).error().message,
              HasSubstr("expected model.safetensors.index.json or model.safetensors, found no weights of any kind"));
  ASSERT_OK(write_file(folder.path() / "model-q4.gguf", "x"));
  ASSERT_OK(write_file(folder.path() / "pytorch_model.bin", "x"));
  EXPECT_THAT(open_weights(folder.path(), made.config(), {}).error().message, HasSubstr("found model-q4.gguf, pytorch_model.bin"));
}

TEST(CheckpointFaults, IndexMayNotLeaveTheDirectory) {
  for (const char* shard : {"../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", ".", "", "a\\..\\b"}) {
    MadeCheckpoint made(SynthScheme::kBlockFp8);
    made.plan().index["weight_map"]["lm_head.weight"] = shard;
    EXPECT_THAT(made.error(), HasSubstr(fmt::format("weight_map: \"{}\" leaves the model directory", shard)));
  }
}

TEST(CheckpointFaults, LinksToElsewhereAreFollowed) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.write_files();
  const quern::testing::TemporaryFolder blobs;
  std::filesystem::rename(made.folder() / "outside.safetensors", blobs.path() / "blob");
  std::filesystem::create_symlink(blobs.path() / "blob", made.folder() / "outside.safetensors");
  EXPECT_OK(open_weights(made.folder(), made.config(), {}));
}

TEST(CheckpointFaults, EveryMissingOrBrokenShardIsListed) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.write_files();
  std::filesystem::remove(made.folder() / "layers-0.safetensors");
  std::filesystem::resize_file(made.folder() / "layers-1.safetensors",
                               std::filesystem::file_size(made.folder() / "layers-1.safetensors") - 100);
  ASSERT_OK(write_file(made.folder() / "layers-2.safetensors", "version https://git-lfs.github.com/spec/v1\n"));
  const auto source = open_weights(made.folder(), made.config(), {});
  ASSERT_FALSE(source.has_value());
  EXPECT_THAT(source.error().message,
              AllOf(HasSubstr("cannot load"), HasSubstr("3 faults"), HasSubstr("layers-0.safetensors: No such file"),
                    HasSubstr("is it truncated?"), HasSubstr("Git LFS pointer")));
  EXPECT_THAT(source.error().message, Not(HasSubstr("missing")));  // what the shards would have held proves nothing
}

TEST(CheckpointFaults, IndexThatLies) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.plan().index["weight_map"]["ghost.weight"] = "outside.safetensors";
  EXPECT_THAT(made.error(), HasSubstr("ghost.weight: the index says it is in outside.safetensors, which does not have it"));
  for (const char* text : {"", "[]", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 3}}"}) {
    made.write_files();
    ASSERT_OK(write_file(made.folder() / "model.safetensors.index.json", text));
    EXPECT_THAT(open_weights(made.folder(), made.config(), {}).error().message, HasSubstr("model.safetensors.index.json: ")) << text;
  }
}

TEST(CheckpointFaults, TensorInTwoFiles) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.plan().files[0].tensors.push_back(made.tensor("lm_head.weight"));
  EXPECT_THAT(made.error(), HasSubstr("lm_head.weight: in "));
}

TEST(CheckpointFaults, SameTensorUnderTwoPrefixes) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.add("model.norm.weight", DType::kBF16, {160});
  EXPECT_THAT(made.error(), HasSubstr("model.language_model.norm.weight and model.norm.weight are the same tensor"));
}

TEST(CheckpointFaults, AllFaultsComeInOneMessage) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  ASSERT_TRUE(made.erase("layers.0.mlp.up_proj.weight"));
  ASSERT_TRUE(made.erase("layers.0.mlp.up_proj.weight_scale_inv"));
  made.tensor("layers.1.mlp.down_proj.weight").shape = {288, 160};
  ASSERT_TRUE(made.erase("layers.2.mlp.gate_proj.weight_scale_inv"));
  made.tensor("layers.3.self_attn.q_norm.weight").shape = {2, 16};
  made.tensor("layers.3.self_attn.v_proj.weight_scale_inv").shape = {2, 1};
  const std::string message = made.error();
  EXPECT_THAT(message, HasSubstr("5 faults"));
  EXPECT_THAT(message, HasSubstr("layers.0.mlp.up_proj.weight: missing"));
  EXPECT_THAT(message, HasSubstr(stored("layers.1.mlp.down_proj.weight: expected [160, 288], the file has F8_E4M3 [288, 160]")));
  EXPECT_THAT(message, HasSubstr(stored("layers.2.mlp.gate_proj.weight: stored as F8_E4M3 without weight_scale_inv or weight_scale")));
  EXPECT_THAT(message, HasSubstr(stored("layers.3.self_attn.q_norm.weight: expected [32], the file has BF16 [2, 16]")));
  EXPECT_THAT(message, HasSubstr(stored("layers.3.self_attn.v_proj.weight_scale_inv: shape [2, 1] fits no scheme of a weight [64, 160]")));
}

TEST(CheckpointFaults, LongListsAreCutWithACount) {
  MadeCheckpoint made(SynthScheme::kBf16);
  for (int layer = 0; layer < 4; ++layer) {
    for (const char* name : {"mlp.up_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight",
                             "post_attention_layernorm.weight"}) {
      ASSERT_TRUE(made.erase(fmt::format("layers.{}.{}", layer, name)));
    }
  }
  ASSERT_TRUE(made.erase("norm.weight"));
  EXPECT_THAT(made.error(), AllOf(HasSubstr("21 faults"), HasSubstr("and 1 more")));
}

TEST(CheckpointFaults, HeadThatIsNeitherStoredNorTied) {
  MadeCheckpoint made(SynthScheme::kBf16);
  ASSERT_TRUE(made.erase("lm_head.weight"));
  EXPECT_THAT(made.error(), HasSubstr("lm_head.weight: missing, and tie_word_embeddings is false in config.json"));
  made.config().tie_word_embeddings = true;
  EXPECT_OK(made.open());
}

TEST(CheckpointFaults, HeadThatIsStoredAndTiedIsReported) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.config().tie_word_embeddings = true;
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_THAT((*source)->inventory().ignored, Contains("lm_head.weight"));
  EXPECT_EQ((*source)->inventory().linears.count("lm_head.weight"), 0u);
}

TEST(CheckpointFaults, Fp8WithoutMetadataIsUsedWithItsScales) {
  MadeCheckpoint made(SynthScheme::kStaticFp8);
  made.config().quantization = nullptr;
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_THAT((*source)->inventory().notes,
              Contains(HasSubstr("config.json has no quantization_config, but 16 weights are stored in FP8")));
  EXPECT_TRUE((*source)->inventory().linears.at("layers.0.mlp.up_proj.weight").static_input_scale);
  EXPECT_FALSE((*source)->inventory().fp8_kv_declared);
}

TEST(CheckpointFaults, ScaleOfAnUnquantizedWeightIsReported) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.add("lm_head.weight_scale_inv", DType::kBF16, {3, 2});
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_THAT((*source)->inventory().ignored, Contains("lm_head.weight_scale_inv"));
  EXPECT_THAT((*source)->inventory().notes, Contains(HasSubstr("1 scales are not used, such as lm_head.weight_scale_inv")));
  LoadOptions strict;
  strict.strict = true;
  EXPECT_THAT(made.error(strict), HasSubstr("lm_head.weight_scale_inv: a scale of a weight that is not stored as FP8"));
}

TEST(CheckpointFaults, ScaleThatBelongsToNothing) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.add("mtp.layers.0.shared_head.head.weight_scale", DType::kBF16, {1});
  made.add(stored("layers.3.self_attn.p_scale"), DType::kBF16, {1});
  EXPECT_THAT(made.error(), AllOf(HasSubstr("mtp.layers.0.shared_head.head.weight_scale: nothing uses this scale"),
                                  HasSubstr("layers.3.self_attn.p_scale: nothing uses")));
}

TEST(CheckpointFaults, UnknownTensorsAreWarningsUnlessStrict) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.add("model.language_model.layers.0.mystery", DType::kF32, {3});
  made.add("model.visual.blocks.0.norm1.weight", DType::kBF16, {3});
  made.add("model.language_model.rotary_emb.inv_freq", DType::kF32, {3});
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_THAT((*source)->inventory().unknown, ::testing::ElementsAre(stored("layers.0.mystery")));
  EXPECT_THAT((*source)->inventory().ignored,
              ::testing::UnorderedElementsAre("model.visual.blocks.0.norm1.weight", stored("rotary_emb.inv_freq")));
  LoadOptions strict;
  strict.strict = true;
  EXPECT_THAT(made.error(strict), HasSubstr("layers.0.mystery: unknown tensor"));
}

TEST(CheckpointFaults, BiasesAreNoWarnings) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.add(stored("layers.0.mlp.up_proj.bias"), DType::kBF16, {288});
  EXPECT_THAT(made.error(), HasSubstr("layers.0.mlp.up_proj.bias: no linear layer of this family has a bias"));
}

TEST(CheckpointFaults, PackedAndIntegerWeightsAreNamed) {
  MadeCheckpoint made(SynthScheme::kBf16);
  ASSERT_TRUE(made.erase("layers.0.mlp.up_proj.weight"));
  made.add(stored("layers.0.mlp.up_proj.qweight"), DType::kI32, {20, 288});
  made.tensor("layers.1.mlp.up_proj.weight").dtype = DType::kU8;
  made.tensor("layers.1.mlp.up_proj.weight").fill = [](int64_t, int64_t, std::byte*) {};
  made.tensor("layers.2.mlp.up_proj.weight").dtype = DType::kE5M2;
  made.tensor("layers.2.mlp.up_proj.weight").fill = [](int64_t, int64_t, std::byte*) {};
  EXPECT_THAT(
      made.error(),
      AllOf(HasSubstr("layers.0.mlp.up_proj.qweight is there: weights packed to fewer than 8 bits"),
            HasSubstr(stored("layers.1.mlp.up_proj.weight: stored as U8, which is not supported; quern loads BF16, F16, F32 and F8_E4M3")),
            HasSubstr("stored as F8_E5M2")));
}

TEST(CheckpointFaults, TwoScalesForOneWeight) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.add(stored("layers.0.mlp.up_proj.weight_scale"), DType::kF32, {1});
  EXPECT_THAT(made.error(), AllOf(HasSubstr("has two scales"), Not(HasSubstr("faults"))));
}

TEST(CheckpointFaults, StaticActivationsWithoutTheirScale) {
  MadeCheckpoint made(SynthScheme::kStaticFp8);
  ASSERT_TRUE(made.erase("layers.0.mlp.up_proj.input_scale"));
  EXPECT_THAT(made.error(), HasSubstr("layers.0.mlp.up_proj.input_scale: missing; quantization_config declares static activations"));
}

TEST(CheckpointFaults, DisagreementWithTheConfigIsReported) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.config().quantization = *parse_json(R"({"quant_method": "fp8", "weight_block_size": [128, 128]})", "config");
  const auto source = made.open();
  ASSERT_OK(source);
  EXPECT_THAT((*source)->inventory().notes, Contains(HasSubstr("is declared block fp8 and stored as bf16; what is stored decides")));
}

TEST(CheckpointFaults, AgreementWithTheConfigIsSilent) {
  for (size_t i = 0; i < tools::synth_scheme_names().size(); ++i) {
    const auto scheme = static_cast<SynthScheme>(i);
    // The embedding table cannot be declared, and a hybrid directory has two releases in it.
    if (scheme == SynthScheme::kBlockFp8Vocab || scheme == SynthScheme::kHybrid) continue;
    MadeCheckpoint made(scheme);
    const auto source = made.open();
    ASSERT_OK(source);
    EXPECT_THAT((*source)->inventory().notes, IsEmpty()) << tools::synth_scheme_names()[i];
    const auto planned = inventory_from_config(made.config(), {});
    ASSERT_OK(planned);
    EXPECT_EQ(planned->linears, (*source)->inventory().linears) << tools::synth_scheme_names()[i];
    EXPECT_EQ(planned->vectors, (*source)->inventory().vectors);
  }
}

TEST(CheckpointFaults, UnsupportedFormatIsSaidBeforeAnyFile) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.config().quantization = Json{{"quant_method", "awq"}};
  const auto source = open_weights("/nowhere", made.config(), {});
  ASSERT_FALSE(source.has_value());
  EXPECT_EQ(source.error().code, ErrorCode::kUnsupported);
}

TEST(CheckpointFaults, MtpHead) {
  LoadOptions with, without;
  with.with_mtp = true;
  without.with_mtp = false;
  MadeCheckpoint none(SynthScheme::kBf16, [](SynthOptions& options) { options.with_mtp = false; });
  const auto source = none.open();
  ASSERT_OK(source);
  EXPECT_FALSE((*source)->inventory().has_mtp);
  EXPECT_THAT(none.error(with), HasSubstr("the MTP head was asked for, and the checkpoint has none"));

  MadeCheckpoint some(SynthScheme::kBlockFp8);
  const auto left_out = some.open(without);
  ASSERT_OK(left_out);
  EXPECT_FALSE((*left_out)->inventory().has_mtp);
  EXPECT_EQ((*left_out)->inventory().linears.count("mtp.fc.weight"), 0u);
  EXPECT_EQ((*left_out)->inventory().ignored.size(), 22u);
  ASSERT_TRUE(some.erase("mtp.fc.weight"));
  some.plan().index["weight_map"].erase("mtp.fc.weight");
  EXPECT_THAT(some.error(), HasSubstr("mtp.fc.weight: missing"));
}

TEST(CheckpointFaults, KvScalesThatCannotBe) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  const std::string attention = stored("layers.3.self_attn.");
  made.add(attention + "k_scale", DType::kF32, {3}, {1.0f});
  made.add(attention + "v_scale", DType::kF32, {1}, {-1.0f});
  made.add(attention + "attn.k_scale", DType::kF32, {1}, {std::numeric_limits<float>::quiet_NaN()});
  made.add("mtp.layers.0.self_attn.k_scale", DType::kF32, {1}, {1.0f});
  made.add("mtp.layers.0.self_attn.k_proj.k_scale", DType::kF32, {1}, {2.0f});
  EXPECT_THAT(made.error(),
              AllOf(HasSubstr("expected one element or 2, one per kv head, the file has [3]"), HasSubstr("a scale of -1 is not above 0"),
                    HasSubstr("element 0 is nan"), HasSubstr("another spelling of the same scale has another value")));
}

std::string staging_error(MadeCheckpoint& made, std::string_view name, const Slice& slice = {}) {
  const auto source = made.open();
  if (!source) return source.error().message;
  quern::testing::HostDevice device(true);
  auto stream = device.make_stream();
  if (name.find("norm") != std::string_view::npos) {
    const auto staged = (*source)->vector(name, {}, device, **stream);
    return staged ? "no error" : staged.error().message;
  }
  const auto staged = (*source)->linear(name, slice, device, **stream);
  return staged ? "no error" : staged.error().message;
}

TEST(DamagedWeights, NanCodesAreRefusedByNameAndPosition) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.put("layers.0.mlp.up_proj.weight", 7 * 160 + 3, {0xff});
  const std::string expected = stored("layers.0.mlp.up_proj.weight: element [7, 3] is not a finite number (e4m3 code 0xff)");
  EXPECT_THAT(staging_error(made, "layers.0.mlp.up_proj.weight"), HasSubstr(expected));
  EXPECT_THAT(staging_error(made, "layers.0.mlp.up_proj.weight", {5, 10, 2, 9}), HasSubstr(expected));
  EXPECT_EQ(staging_error(made, "layers.0.mlp.up_proj.weight", {8, -1, 0, -1}), "no error");
}

TEST(DamagedWeights, NonFiniteBf16IsRefusedByNameAndPosition) {
  MadeCheckpoint made(SynthScheme::kBf16);
  made.put("layers.0.mlp.up_proj.weight", 288 * 160 - 1, {0x80, 0x7f});  // +inf
  made.put("layers.0.input_layernorm.weight", 5, {0xc0, 0xff});          // NaN
  EXPECT_THAT(staging_error(made, "layers.0.mlp.up_proj.weight"), HasSubstr("element [287, 159] is not a finite number"));
  EXPECT_THAT(staging_error(made, "layers.0.input_layernorm.weight"),
              HasSubstr("layers.0.input_layernorm.weight: element 5 is not a finite number"));
}

TEST(DamagedWeights, NonFiniteScalesAreRefused) {
  MadeCheckpoint made(SynthScheme::kBlockFp8);
  made.put("layers.0.mlp.up_proj.weight_scale_inv", 3, {0x80, 0x7f});
  EXPECT_THAT(staging_error(made, "layers.0.mlp.up_proj.weight"), HasSubstr("layers.0.mlp.up_proj.weight_scale_inv: element 3 is inf"));
  MadeCheckpoint input(SynthScheme::kStaticFp8);
  input.put("layers.0.mlp.up_proj.input_scale", 0, {0, 0});
  EXPECT_THAT(staging_error(input, "layers.0.mlp.up_proj.weight"),
              HasSubstr("layers.0.mlp.up_proj.input_scale: a scale of 0 is not above 0"));
}

}  // namespace
}  // namespace quern::weights
