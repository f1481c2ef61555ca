#include "weights/declared.h"

#include "model/config.h"
#include "model/tensors.h"
#include "support/test_support.h"
#include "weights/names.h"
#include "weights/source.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;
using ::testing::HasSubstr;

DeclaredQuantization declared_in(const char* file) {
  const auto json = read_json_file(quern::testing::data_path("qwen3.6-27b") / file);
  return std::move(DeclaredQuantization::parse(json->at("quantization_config"))).value();
}

Result<DeclaredQuantization> parse(std::string_view text) { return DeclaredQuantization::parse(*parse_json(text, "test")); }
std::string error_of(std::string_view text) {
  const auto parsed = parse(text);
  return parsed ? "no error" : parsed.error().message;
}

TEST(DeclaredQuantization, MatchesWholeNamesInTheReleasedList) {
  const DeclaredQuantization declared = declared_in("config.fp8.json");
  // The list names "mlp.gate" and "in_proj_ba"; as substrings they would hit these.
  for (const char* module : {"layers.0.mlp.gate_proj", "layers.62.mlp.gate_proj", "mtp.layers.0.mlp.gate_proj",
                             "layers.0.linear_attn.in_proj_qkv", "layers.3.self_attn.k_proj", "layers.3.self_attn.q_proj"}) {
    const auto scheme = declared.scheme_of(module);
    ASSERT_TRUE(scheme.has_value()) << module;
    EXPECT_EQ(scheme->scheme, WeightScheme::kFp8Block) << module;
    EXPECT_FALSE(scheme->static_input_scale);
  }
  for (const char* module : {"lm_head", "embed_tokens", "mtp.fc", "layers.0.linear_attn.in_proj_a", "layers.0.linear_attn.in_proj_b"}) {
    EXPECT_FALSE(declared.scheme_of(module).has_value()) << module;
  }
}

TEST(DeclaredQuantization, ReadsStaticCompressedTensors) {
  const DeclaredQuantization declared = declared_in("config.static.json");
  EXPECT_TRUE(declared.fp8_kv());
  const auto scheme = declared.scheme_of("layers.3.self_attn.o_proj");
  ASSERT_TRUE(scheme.has_value());
  EXPECT_EQ(scheme->scheme, WeightScheme::kFp8Tensor);
  EXPECT_TRUE(scheme->static_input_scale);
  for (const char* module : {"layers.0.linear_attn.out_proj", "lm_head", "embed_tokens", "mtp.layers.0.mlp.up_proj", "mtp.fc"}) {
    EXPECT_FALSE(declared.scheme_of(module).has_value()) << module;
  }
}

TEST(DeclaredQuantization, PrefersNamesToExpressionsToClasses) {
  const auto declared = parse(R"({"quant_method": "compressed-tensors", "config_groups": {
    "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "input_activations": null},
    "b": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    "c": {"targets": ["model.language_model.layers.1.mlp.up_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}}},
    "ignore": ["re:model\\.language_model\\.layers\\.2\\..*"]})");
  ASSERT_OK(declared);
  EXPECT_EQ(declared->scheme_of("layers.0.self_attn.q_proj")->scheme, WeightScheme::kFp8Tensor);
  EXPECT_FALSE(declared->scheme_of("layers.0.self_attn.q_proj")->static_input_scale);
  EXPECT_EQ(declared->scheme_of("layers.0.mlp.up_proj")->scheme, WeightScheme::kFp8Channel);
  EXPECT_EQ(declared->scheme_of("layers.1.mlp.up_proj")->scheme, WeightScheme::kFp8Block);
  EXPECT_FALSE(declared->scheme_of("layers.2.mlp.up_proj").has_value());
  EXPECT_TRUE(declared->scheme_of("layers.20.mlp.up_proj").has_value());
}

TEST(DeclaredQuantization, ReadsModelOptInEveryShape) {
  for (
      const char* text :
      {R"({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*in_proj_a", "mtp*"]})",
       R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*in_proj_a", "mtp*"]}})"}) {
    const auto declared = parse(text);
    ASSERT_OK(declared);
    EXPECT_TRUE(declared->fp8_kv());
    EXPECT_EQ(declared->scheme_of("layers.0.mlp.up_proj")->scheme, WeightScheme::kFp8Tensor);
    EXPECT_TRUE(declared->scheme_of("layers.0.mlp.up_proj")->static_input_scale);
    for (const char* module : {"lm_head", "layers.0.linear_attn.in_proj_a", "mtp.layers.0.mlp.up_proj"})
      EXPECT_FALSE(declared->scheme_of(module).has_value()) << module;
  }
}

TEST(DeclaredQuantization, NamesTheFormatThatItRefusesAndWhatIsSupported) {
  struct Case {
    const char* config;
    const char* message;
  };
  const Case cases[] = {
      {R"({"quant_method": "gptq", "bits": 4})", "quant_method \"gptq\" is not supported; quern loads BF16 checkpoints and FP8 ones"},
      {R"({"quant_method": "awq"})", "\"awq\""},
      {R"({"quant_method": "bitsandbytes"})", "\"bitsandbytes\""},
      {R"({"quant_method": "mxfp4"})", "\"mxfp4\""},
      {R"({})", "quant_method (none)"},
      {R"({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [64, 64]})", "2 faults"},
      {R"({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"})", "activation_scheme"},
      {R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})", "quant_algo NVFP4 of ModelOpt"},
      {R"({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"})", "kv_cache_quant_algo NVFP4"},
      {R"({"quant_method": "compressed-tensors"})", "config_groups: expected an object"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}}})",
       "config_groups.g: weights of type \"float\" with 4 bits (format nvfp4-pack-quantized) are not supported"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}})",
       "type \"int\" with 8 bits"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": "fp8"}}})", "with no bits"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}})",
       "weights.strategy \"group\""},
      {R"({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}})",
       "block_structure null"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:("]})", "not a regular expression"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "int"}})",
       "kv_cache_scheme"},
      {R"({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"config_groups": {"u": 1}}})",
       "transform_config is not supported"},
  };
  for (const Case& c : cases) EXPECT_THAT(error_of(c.config), HasSubstr(c.message)) << c.config;
}

TEST(Names, KnowTheThreePrefixesAndTheVisionTower) {
  for (const char* name : {"model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight",
                           "model.layers.0.mlp.up_proj.weight"}) {
    EXPECT_EQ(canonical_name(name), "layers.0.mlp.up_proj.weight");
    EXPECT_EQ(name_kind(name), NameKind::kText);
  }
  EXPECT_EQ(canonical_name("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(canonical_name("mtp.fc.weight"), "mtp.fc.weight");
  EXPECT_EQ(name_kind("model.visual.patch_embed.proj.weight"), NameKind::kVision);
  EXPECT_EQ(name_kind("visual.pos_embed.weight"), NameKind::kVision);
  EXPECT_EQ(name_kind("model.layers.0.self_attn.rotary_emb.inv_freq"), NameKind::kRotary);
}

TEST(Names, CoverWholeDottedPartsOnly) {
  EXPECT_TRUE(covers("layers.0.mlp", "layers.0.mlp.gate_proj"));
  EXPECT_TRUE(covers("lm_head", "lm_head"));
  EXPECT_FALSE(covers("layers.0.mlp.gate", "layers.0.mlp.gate_proj"));
  EXPECT_FALSE(covers("layers.1", "layers.10.mlp.gate_proj"));
  EXPECT_FALSE(covers("layers.0.mlp.gate_proj", "layers.0.mlp"));
}

struct Total {
  const char* file;
  bool with_mtp;
  double gib;  // model-spec.md section 5
};

TEST(InventoryFromConfig, AddsUpToTheKnownSizesOf27B) {
  for (const Total& t :
       {Total{"config.json", false, 50.10}, Total{"config.json", true, 50.10 + 0.79}, Total{"config.fp8.json", false, 27.44},
        Total{"config.fp8.json", true, 27.44 + 0.44}, Total{"config.static.json", false, 32.60}}) {
    SCOPED_TRACE(t.file);
    const auto json = read_json_file(quern::testing::data_path("qwen3.6-27b") / t.file);
    const auto config = model::parse_config(*json, "Qwen3.6-27B");
    ASSERT_OK(config);
    LoadOptions options;
    options.with_mtp = t.with_mtp;
    const auto inventory = inventory_from_config(*config, options);
    ASSERT_OK(inventory);
    EXPECT_NEAR(static_cast<double>(inventory->stored_bytes) / (1 << 30), t.gib, 0.011);
    EXPECT_EQ(inventory->has_mtp, t.with_mtp);
    EXPECT_EQ(inventory->fp8_kv_declared, std::string(t.file) == "config.static.json");
  }
}

TEST(InventoryFromConfig, QuantizesBf16ConfigsAtRuntime) {
  const auto json = read_json_file(quern::testing::data_path("qwen3.6-27b/config.json"));
  const auto config = model::parse_config(*json, "Qwen3.6-27B");
  LoadOptions options;
  options.quantize_fp8 = true;
  const auto inventory = inventory_from_config(*config, options);
  ASSERT_OK(inventory);
  EXPECT_EQ(inventory->linears.at("layers.0.mlp.up_proj.weight").scheme, WeightScheme::kFp8Channel);
  EXPECT_EQ(inventory->linears.at("mtp.layers.0.mlp.up_proj.weight").scheme, WeightScheme::kFp8Channel);
  for (const char* name : {"lm_head.weight", "embed_tokens.weight", "mtp.fc.weight", "layers.0.linear_attn.in_proj_a.weight"}) {
    EXPECT_EQ(inventory->linears.at(name).scheme, WeightScheme::kBF16) << name;
  }
}

}  // namespace
}  // namespace quern::weights
